"""One meaning for what libraries return, and one softmax over the segments of a row."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["HN", "NH"]
Base = Literal["e", "2"]


def normalise_lse(lse: Tensor, *, layout: Layout = "HN", base: Base = "e") -> Tensor:
    """A library's log-sum-exp as float32, natural log, [H, rows]; a view where nothing has to
    change.

    `layout` and `base` are what the library's version documents: the numbers themselves cannot
    tell.
    """
    lse = lse.float()
    if base == "2":
        lse = lse * math.log(2.0)
    return lse.t() if layout == "NH" else lse


def normalise(
    out: Tensor,
    lse: Tensor,
    length: Tensor,
    *,
    layout: Layout = "HN",
    base: Base = "e",
) -> tuple[Tensor, Tensor]:
    """What every adapter gives: out [rows, Hq, D] and float32 natural-log lse [Hq, rows],
    contiguous.

    out     [rows, Hq, D]              as the library left it
    lse     [Hq, rows] or [rows, Hq]   by `layout`
    length  [rows]                     live keys of each row

    Rows without a key give zeros and -inf. That comes from `length`: libraries answer 0, inf, -inf
    or -5e4 there, and 0 is also a lawful value.
    """
    empty = length == 0
    exact = normalise_lse(lse, layout=layout, base=base)
    return (
        out.masked_fill(empty[:, None, None], 0.0),
        exact.masked_fill(empty[None, :], -math.inf).contiguous(),
    )


def merge_segments(
    out: Tensor, lse: Tensor, bias: Tensor | None = None, length: Tensor | None = None
) -> Tensor:
    """One softmax over all segments of a row, from the segments' own softmaxes.

    out     [N, S + 1, Hq, D]    normalised output of each segment, any float type
    lse     [N, S + 1, Hq]       natural-log mass of each segment, float32; -inf marks an empty one
    bias    [N, S]               added to the lse of the first S segments, or None
    length  [N, S + 1]           live keys; a segment without any is empty whatever its lse says, or
    None

    Gives [N, Hq, D] in out's dtype. An empty segment has no weight, whatever its `out` holds; a row
    without any gives zeros.

    >>> out, lse = torch.ones(2, 3, 4, 8), torch.zeros(2, 3, 4)
    >>> round(merge_segments(out, lse)[0, 0, 0].item(), 6)
    1.0
    """
    mass = lse
    if length is not None:
        mass = mass.masked_fill((length == 0)[:, :, None], -math.inf)
    full = mass > -math.inf
    if bias is not None:
        prior = torch.cat((bias, torch.zeros_like(bias[:, :1])), dim=1)
        mass = torch.where(full, mass + prior[:, :, None], -math.inf)
    top = mass.amax(dim=1, keepdim=True)
    weight = torch.exp(mass - torch.where(top > -math.inf, top, 0.0))
    total = weight.sum(dim=1)
    seen = torch.where(full[..., None], out, 0.0).to(weight.dtype)
    merged = (weight[..., None] * seen).sum(dim=1)
    return (merged / torch.where(total > 0, total, 1.0)[..., None]).to(out.dtype)
