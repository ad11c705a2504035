"""Which page is a token on, which number does it have there, and by what angles is it rotated?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_portable.config import DashConfig
from dash_portable.errors import ArgumentError, found_needed

TEXT, IMAGE, MARKER = 0, 1, 2
MAX_PAGES = 65535  # a block's page range is kept in 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The coordinates of a whole prompt of T tokens, int64.

    tok, page, query_page, raw   [T]
    counts, starts               [num_pages + 1]   tokens up to the last image, and the first
                                                   token, of each page
    """

    tok: Tensor
    page: Tensor
    query_page: Tensor
    raw: Tensor
    counts: Tensor
    starts: Tensor

    @property
    def num_pages(self) -> int:
        return len(self.counts) - 1


def check_roles(roles: Tensor, name: str = "roles") -> Tensor:
    """Roles on the host as `[T]` int64; ArgumentError on another rank, type, or value than 0, 1,
    2.
    """
    if not isinstance(roles, Tensor) or roles.layout is not torch.strided or roles.is_meta:
        found = roles.layout if isinstance(roles, Tensor) else type(roles).__name__
        raise found_needed(name, found, "a tensor [T] with values")
    if roles.dim() != 1:
        raise ArgumentError(f"{name}: found {list(roles.shape)}, needed [T]")
    if roles.dtype.is_floating_point or roles.dtype.is_complex or roles.dtype == torch.bool:
        raise ArgumentError(f"{name}: found {roles.dtype}, needed an integer type")
    roles = roles.long()
    if roles.numel() and (int(roles.min()) < TEXT or int(roles.max()) > MARKER):
        bad = roles[(roles < TEXT) | (roles > MARKER)][0]
        raise ArgumentError(
            f"{name}: found {int(bad)}, needed 0 (text), 1 (image) or 2 (page marker)"
        )
    return roles


def roles_of(token_ids: Tensor, config: DashConfig) -> Tensor:
    """Roles `[T]` of token ids `[T]`, by the model's two special ids."""
    if config.image_token_id is None or config.page_token_id is None:
        raise ArgumentError(
            "token_ids: found a configuration without image_token_id and page_token_id, needed both"
        )
    roles = torch.full_like(token_ids, TEXT)
    roles[token_ids == config.image_token_id] = IMAGE
    roles[token_ids == config.page_token_id] = MARKER
    return roles


def _number_within(page: Tensor) -> Tensor:
    """How many earlier tokens have the same page, for each token: `[T]`."""
    order = torch.sort(page, stable=True).indices
    grouped = page[order]
    at = torch.arange(len(page), device=page.device)
    first = torch.ones_like(grouped, dtype=torch.bool)
    first[1:] = grouped[1:] != grouped[:-1]
    begin = torch.where(first, at, torch.zeros_like(at)).cummax(0).values
    tok = torch.empty_like(at)
    tok[order] = at - begin
    return tok


def prompt_coordinates(roles: Tensor) -> Prompt:
    """Coordinates of a prompt from its roles `[T]` (0 text, 1 image, 2 page marker).

    Up to the last image a token is on the page of the last marker before it; after it counting
    begins again with page 0, whose token numbers the instruction continues. A prompt without any
    image is plain text: all of it is page 0 and markers mean nothing.
    ArgumentError for an empty prompt, other roles, or more than 65,535 pages.
    """
    roles = check_roles(roles)
    if not len(roles):
        raise ArgumentError("roles: found no token, needed at least 1")
    images = (roles == IMAGE).nonzero()
    at = torch.arange(len(roles), device=roles.device)
    if not len(images):
        zero = torch.zeros_like(roles)
        none = zero[:1]
        return Prompt(tok=at, page=zero, query_page=zero - 1, raw=zero, counts=none, starts=none)
    last = int(images[-1])
    cum = (roles == MARKER).long().cumsum(0)
    raw = torch.where(at <= last, cum, cum - cum[last])
    page = raw.clamp_min(0)
    num_pages = int(page.max())
    if num_pages > MAX_PAGES:
        raise ArgumentError(f"roles: found {num_pages} pages, needed at most {MAX_PAGES}")
    counts = torch.bincount(page[: last + 1], minlength=num_pages + 1)
    return Prompt(
        tok=_number_within(page),
        page=page,
        query_page=(raw - 1).clamp_min(-1),
        raw=raw,
        counts=counts,
        starts=counts.cumsum(0) - counts,
    )


