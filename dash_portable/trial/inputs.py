"""What one layer would be handed for a document: random, with a structure that a reader would have.

Every place of a page shows something; what is near shows something alike; a token of the answer
looks for the place it reads, from the top of its page to the bottom. Pages resemble each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dash_portable.config import DashConfig
from dash_portable.document import IMAGE, MARKER, Document

_PLACES = 12  # what a page shows changes about so often from top to bottom
_SHARED = 0.5  # how much of it other pages show at the same height, too
_NOISE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """q [T, Hq, D], k and v [T, H, D], iq and ik [T, D], head_cls [D], before rotation."""

    q: Tensor
    k: Tensor
    v: Tensor
    iq: Tensor
    ik: Tensor
    head_cls: Tensor

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, iq, ik of tokens `first .. last`."""
        q, k, v, iq, ik = (x[first:last] for x in (self.q, self.k, self.v, self.iq, self.ik))
        return q, k, v, iq, ik


def heights(document: Document) -> tuple[list[int], list[float]]:
    """Which page each token deals with (0 for none), and how far down it, from 0 to 1."""
    page, pages, where = 0, list[int](), list[int]()
    last = max((i for i, role in enumerate(document.prompt) if role == IMAGE), default=-1)
    for i, role in enumerate(document.roles):
        if i in (last + 1, len(document.prompt)):
            page = 0
        page += role == MARKER
        where.append(where[-1] + 1 if pages and pages[-1] == page else 0)
        pages.append(page)
    # One page has two runs, in the prompt and in the answer; each goes from its top to its bottom.
    long = [0] * len(where)
    run = 1
    for i in reversed(range(len(where))):
        run = where[i] + 1 if i + 1 == len(where) or where[i + 1] == 0 else run
        long[i] = run
    return pages, [at / length for at, length in zip(where, long, strict=True)]


def layer_inputs(
    document: Document,
    config: DashConfig,
    *,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    alike: bool = True,
) -> LayerInputs:
    """Inputs of all tokens of a document; the same numbers on every device.

    alike   neighbours show alike things; False: each row selects at random, the worst case
    """
    random = torch.Generator().manual_seed(seed)
    tokens, dim = len(document), config.index_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float32)

    shown = _shown(document, dim, random) if alike else normal(tokens, dim)
    # Pairs that turn slowly keep what they say over a page; fast ones carry mostly noise.
    pair = torch.arange(dim) % (dim // 2)
    weight = torch.tensor([0.15, 1.0], dtype=torch.float32)[(pair > dim // 4).long()]
    asked = shown * weight + _NOISE * normal(tokens, dim)
    offered = (shown if alike else normal(tokens, dim)) * weight + _NOISE * normal(tokens, dim)

    def kept(x: Tensor) -> Tensor:
        return x.to(dtype).to(device)

    return LayerInputs(
        q=kept(normal(tokens, heads, dim)),
        k=kept(normal(tokens, kv_heads, dim)),
        v=kept(normal(tokens, kv_heads, dim)),
        iq=kept(_normed(asked)),
        ik=kept(_normed(offered)),
        head_cls=kept(normal(dim)),
    )


def _normed(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def _shown(document: Document, dim: int, random: torch.Generator) -> Tensor:
    """What each token shows or looks for, `[T, dim]`: smooth along its page."""
    pages, height = heights(document)
    number = max(pages) + 1
    own, common = (
        torch.randn(some, _PLACES + 1, dim, generator=random, dtype=torch.float32)
        for some in (number, 1)
    )
    places = (1 - _SHARED) ** 0.5 * own + _SHARED**0.5 * common
    at = torch.tensor(height, dtype=torch.float32) * _PLACES
    page, below = torch.tensor(pages), at.long()
    part = (at - below).unsqueeze(1)
    return torch.lerp(places[page, below], places[page, below + 1], part)
