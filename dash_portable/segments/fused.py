"""The same stages as Triton kernels, on GPUs that have it; without it torch does them, slower."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dash_portable.step import Step

_LOG = logging.getLogger("dash_portable")
WARPS = 4


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


class Gather:
    """`gather_segments_kernel` over passes of `rows` rows: fixed slots, W a row, zeros where
    unused."""

    def __init__(self, step: Step, rows: int, *, tail: int) -> None:
        from dash_portable.kernels.gather import gather_segments_kernel
        from dash_portable.kernels.launch import Launch, power_of_two

        config, width = step.config, step.head_dim
        consts = (
            step.kv_heads,
            width,
            power_of_two(width),
            step.block_size,
            config.block,
            power_of_two(config.block),
            config.local_blocks,
            config.topk,
            tail,
        )
        grid = rows * (config.topk + config.local_blocks)
        self.launch = Launch(gather_segments_kernel, grid, consts, warps=WARPS)
        self.table_stride = step.block_table.stride(0)
        self.used = torch.zeros(rows, config.topk + 1, dtype=torch.int32, device=step.device)

    def __call__(
        self, step: Step, part: slice, cache: Tensor, ids: Tensor, bias: Tensor, into: Any
    ) -> Tensor:
        """Fill `into.key` and `into.value` with rows `part`; live keys int32 [n, S + 1]."""
        self.launch(
            cache,
            step.row_pos[part],
            step.row_seq[part],
            step.block_table,
            ids,
            bias,
            into.key,
            into.value,
            self.used,
            *cache.stride()[:3],
            self.table_stride,
            *into.key.stride()[:2],
            *into.value.stride()[:2],
        )
        return self.used


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
        lse = lse.masked_fill((used == 0).view(1, -1), float("-inf"))
        segments = self.segments
        self.launch(
            got,
            lse,
            bias,
            out,
            got.stride(0) * segments,
            got.stride(0),
            got.stride(1),
            lse.stride(1) * segments,
            lse.stride(1),
            lse.stride(0),
        )