def prompt_positions(roles: Tensor) -> Tensor:
    """The `positions` of a prompt, as a server keeps them: int32 `[4, T]` on the device of `roles`.

    Rows: token number within the page; page before the clamp to num_pages; num_pages; and, where
    i <= num_pages, `-1 - counts[i]`, else -1 (a value of at least 0 would mean a decoded token).
    A chunk of the prompt passes its slice. Raises as `prompt_coordinates`.

    >>> prompt_positions(torch.tensor([2, 1, 1, 0]))
    tensor([[ 0,  1,  2,  0],
            [ 1,  1,  1,  0],
            [ 1,  1,  1,  1],
            [-1, -4, -1, -1]], dtype=torch.int32)
    """
    prompt = prompt_coordinates(roles)
    extra = torch.full_like(prompt.tok, -1)
    known = min(len(extra), len(prompt.counts))
    extra[:known] -= prompt.counts[:known]
    pages = torch.full_like(prompt.tok, prompt.num_pages)
    return torch.stack([prompt.tok, prompt.raw.clamp_min(0), pages, extra]).int()


def next_coordinates(state: Tensor, role: Tensor, count: Tensor) -> Tensor:
    """Coordinates of the token after one with `state`.

    state   [..., 4]   tok, page, num_pages, query_page of the token before
    role    [...]      of the new token
    count   [...]      tokens up to the last image of page `next_page(state)`

    Gives `[..., 4]`. A marker opens the next page, at the number after that page's prompt tokens;
    its query_page is not clamped. In a sequence without images (no page, no token up to a last
    image) a marker is text.
    """
    tok, page, num_pages, query_page = state.unbind(-1)
    opens = (role == MARKER) & ((num_pages > 0) | (count > 0))
    return torch.stack(
        [
            torch.where(opens, count, tok + 1),
            torch.where(opens, next_page(state), page),
            num_pages,
            query_page + opens.long(),
        ],
        -1,
    )


def next_page(state: Tensor) -> Tensor:
    """The page a marker would open: `[..., 4]` to `[...]`."""
    return torch.minimum(state[..., 1] + 1, state[..., 2])


def frequencies(config: DashConfig, head_dim: int) -> list[float]:
    """Angle per token number of each of the `head_dim / 2 - 1` pairs that turn with it (dash.md's
    "page2d").
    """
    pairs = head_dim // 2 - 1
    return [config.theta ** (-j / pairs) for j in range(pairs)]


def widest(device: torch.device) -> torch.dtype:
    """The widest float type that a device computes in."""
    return torch.float32 if device.type in ("xpu", "mps") else torch.float64


def angle_steps(config: DashConfig, head_dim: int, device: torch.device) -> Tensor:
    """The `frequencies` as `angles` takes them, in the widest type of the device."""
    return torch.tensor(frequencies(config, head_dim), dtype=widest(device), device=device)


def angles(
    tok: Tensor, page: Tensor, config: DashConfig, steps: Tensor, dtype: torch.dtype
) -> Tensor:
    """Rotation angles `[N, head_dim / 2]`, in radians, in `dtype`; `steps` are `angle_steps`.

    The last pair turns with the page, all others with the token number. Products are taken in
    float64 where the device has it: a token number of 10**5 times a float32 frequency is off by
    several thousandths of a radian.
    """
    turning = tok.to(steps.dtype)[:, None] * steps
    paged = (page % config.page_mod).to(steps.dtype)[:, None]
    whole = torch.cat([turning, paged], 1)
    return torch.remainder(whole, 2 * math.pi).to(dtype)
