"""The oracle: the DASH rule in plain torch, on any device, in float64 if asked.

Every function computes in the dtype it is given and knows nothing of paging: keys, values and
summaries come as dense tensors. `eager.py` feeds it from a paged cache and runs it where there is
no Triton; tests compare every kernel and every backend with it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dash_portable.config import DashConfig
from dash_portable.pages import angle_steps, angles

LIMIT = 1e4  # scores and router values are clamped to +-LIMIT; a score that is no number is -LIMIT


def rotate(
    x: Tensor, tok: Tensor, page: Tensor, config: DashConfig, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rotate the pairs `(x[j], x[j + D / 2])` of rows `x [N, ..., D]` by their angles; gives
    `dtype`.
    """
    steps = angle_steps(config, x.shape[-1], tok.device)
    return turn(x, angles(tok, page, config, steps, dtype))


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate rows `x [N, ..., D]` by `angle [N, D / 2]`, in the angle's type."""
    half = x.shape[-1] // 2
    angle = angle.reshape(len(x), *[1] * (x.dim() - 2), half)
    cos, sin = angle.cos(), angle.sin()
    low, high = x[..., :half].to(angle.dtype), x[..., half:].to(angle.dtype)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def summarize(keys: Tensor, head_cls: Tensor) -> Tensor:
    """Summaries `[..., D]` of complete blocks of rotated index keys `[..., block, D]`."""
    score = (keys @ head_cls / math.sqrt(keys.shape[-1])).clamp(-LIMIT, LIMIT)
    weight = (score - score.amax(-1, keepdim=True)).exp()
    weight = weight / weight.sum(-1, keepdim=True).clamp_min(1e-6)
    return (weight.unsqueeze(-1) * keys).sum(-2)


def block_scores(index_query: Tensor, summaries: Tensor, scale: float) -> Tensor:
    """Scores `[N, B]` of blocks with summaries `[B, D]` (or `[N, B, D]`) for rotated rows `[N,
    D]`.
    """
    if summaries.dim() == 2:
        raw = index_query @ summaries.T
    else:
        raw = (summaries @ index_query.unsqueeze(-1)).squeeze(-1)
    width = math.sqrt(index_query.shape[-1])
    score = (raw / width).clamp(-LIMIT, LIMIT) * scale / width
    return score.nan_to_num(-LIMIT, -LIMIT, -LIMIT)


def entmax15(values: Tensor, entries: Tensor | None = None) -> Tensor:
    """Entmax with alpha 1.5 along the last axis, whose values are sorted, largest first.

    The threshold form of Peters, Niculae and Martins (2019): with x half the distance to the
    largest
    value, the threshold of the first i values makes the squares of what exceeds it sum to one.
    `entries [...]`: how many of the values count; None means all.
    """
    x = (values - values[..., :1]) / 2
    i = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    mean = x.cumsum(-1) / i
    square = (x * x).cumsum(-1) / i
    tau = mean - ((1 - i * (square - mean * mean)) / i).clamp_min(0).sqrt()
    counts = tau <= x
    if entries is not None:
        counts = counts & (i <= entries.unsqueeze(-1))
    support = counts.sum(-1, keepdim=True).clamp_min(1)
    return (x - tau.gather(-1, support - 1)).clamp_min(0) ** 2


class Selection(NamedTuple):
    """What a row reads: `ids [N, S]` int32 blocks, best first, -1 where there is none; their `bias
    [N, S]`.
    """

    ids: Tensor
    bias: Tensor


def _sortable(score: Tensor) -> Tensor:
    """Scores `[N, B]` as int64 that sort by score and then by lower block; float64 keeps rank
    only.
    """
    if score.dtype == torch.float64:
        return torch.argsort(
            torch.argsort(score, dim=-1, descending=True, stable=True), dim=-1
        ).neg()
    # Adding zero makes -0.0 equal 0.0. Flipping a negative float's bits makes them sort as
    # integers.
    bits = (score.float() + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (bits << 32) - torch.arange(score.shape[-1], device=score.device)


def select(
    score: Tensor, candidate: Tensor, position: Tensor, config: DashConfig, floor: float
) -> Selection:
    """The blocks a row keeps, from scores `[N, B]`, candidates `[N, B]` (bool), token indices
    `[N]`.

    The `window` best candidates, ties to the lower block, go through entmax; the `topk` best of
    them are kept, each with `bias = (ln max(prior, floor) - mean over the kept) / sigma`.
    """
    blocks = score.shape[1]
    width = config.window
    lowest = torch.iinfo(torch.int64).min
    key = torch.where(candidate, _sortable(score), lowest)
    if blocks < width:
        key = torch.nn.functional.pad(key, (0, width - blocks), value=lowest)
        score = torch.nn.functional.pad(score, (0, width - blocks))
    best, at = key.topk(width, dim=-1)
    there = best > lowest
    # Places that no candidate takes hold -LIMIT, and count as far as the sequence has blocks.
    value = score.gather(-1, at).masked_fill(~there, -LIMIT)
    entries = (position // config.block + 1).clamp_max(width)
    kept = slice(0, config.topk)
    keep = there[:, kept]
    log_prior = entmax15(value, entries)[:, kept].clamp_min(floor).log()
    count = keep.sum(-1, keepdim=True).clamp_min(1)
    mean = log_prior.masked_fill(~keep, 0.0).sum(-1, keepdim=True) / count
    ids = at[:, kept].masked_fill(~keep, -1).int()
    return Selection(ids, ((log_prior - mean) / config.sigma).masked_fill(~keep, 0.0))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    bias: Tensor,
    position: Tensor,
    config: DashConfig,
) -> Tensor:
    """Attention of rows over their selected blocks and their local window, one sequence, dense.

    query         [N, Hq, D]   rotated
    keys, values  [T, H, D]    of tokens 0..T-1, rotated keys
    ids, bias     [N, S]       blocks, -1 for none, and what is added to their scaled logits
    position      [N]          token index of each row, below T

    Gives `[N, Hq, D]` in the dtype of `query`, all arithmetic in it. Of a block that reaches into
    the local window only the part before the window is taken, with its bias; the window has none.
    """
    rows, heads, width = query.shape
    group = heads // keys.shape[1]
    lo = (position - config.local + 1).clamp_min(0)
    within = torch.arange(config.block, device=query.device)
    remote = ids.long()[..., None] * config.block + within  # [N, S, block]
    remote_ok = (ids[..., None] >= 0) & (remote < lo[:, None, None])
    local = lo[:, None] + torch.arange(config.local, device=query.device)
    local_ok = local <= position[:, None]
    token = torch.cat([remote.flatten(1), local], 1)
    ok = torch.cat([remote_ok.flatten(1), local_ok], 1)
    added = torch.cat([bias.repeat_interleave(config.block, 1), bias.new_zeros(local.shape)], 1).to(
        query.dtype
    )
    token = torch.where(ok, token, torch.zeros_like(token))
    grouped = query.view(rows, heads // group, group, width)
    logit = torch.einsum("nhgd,nthd->nhgt", grouped, keys[token]) / math.sqrt(width)
    logit = logit + added[:, None, None]
    weight = logit.masked_fill(~ok[:, None, None], -torch.inf).softmax(-1)
    # A place outside the row's keys has weight zero; what stands there must not count even if NaN.
    seen = values[token].masked_fill(~ok[..., None, None], 0.0)
    return torch.einsum("nhgt,nthd->nhgd", weight, seen).reshape(rows, heads, width)
