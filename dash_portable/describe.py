"""A step from its arguments: checked, and in the form that kernels read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dash_portable.cache import CacheShape
from dash_portable.checks import (
    INDEX,
    StepValues,
    check_flag,
    check_integer,
    check_tensor,
    host_lengths,
    on_host,
)
from dash_portable.config import DashConfig
from dash_portable.errors import found_needed
from dash_portable.serve import deterministic as wanted_deterministic
from dash_portable.step import Step, Trust, row_positions, rows_of

Lengths = Sequence[int] | Tensor
LEAST_BLOCKS = 32  # the fewest that a step of prompts is planned for
_ALIGNMENT = 16  # bytes: what kernels are compiled for


def trust_of(cached_summaries: bool, prefix_lens: Tensor | None) -> Trust:
    if not check_flag("cached_summaries", cached_summaries):
        return Trust.NONE
    return Trust.CACHED if prefix_lens is None else Trust.PREFIX


def describe(
    query_lens: Lengths,
    seq_lens: Lengths,
    block_table: Tensor,
    slots: Tensor,
    roles: Tensor,
    positions: Tensor | None,
    *,
    config: DashConfig,
    cache: Tensor,
    max_model_len: int | None = None,
    num_heads: int | None = None,
    max_query_len: int | None = None,
    page_table: Tensor | None = None,
    trust: Trust = Trust.CACHED,
    prefix_lens: Tensor | None = None,
    recomputed: bool = False,
    deterministic: bool | None = None,
    graph: bool = False,
) -> Step:
    """Check the arguments of `DashStep.plan` and put them in the form that kernels read."""
    shape = CacheShape.of(cache, config)
    device = cache.device
    heads = shape.kv_heads if num_heads is None else check_integer("num_heads", num_heads)
    if heads < 1 or heads % shape.kv_heads:
        near = max(1, round(heads / shape.kv_heads)) * shape.kv_heads
        raise found_needed(
            "num_heads",
            heads,
            f"a multiple of the cache's {shape.kv_heads} kv heads, such as {near}",
        )
    if max_model_len is not None:
        check_integer("max_model_len", max_model_len, 1)
    if max_query_len is not None:
        check_integer("max_query_len", max_query_len, 0)
    check_flag("graph", graph)
    if deterministic is not None:
        check_flag("deterministic", deterministic)
    host_query = host_lengths("query_lens", query_lens, device)
    host_seq = host_lengths("seq_lens", seq_lens, device)
    seqs = len(query_lens)
    if len(seq_lens) != seqs:
        raise found_needed("seq_lens", f"{len(seq_lens)} numbers", f"{seqs}, as many as query_lens")
    rows = len(check_tensor("slots", slots, ("N",), dtypes=INDEX, device=device))
    if host_query is not None:
        row_seq, query_start = _host_rows(host_query, rows, device)
        longest = max(host_query, default=0)
        if max_query_len is not None and longest > max_query_len:
            raise found_needed("query_lens", longest, f"at most max_query_len ({max_query_len})")
        longest = longest if max_query_len is None else max_query_len
    else:
        if max_query_len is None:
            raise found_needed("max_query_len", None, "a number, since query_lens lies on a device")
        row_seq, query_start = _device_rows(query_lens, rows, seqs, max_query_len)
        longest = max_query_len
    sizes = {"R": seqs, "N": rows}

    def index(name: str, value: Tensor, dims: Sequence[int | str | None]) -> Tensor:
        return check_tensor(name, value, dims, dtypes=INDEX, device=device, sizes=sizes)

    index("roles", roles, ("N",))
    index("block_table", block_table, ("R", None))
    if positions is not None:
        index("positions", positions, (4, "N"))
    if page_table is not None:
        index("page_table", page_table, ("R", None, 2))
        if not page_table.shape[1]:
            raise found_needed("page_table", list(page_table.shape), "at least page 0")
    if prefix_lens is not None:
        index("prefix_lens", prefix_lens, ("R",))
    device_seq = _int32(seq_lens if host_seq is None else host_seq, device, copy=graph)
    own_slots = _aligned(slots.to(torch.int64, copy=graph))
    alone = longest == 1 and rows == seqs
    row_pos = row_positions(own_slots, row_seq, query_start, device_seq, alone=alone)
    longest_seq = block_table.shape[1] * shape.block_size
    if max_model_len is not None:
        longest_seq = min(longest_seq, max_model_len)
    bound = longest_seq
    if not alone:
        if not graph and host_seq is not None:
            bound = min(bound, _longest(host_seq, host_query))
        bound = length_bound(bound, config.block)
    step = Step(
        config=config,
        cache_shape=shape,
        heads=heads,
        dtype=cache.dtype,
        device=device,
        row_seq=row_seq,
        row_pos=row_pos,
        slots=own_slots,
        roles=_int32(roles, device, copy=graph),
        positions=None if positions is None else _int32(positions, device, copy=graph),
        query_start=query_start,
        seq_lens=device_seq,
        block_table=_int32(block_table, device, copy=graph),
        page_table=None if page_table is None else _int32(page_table, device, copy=graph),
        prefix_lens=None if prefix_lens is None else _int32(prefix_lens, device, copy=graph),
        trust=trust,
        recomputed=recomputed,
        max_query_len=longest,
        max_seq_len=bound,
        longest=longest_seq,
        query_lens=None if host_query is None else tuple(host_query),
        deterministic=wanted_deterministic(deterministic),
        graph=graph,
    )
    if host_seq is not None and on_host(slots):
        lengths = torch.tensor(host_seq, dtype=torch.int64, device="cpu")
        # Values as they were given: in 32 bits a wrong one may look right.
        check_values(step, slots, row_pos, roles, positions, lengths, block_table, page_table)
    return step


def length_bound(tokens: int, block: int) -> int:
    """At least `tokens`, in one of few sizes: 32, 48, 64, 96, 128, ... sparse blocks.

    Prompts come in every length, and how a step of theirs is launched goes by its bound: a warm-up
    can walk the few.
    """
    blocks = max(-(-tokens // block), LEAST_BLOCKS)
    above = 1 << (blocks - 1).bit_length()
    between = above // 4 * 3
    return (between if blocks <= between else above) * block


def _longest(seq_lens: list[int], query_lens: list[int] | None) -> int:
    """Tokens of the longest sequence that takes part: has rows, or is rebuilt without any. Others
    may hold any length.
    """
    if query_lens is not None and any(query_lens):
        seq_lens = [length for length, rows in zip(seq_lens, query_lens, strict=True) if rows]
    return max(seq_lens, default=0)


def check_values(
    step: Step,
    slots: Tensor,
    row_pos: Tensor,
    roles: Tensor,
    positions: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor,
    page_table: Tensor | None,
) -> None:
    """ArgumentError for a wrong value of a step whose tensors lie on the host."""
    StepValues(
        slots=slots,
        row_seq=step.row_seq,
        row_pos=row_pos,
        roles=roles,
        positions=positions,
        seq_lens=seq_lens,
        block_table=block_table,
        page_table=page_table,
        num_blocks=step.cache_shape.num_blocks,
        block_size=step.block_size,
        longest=step.max_seq_len if step.longest is None else step.longest,
        recomputed=step.recomputed,
    ).check()


def _aligned(value: Tensor) -> Tensor:
    """In one piece, as kernels read it. A part of a larger tensor may begin anywhere, and would be
    served by other kernels.
    """
    value = value.contiguous()
    return value.clone() if value.data_ptr() % _ALIGNMENT else value


def _int32(value: Lengths, device: torch.device, *, copy: bool) -> Tensor:
    if isinstance(value, Tensor):
        return _aligned(value.to(device=device, dtype=torch.int32, copy=copy))
    # Padding sequences may hold any length, also one that 32 bits cannot.
    lengths = torch.tensor(value, dtype=torch.int64, device="cpu")
    return lengths.clamp(-(2**31), 2**31 - 1).int().to(device)


def _host_rows(query_lens: list[int], rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    for i, length in enumerate(query_lens):
        if length < 0:
            raise found_needed(f"query_lens[{i}]", length, "at least 0")
    if sum(query_lens) != rows:
        raise found_needed("slots", f"{rows} rows", f"{sum(query_lens)}, the sum of query_lens")
    return rows_of(query_lens, device)


def _device_rows(
    query_lens: Lengths, rows: int, seqs: int, max_query_len: int
) -> tuple[Tensor, Tensor]:
    """Without looking at the lengths: each row's sequence by a search among the running sums."""
    assert isinstance(query_lens, Tensor)
    device = query_lens.device
    if max_query_len == 1 and rows == seqs:
        at = torch.arange(rows + 1, device=device, dtype=torch.int32)
        return at[:-1], at
    start = torch.zeros(seqs + 1, dtype=torch.int64, device=device)
    start[1:] = query_lens.long().cumsum(0)
    row = torch.arange(rows, device=device)
    row_seq = torch.searchsorted(start[1:], row, right=True).clamp_max(max(seqs - 1, 0))
    return row_seq.int(), start.int()
