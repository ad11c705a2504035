"""Attention by the package's own Triton kernels, in the cache's place."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_portable.kernels import launch
from dash_portable.kernels.attend_decode import attend_decode_kernel, attend_merge_kernel
from dash_portable.kernels.launch import Launch, power_of_two
from dash_portable.platform.detect import current_platform
from dash_portable.step import Step
from dash_portable.triton_layer import on_device


class DecodeRunner:
    """Rows one by one, each split over its segments where there are few."""

    def __init__(self, step: Step, arch: str) -> None:
        self._step = step
        config, rows, heads = step.config, step.num_rows, step.heads
        programs = rows * step.kv_heads
        row = launch.attend_row(arch, programs, step.deterministic)
        pieces = config.topk + config.local_blocks
        split = min(row.split, power_of_two(pieces))
        device, width = step.device, step.head_dim
        parts = (rows, heads, split) if split > 1 else (1, 1, 1)
        self._sum = torch.empty((*parts, width), dtype=torch.float32, device=device)
        self._mass = torch.empty((*parts, 2), dtype=torch.float32, device=device)
        self._ticket = torch.zeros(max(programs, 1), dtype=torch.int32, device=device)
        dot = step.group > 1
        padded = power_of_two(width)
        dependent = launch.select_row(arch, rows, step.max_blocks).dependent
        options = {"launch_pdl": True} if dependent else {}
        sizes = (step.kv_heads, step.group, width, padded, step.block_size, config.block)
        rest = (power_of_two(config.block), config.local_blocks, config.topk, split)
        self._attend = Launch(
            attend_decode_kernel,
            programs * split,
            (*sizes, *rest, max(power_of_two(step.group), 16), dot, row.ticket, dependent),
            warps=launch.DOT_WARPS if dot else row.warps,
            **options,
        )
        self._merge = None
        if split > 1 and not row.ticket:
            self._merge = Launch(
                attend_merge_kernel, rows * heads, (heads, width, padded, split), warps=row.warps
            )

    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        step = self._step
        self._attend(
            query, cache, step.row_pos, step.row_seq, step.block_table, ids, bias, out,
            self._sum, self._mass, self._ticket, *cache.stride()[:3], step.block_table.stride(0),
        )  # fmt: skip
        if self._merge is not None:
            self._merge(self._sum, self._mass, out)


class Runner:
    """Decode rows by `attend_decode`, steps with longer sequences by `attend_prefill`."""

    def __init__(self, step: Step) -> None:
        self._step = step
        arch = current_platform(step.device).arch
        self._runner = DecodeRunner(step, arch)

    def refresh(self) -> None:
        """Everything is read from the step's tensors by the kernels."""

    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        if not self._step.num_rows:
            return
        dense = out if out.is_contiguous() else torch.empty_like(
            out, memory_format=torch.contiguous_format
        )
        with on_device(self._step.device):
            self._runner.run(query, cache, ids, bias, dense)
        if dense is not out:
            out.copy_(dense)
