"""The same stages as Triton kernels, on GPUs that have it; without it torch does them, slower."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dash_portable.platform.detect import current_platform
from dash_portable.segments.gather import Room

if TYPE_CHECKING:
    from dash_portable.kernels.gather import GatherRow
    from dash_portable.step import Step

_LOG = logging.getLogger("dash_portable")


@functools.cache
def available(device_type: str) -> bool:
    """Whether the kernels can be launched for tensors of this device type."""
    if device_type == "cpu":
        return False
    try:
        from dash_portable.kernels import gather, merge, page_table  # noqa: F401
    except Exception as error:  # Triton may be absent, a stub or broken in any way; torch serves
        _LOG.info("segments are gathered by torch: %s: %s", type(error).__name__, error)
        return False
    return True


def key_tail(step: Step) -> int:
    """Columns behind a head's keys that memory has at least, by arch; the gather writes them."""
    from dash_portable.kernels.gather import gather_row

    return gather_row(current_platform(step.device).arch).tail


class Gather:
    """`gather_segments_kernel` over passes of `rows` rows: fixed slots, W a row, zeros where
    unused.

    tail    key columns behind the head that take the priors: one segment a row. 0: S + 1 segments
    used    int32 [rows, S + 1]  live keys of each of S + 1 segments
    length  where the same goes but at least 1, int32 [rows * (S + 1)]; None with `tail`
    row     how it is launched; by default as the table has it for this arch
    """

    def __init__(
        self,
        step: Step,
        rows: int,
        into: Room,
        *,
        tail: int = 0,
        length: Tensor | None = None,
        row: GatherRow | None = None,
    ) -> None:
        from dash_portable.kernels.gather import UNIT, gather_row, gather_segments_kernel
        from dash_portable.kernels.launch import Launch, power_of_two

        config, width = step.config, step.head_dim
        row = row or gather_row(current_platform(step.device).arch)
        heads = min(row.heads, power_of_two(step.kv_heads))
        parts = -(-step.kv_heads // heads)
        consts = (
            step.kv_heads,
            step.group,
            width,
            power_of_two(width),
            step.block_size,
            config.block,
            config.local_blocks,
            config.topk,
            tail,
            into.query.shape[-1],
            heads,
            power_of_two(heads * step.group),
            parts,
            row.last,
        )
        grid = rows * (config.topk + config.local_blocks + 1) * parts
        self.launch = Launch(gather_segments_kernel, grid, consts, warps=row.warps)
        self.into = into
        strides = (*into.key.stride()[:2], *into.value.stride()[:2])
        assert not any(stride % UNIT.value for stride in strides)
        self.strides = (step.block_table.stride(0), *(s // UNIT.value for s in strides))
        self.used = torch.zeros(rows, config.topk + 1, dtype=torch.int32, device=step.device)
        self.length = self.used if length is None else length

    def __call__(
        self, step: Step, part: slice, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor
    ) -> None:
        """Fill the room's queries, keys and values, and both counters, with rows `part`."""
        self.launch(
            cache,
            step.row_pos[part],
            step.row_seq[part],
            step.block_table,
            ids,
            bias,
            query,
            self.into.key,
            self.into.value,
            self.into.query,
            self.used,
            self.length,
            *cache.stride()[:3],
            *self.strides,
        )


class Table:
    """`page_table_kernel` over passes of `rows` rows."""

    def __init__(self, step: Step, rows: int, *, size: int) -> None:
        from dash_portable.kernels.launch import Launch, power_of_two
        from dash_portable.kernels.page_table import page_table_kernel

        config = step.config
        consts = (
            step.block_size,
            size,
            config.block,
            config.local,
            config.topk,
            power_of_two(config.topk + 1),
            config.local // size + 1,
        )
        self.launch = Launch(page_table_kernel, rows, consts, warps=1)
        self.table_stride = step.block_table.stride(0)
        self.used = torch.zeros(rows, config.topk + 1, dtype=torch.int32, device=step.device)

    def __call__(
        self,
        step: Step,
        part: slice,
        ids: Tensor,
        per_block: int,
        pages: Tensor,
        length: Tensor,
    ) -> Tensor:
        """Fill `pages` and `length`; live keys int32 [n, S + 1]."""
        self.launch(
            step.row_pos[part],
            step.row_seq[part],
            step.block_table,
            ids,
            pages,
            length,
            self.used,
            self.table_stride,
            per_block,
        )
        return self.used


class Merge:
    """`merge_segments_kernel` over passes of `rows` rows."""

    def __init__(self, step: Step, rows: int) -> None:
        from dash_portable.kernels.launch import Launch, power_of_two
        from dash_portable.kernels.merge import merge_segments_kernel

        segments, width = step.config.topk + 1, step.head_dim
        consts = (step.heads, width, power_of_two(width), segments, power_of_two(segments), True)
        self.launch = Launch(merge_segments_kernel, rows * step.heads, consts, warps=1)
        self.segments = segments

    def __call__(self, out: Tensor, got: Tensor, lse: Tensor, used: Tensor, bias: Tensor) -> None:
        """got [n * (S + 1), Hq, .] and natural lse [Hq, n * (S + 1)] into out [n, Hq, D],
        contiguous."""
        segments = self.segments
        self.launch(
            got,
            lse,
            used,
            bias,
            out,
            got.stride(0) * segments,
            got.stride(0),
            got.stride(1),
            lse.stride(1) * segments,
            lse.stride(1),
            lse.stride(0),
        )
