"""The attention that all fakes share: runs of keys, one softmax each, float32."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

# Keys that a kernel loads at once: where values are not cleared it reads to a tile's end.
TILE = 128


class Run(NamedTuple):
    """Keys and values [L, H, D] of one run, and the values after it that a whole tile would
    touch."""

    key: Tensor
    value: Tensor
    after: Tensor


class Answer(NamedTuple):
    """out [T, Hq, D] float32; lse [Hq, T], natural; empty [T] rows that saw no key."""

    out: Tensor
    lse: Tensor
    empty: Tensor


def need(condition: bool, text: str) -> None:
    """What a C++ check of a library does."""
    if not condition:
        raise RuntimeError(text)


def index(tensor: Tensor, name: str) -> list[int]:
    """An index tensor as the kernels insist on it."""
    need(tensor.dtype == torch.int32, f"{name} must have dtype int32")
    need(tensor.is_contiguous(), f"{name} must be contiguous")
    return [int(value) for value in tensor.tolist()]


def halves(*tensors: Tensor) -> None:
    """The dtypes and the last stride that every flash kernel wants."""
    dtype = tensors[0].dtype
    need(
        dtype in (torch.float16, torch.bfloat16),
        "FlashAttention only support fp16 and bf16 data type",
    )
    for tensor in tensors:
        need(tensor.dtype == dtype, "query, key and value must have the same dtype")
        need(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")


def plain_runs(key: Tensor, value: Tensor, starts: list[int], lengths: list[int]) -> list[Run]:
    """Runs of a contiguous buffer."""
    runs = []
    for start, length in zip(starts, lengths, strict=True):
        end = start + length
        tile_end = start + -(-length // TILE) * TILE
        runs.append(Run(key[start:end], value[start:end], value[end:tile_end]))
    return runs


def paged_runs(key: Tensor, value: Tensor, table: Tensor, lengths: list[int]) -> list[Run]:
    """Runs of pages [pages, p, H, D] through a table int32 [B, C]; a page id out of range is an
    error here."""
    need(table.dtype == torch.int32, "block_table must have dtype int32")
    need(table.stride(-1) == 1, "block_table must have contiguous last dimension")
    size, runs = key.shape[1], []
    for line, length in zip(table.tolist(), lengths, strict=True):
        pages = line[: -(-length // size)]
        need(all(0 <= page < key.shape[0] for page in pages), "page id out of range")
        keys = key[pages].flatten(0, 1)
        values = value[pages].flatten(0, 1)
        runs.append(Run(keys[:length], values[:length], values[length:]))
    return runs


def attend(
    query: Tensor,
    runs: list[Run],
    starts_q: list[int],
    *,
    scale: float,
    left: int = -1,
    right: int = -1,
    clears: bool = True,
    bias: list[Tensor] | None = None,
) -> Answer:
    """Every query of run i against its keys; windows are aligned to the run's end; `bias[i]` [Lq,
    L] is added."""
    tokens, heads, _ = query.shape
    width = runs[0].value.shape[-1]
    out = torch.zeros(tokens, heads, width)
    lse = torch.full((heads, tokens), -math.inf)
    empty = torch.ones(tokens, dtype=torch.bool)
    for number, run in enumerate(runs):
        rows = slice(starts_q[number], starts_q[number + 1])
        count, length = rows.stop - rows.start, run.key.shape[0]
        if count == 0 or length == 0:
            continue
        group = heads // run.key.shape[1]
        key = run.key.float().repeat_interleave(group, dim=1)
        value = run.value.float().repeat_interleave(group, dim=1)
        logit = torch.einsum("thd,khd->htk", query[rows].float(), key) * scale
        if bias is not None:
            logit = logit + bias[number]
        own = torch.arange(count)[:, None] + length - count
        at = torch.arange(length)[None]
        seen = torch.ones(count, length, dtype=torch.bool)
        if left >= 0:
            seen &= at >= own - left
        if right >= 0:
            seen &= at <= own + right
        logit = logit.masked_fill(~seen, -math.inf)
        if bias is not None:
            seen = seen & ~torch.isneginf(bias[number])
        some = seen.any(dim=1)
        weight = torch.where(some[None, :, None], logit.softmax(dim=-1), 0.0)
        out[rows] = torch.einsum("htk,khd->thd", weight, value)
        if not clears and not bool(run.after.isfinite().all()):
            out[rows] = math.nan
        lse[:, rows] = torch.logsumexp(logit, dim=-1)
        empty[rows] = ~some
    lse = lse.masked_fill(empty, -math.inf)
    return Answer(out.masked_fill(empty[:, None, None], 0.0), lse, empty)


def differences(starts: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(starts)]
