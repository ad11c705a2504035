"""The shared layer on Triton: what `eager.py` does, by the kernels, on any GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import launch
from .kernels.launch import Launch, power_of_two
from .platform.detect import current_platform
from .step import Step, Trust
from .streams import on_device
from .triton_side import Side
from .triton_stages import RowSelection, TileRows


class TritonLayer:
    """Store and select for one step.

    The scratch of a step is its own and is made with it; a layer's call allocates only what it
    returns. Rotated queries, ids and biases are returned in tensors that the next layer's call
    overwrites.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        config, rows, device = step.config, step.num_rows, step.device
        self._arch = current_platform(device).arch
        self._turns = torch.tensor(
            launch.turns(config.theta, step.head_dim), dtype=torch.int64, device=device
        )
        self._positions = step.positions if step.positions is None else step.positions.contiguous()
        self._pages = step.page_table if step.page_table is None else step.page_table.contiguous()
        self._given = 0 if step.positions is None else 2 if step.recomputed else 1
        self._sizes = (step.kv_heads, step.group, step.head_dim, power_of_two(step.head_dim // 2))
        self._blocks = (step.block_size, config.block, power_of_two(config.block), config.page_mod)
        self.query = torch.empty((rows, step.heads, step.head_dim), dtype=step.dtype, device=device)
        self.index_query = torch.empty((rows, step.head_dim), dtype=step.dtype, device=device)
        self.ids = torch.empty((rows, config.topk), dtype=torch.int32, device=device)
        self.bias = torch.empty((rows, config.topk), dtype=torch.float32, device=device)
        self._launches: dict[str, Launch] = {}
        self._side: Side | None = None
        self._rows: RowSelection | None = None
        self._tiles: TileRows | None = None
        if step.single_row:
            self._rows = RowSelection(self)
        else:
            self._tiles = TileRows(self)
        if not step.single_row or step.trust is not Trust.CACHED:
            self._side = Side(step)

    @property
    def coordinates(self) -> Tensor:
        """int32 [N, 4] of the rows, after a store on its own: tok, page, num_pages, query_page.

        Where rows are alone in their sequence selection finds them in the cache instead.
        """
        rows = self._rows or self._tiles
        assert rows is not None, "one of the two was made"
        return rows.coordinates if self._rows is rows else rows.coordinates.T

    def refresh(self) -> None:
        """Take over what was changed in place in the step's tensors: our copies of them."""
        for own, theirs in (
            (self._positions, self.step.positions),
            (self._pages, self.step.page_table),
        ):
            if own is not None and theirs is not None and own is not theirs:
                own.copy_(theirs)
        if self._tiles is not None:
            self._tiles.refresh()
        if self._side is not None:
            self._side.refresh()

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        cache: Tensor,
        head_cls: Tensor,
        scale: float,
        floor: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store the rows; rotated queries, selected blocks and their biases. One launch in decode
        with trusted summaries.
        """
        if self._rows is not None and self._side is None:
            head_cls = head_cls.contiguous()
            with on_device(self.step.device):
                self._rows.store_select(q, k, v, iq, ik, cache, head_cls, scale, floor)
        else:
            _, index_query = self.store(q, k, v, iq, ik, cache, head_cls)
            self.select(index_query, cache, head_cls, scale, floor)
        return self.query, self.ids, self.bias

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        cache: Tensor,
        head_cls: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Write the rows' tokens; the rotated `query [N, Hq, D]` and `index_query [N, D]`."""
        if self.step.num_rows:
            head_cls = None if head_cls is None else head_cls.contiguous()
            with on_device(self.step.device):
                if self._rows is not None:
                    self._rows.store(q, k, v, iq, ik, cache, head_cls)
                elif self._tiles is not None:
                    self._tiles.store(q, k, v, iq, ik, cache, head_cls)
        return self.query, self.index_query

    def select(
        self, index_query: Tensor, cache: Tensor, head_cls: Tensor, scale: float, floor: float
    ) -> tuple[Tensor, Tensor]:
        """The blocks of every row, best first, and their biases; padding rows have none."""
        if self.step.num_rows:
            with on_device(self.step.device):
                if self._side is not None:
                    self._side.fill(cache, head_cls)
                if self._rows is not None:
                    self._rows.select(index_query, cache, self._side, scale, floor)
                elif self._tiles is not None and self._side is not None:
                    self._tiles.select(index_query, cache, self._side, scale, floor)
        return self.ids, self.bias

    def rebuild(self, cache: Tensor, head_cls: Tensor) -> None:
        """Summaries, page ranges and starts of whole sequences, into the cache's free place."""
        if self.step.num_seqs and self.step.max_blocks:
            with on_device(self.step.device):
                Side(self.step, write=True).fill(cache, head_cls)

    def launch(
        self, name: str, kernel: Any, grid: int, consts: tuple[Any, ...], **options: Any
    ) -> Launch:
        """The launch kept under a name; the constants of a name never change within a step."""
        found = self._launches.get(name)
        if found is None:
            found = self._launches[name] = Launch(kernel, grid, consts, **options)
        return found
