"""Attention by the package's own Triton kernels, in the cache's place."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_portable.kernels import launch
from dash_portable.kernels.attend_decode import attend_decode_kernel, attend_merge_kernel
from dash_portable.kernels.group_rows import group_rows, group_shapes, tile_bound
from dash_portable.kernels.launch import Launch, power_of_two
from dash_portable.kernels.launch_prefill import prefill_row
from dash_portable.kernels.prefill import AttendPrefill, attend_shapes
from dash_portable.platform.detect import current_platform
from dash_portable.step import Step
from dash_portable.streams import Beside, InOrder, on_device
from dash_portable.triton_stages import grouped_rows


class DecodeRunner:
    """Rows one by one, each split over its segments where there are few."""

    def __init__(self, step: Step, arch: str) -> None:
        config, rows, heads = step.config, step.num_rows, step.heads
        device, width = step.device, step.head_dim
        programs = rows * step.kv_heads
        row = launch.attend_row(
            arch, programs, step.deterministic, width, step.dtype.itemsize, step.group
        )
        dot = step.group > 1 or (row.dot and step.dtype.itemsize < 4)
        dependent = launch.select_row(arch, rows, step.max_blocks).dependent
        split = min(row.split, power_of_two(config.topk + config.local_blocks))
        parts = (rows, heads, split) if split > 1 else (1, 1, 1)
        self._sum = torch.empty((*parts, width), dtype=torch.float32, device=device)
        self._mass = torch.empty((*parts, 2), dtype=torch.float32, device=device)
        ticket = torch.zeros(max(programs, 1), dtype=torch.int32, device=device)
        padded = power_of_two(width)
        sizes = (step.kv_heads, step.group, width, padded, step.block_size, config.block)
        # A matrix product takes no fewer than 16 keys: smaller blocks are padded.
        keys = max(power_of_two(config.block), 16) if dot else power_of_two(config.block)
        rest = (keys, config.local_blocks, config.topk, split)
        self._attend = Launch(
            attend_decode_kernel,
            programs * split,
            (
                *sizes, *rest, max(power_of_two(step.group), 16), dot, row.ticket, row.stages,
                step.single_row, dependent,
            ),
            fixed={
                "row_pos_ptr": step.row_pos,
                "row_seq_ptr": step.row_seq,
                "table_ptr": step.block_table,
                "sum_ptr": self._sum,
                "mass_ptr": self._mass,
                "ticket_ptr": ticket,
                "stride_table": step.block_table.stride(0),
            },
            warps=launch.attend_warps(row, step.group, step.dtype.itemsize, width),
            **({"launch_pdl": True} if dependent else {}),
        )  # fmt: skip
        self._merge = None
        if split > 1 and not row.ticket:
            self._merge = Launch(
                attend_merge_kernel, rows * heads, (heads, width, padded, split), warps=row.warps
            )

    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        self._attend(query, cache, ids, bias, out, *cache.stride()[:3])
        if self._merge is not None:
            self._merge(self._sum, self._mass, out)

    def refresh(self) -> None:
        """Everything is read from the step's tensors by the kernel."""


class PrefillRunner:
    """Tiles of rows, grouped as selection grouped them; by sequence alone where another layer
    selected.
    """

    def __init__(self, step: Step, arch: str) -> None:
        self._step = step
        config, rows, seqs, device = step.config, step.num_rows, step.num_seqs, step.device
        row = self._row = prefill_row(
            arch, step.dtype.itemsize, step.deterministic, config.block, step.head_dim
        )
        shapes = attend_shapes(
            rows,
            seqs,
            tile_bound(rows, seqs, row.tile),
            max(step.max_blocks, 1),
            step.heads,
            step.head_dim,
            step.dtype.itemsize,
            config.topk,
            budget=row.budget,
            launch=row,
        )
        self._scratch = {
            name: torch.empty(
                shape, dtype=step.dtype if kind == "query" else getattr(torch, kind), device=device
            )
            for name, (kind, shape) in shapes.items()
        }
        self._beside = Beside(device) if row.beside and device.type != "cpu" else InOrder()
        self._own: dict[str, Tensor] | None = None
        self._attend: AttendPrefill | None = None  # made for the groups that it is bound to
        self._bound: dict[str, Tensor] | None = None
        self.refresh()

    def refresh(self) -> None:
        self._grouped = False

    def _groups(self, cache: Tensor) -> dict[str, Tensor]:
        step = self._step
        found = grouped_rows(step)
        if found is not None:
            return found
        if self._own is None:
            row = self._row
            shapes = group_shapes(step.num_rows, step.num_seqs, row.tile)
            self._own = {
                name: torch.empty(shape, dtype=torch.int32, device=step.device)
                for name, shape in shapes.items()
            }
        if not self._grouped:
            group_rows(
                step.row_seq,
                step.row_pos,
                None,
                None,
                step.query_start,
                None,
                None,
                cache,
                step.block_table,
                self._own,
                block=step.config.block,
                local_blocks=step.config.local_blocks,
                tile=self._row.tile,
            )
            self._grouped = not step.graph
        return self._own

    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        groups = self._groups(cache)
        if self._attend is None or groups is not self._bound:
            self._bound = groups
            step, config = self._step, self._step.config
            self._attend = AttendPrefill(
                step.block_table,
                step.row_pos,
                groups,
                self._scratch,
                heads=step.heads,
                width=step.head_dim,
                kv_heads=step.kv_heads,
                cache_block=step.block_size,
                block=config.block,
                local=config.local,
                max_blocks=max(step.max_blocks, 1),
                launch=self._row,
                beside=self._beside,
            )
        self._attend(query, cache, ids, bias, out)


class Runner:
    """Decode rows by `attend_decode`, steps with longer sequences by `attend_prefill`."""

    def __init__(self, step: Step) -> None:
        self._step = step
        arch = current_platform(step.device).arch
        kind = DecodeRunner if step.max_query_len == 1 else PrefillRunner
        self._runner: DecodeRunner | PrefillRunner = kind(step, arch)

    def refresh(self) -> None:
        """Take over what was changed in place in the step's tensors."""
        self._runner.refresh()

    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        if not self._step.num_rows:
            return
        dense = (
            out
            if out.is_contiguous()
            else torch.empty_like(out, memory_format=torch.contiguous_format)
        )
        with on_device(self._step.device):
            self._runner.run(query, cache, ids, bias, dense)
        if dense is not out:
            out.copy_(dense)
