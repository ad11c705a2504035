"""The shared layer on Triton: what `eager.py` does, by the kernels, on any GPU."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

from .kernels import launch
from .kernels.group_rows import group_rows, group_shapes
from .kernels.launch import Launch, power_of_two
from .kernels.launch_prefill import prefill_row
from .kernels.select_decode import select_decode_kernel, select_merge_kernel, store_select_kernel
from .kernels.select_prefill import select_prefill, select_shapes
from .kernels.store import store_coordinates_kernel, store_row_kernel, store_tile_kernel
from .kernels.summaries import (
    summaries_block_kernel,
    summaries_copy_kernel,
    summaries_pages_kernel,
)
from .platform.detect import current_platform
from .step import Step, Trust

_MAX_PAGES = 65536  # pages 0..65535
_TILE_ROWS: weakref.WeakValueDictionary[int, TileRows] = weakref.WeakValueDictionary()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensors' one."""
    if device.type == "cpu" or device.index in (None, torch.accelerator.current_device_index()):
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def grouped_rows(step: Step) -> dict[str, Tensor] | None:
    """How selection grouped the rows of a step, for attention to tile them alike; None if no layer
    of ours selected.
    """
    rows = _TILE_ROWS.get(id(step))
    return rows.groups if rows is not None and rows.selected else None


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
        """int32 [N, 4] of the rows, after store: tok, page, num_pages, query_page. Of a step with
        several rows a sequence.
        """
        assert self._tiles is not None, (
            "rows that are alone in their sequence keep theirs in the cache"
        )
        return self._tiles.coordinates.T

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


def _rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Rows may be any stride apart; what a row holds is one piece."""
    whole = []
    for x in tensors:
        dense = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2] or x.shape[1] == 1)
        whole.append(x if dense else x.contiguous())
    return tuple(whole)


class RowSelection:
    """Steps in which every row is alone in its sequence."""

    def __init__(self, layer: TritonLayer) -> None:
        self._layer = layer
        step = self._step = layer.step
        config, rows = step.config, step.num_rows
        row = self._row = launch.select_row(layer._arch, rows, step.max_blocks)
        self._split = launch.split_of(row, rows, step.max_blocks)
        self._scores = -(-max(step.max_blocks, 1) // row.tile) * row.tile
        groups = self._scores // launch.GROUP
        several = self._scores > row.tile  # a row may have several tiles
        device = step.device
        space = (rows, self._scores) if several else (1, row.tile)
        self._score = torch.empty(space, dtype=torch.float32, device=device)
        self._group = torch.empty(
            (rows, groups) if several else (1, 1), dtype=torch.int64, device=device
        )
        self._ticket = torch.zeros((rows, 1 if row.ticket else 2), dtype=torch.int32, device=device)
        self._chunk = min(max(power_of_two(groups), 16), launch.CHUNK)
        self._several = several
        self._select = (
            config.local_blocks,
            config.topk,
            config.window,
            row.tile,
            self._split,
            self._chunk,
            row.ticket,
        )
        self._inverse_sigma = 1.0 / config.sigma
        self._dummy = layer._turns

    def _common(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        layer, step = self._layer, self._step
        nothing = step.row_pos
        return (
            step.row_pos,
            step.slots,
            step.roles,
            nothing if layer._positions is None else layer._positions,
            step.block_table,
            nothing if layer._pages is None else layer._pages,
        )

    def _strides(self, cache: Tensor) -> tuple[int, ...]:
        pages = self._layer._pages
        table = self._step.block_table.stride(0)
        paged = 0 if pages is None else pages.stride(0)
        return (*cache.stride()[:3], table, paged)

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        cache: Tensor,
        head_cls: Tensor | None,
    ) -> None:
        layer, step = self._layer, self._step
        q, k, v, iq, ik = _rows_contiguous(q, k, v, iq, ik)
        given = head_cls is not None
        run = layer.launch(
            f"store {given}",
            store_row_kernel,
            (step.kv_heads + 1) * step.num_rows,
            (*layer._sizes, *layer._blocks, layer._given, layer._pages is not None, given),
            warps=launch.STORE_ROW_WARPS,
        )
        run(
            q, k, v, iq, ik, layer.query, layer.index_query, cache, head_cls if given else
            layer._turns, layer._turns,
            *self._common(), step.num_rows,
            q.stride(0), k.stride(0), v.stride(0), iq.stride(0), ik.stride(0),
            *self._strides(cache),
        )  # fmt: skip

    def store_select(
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
    ) -> None:
        layer, step, row = self._layer, self._step, self._row
        if not step.num_rows:
            return
        q, k, v, iq, ik = _rows_contiguous(q, k, v, iq, ik)
        run = layer.launch(
            "store_select",
            store_select_kernel,
            (self._split + step.kv_heads + 1) * step.num_rows,
            (
                *layer._sizes, *layer._blocks, layer._given, layer._pages is not None, True,
                *self._select, row.dependent,
            ),
            warps=row.warps,
        )  # fmt: skip
        run(
            q, k, v, iq, ik, layer.query, layer.index_query, cache, head_cls, layer._turns,
            *self._common(),
            self._score, self._group, self._ticket, layer.ids, layer.bias, step.num_rows,
            self._scores,
            scale, floor, self._inverse_sigma,
            q.stride(0), k.stride(0), v.stride(0), iq.stride(0), ik.stride(0),
            *self._strides(cache),
        )  # fmt: skip
        self._merge(floor)

    def select(
        self, index_query: Tensor, cache: Tensor, side: Side | None, scale: float, floor: float
    ) -> None:
        layer, step, row = self._layer, self._step, self._row
        row_pos, _, roles, positions, table, pages = self._common()
        paged = layer._pages is not None
        strides = self._strides(cache)
        max_blocks = 0
        summaries, ranges = cache, row_pos
        if side is not None:
            summaries, ranges, pages = side.summaries, side.ranges, side.pages
            paged, strides, max_blocks = True, (*strides[:4], pages.stride(0)), side.max_blocks
        run = layer.launch(
            "select",
            select_decode_kernel,
            self._split * step.num_rows,
            (
                layer._sizes[0], *layer._sizes[2:], *layer._blocks, layer._given, paged, side is not
                None,
                *self._select,
            ),
            warps=row.warps,
        )  # fmt: skip
        run(
            index_query, cache, layer._turns, row_pos, roles, positions, table, pages, summaries,
            ranges,
            self._score, self._group, self._ticket, layer.ids, layer.bias, step.num_rows,
            max_blocks, self._scores,
            scale, floor, self._inverse_sigma, index_query.stride(0), *strides,
        )  # fmt: skip
        self._merge(floor)

    def _merge(self, floor: float) -> None:
        """The second launch, where a ticket is not allowed and a row may have several tiles."""
        if self._row.ticket or not self._several:
            return
        layer, step, config = self._layer, self._step, self._step.config
        run = layer.launch(
            "merge",
            select_merge_kernel,
            step.num_rows,
            (config.block, config.topk, config.window, self._row.tile, self._chunk),
            warps=launch.MERGE_WARPS,
        )
        run(
            step.row_pos, self._score, self._group, self._ticket, layer.ids, layer.bias,
            self._scores,
            floor, self._inverse_sigma,
        )  # fmt: skip


class TileRows:
    """Steps in which a sequence may have several rows: prompts, chunks, decoded rows, mixed."""

    def __init__(self, layer: TritonLayer) -> None:
        self._layer = layer
        step = self._step = layer.step
        rows, seqs, device = step.num_rows, step.num_seqs, step.device

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        self.coordinates = ints(4, rows)
        self._start, self._end = ints(max(rows, 1)), ints(max(seqs, 1))
        self._order, self._live = ints(rows), ints(seqs + 1)
        self._tiles = _tiles(step)
        self._prefill = prefill_row(layer._arch, step.dtype.itemsize)
        tile = self._prefill.tile
        self.groups = {name: ints(*shape) for name, shape in group_shapes(rows, seqs, tile).items()}
        self._scratch = {name: ints(*shape) for name, shape in select_shapes(rows, seqs).items()}
        self._located = self._grouped = False
        self.selected = False
        _TILE_ROWS[id(step)] = (
            self  # it holds the step, so its id is not another's while this lives
        )
        self.refresh()

    def refresh(self) -> None:
        """Rows in order, padding last, and where each sequence's begin."""
        live = self._step.row_pos >= 0
        self._order.copy_(torch.argsort(~live, stable=True))
        before = torch.cat([live.new_zeros(1, dtype=torch.int64), live.cumsum(0)])
        self._live.copy_(before[self._step.query_start.long()])
        self._located = self._grouped = False

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        cache: Tensor,
        head_cls: Tensor | None,
    ) -> None:
        layer, step = self._layer, self._step
        q, k, v, iq, ik = _rows_contiguous(q, k, v, iq, ik)
        positions = step.row_pos if layer._positions is None else layer._positions
        pages = step.row_pos if layer._pages is None else layer._pages
        table_stride = step.block_table.stride(0)
        if not self._located:
            run = layer.launch(
                "coordinates",
                store_coordinates_kernel,
                step.num_seqs,
                (
                    step.kv_heads, step.head_dim, step.block_size, layer._given, layer._pages is not
                    None,
                    launch.COORDINATES_TILE,
                ),
                warps=launch.COORDINATES_WARPS,
            )  # fmt: skip
            run(
                step.roles, positions, self._order, self._live, step.seq_lens, cache,
                step.block_table, pages,
                self.coordinates, self._start, self._end, step.num_rows, *cache.stride()[:3],
                table_stride,
                0 if layer._pages is None else pages.stride(0),
            )  # fmt: skip
            # A captured step runs all its launches in every layer: what was captured cannot know
            # which one is first.
            self._located = not step.graph
        given = head_cls is not None
        run = layer.launch(
            f"store {given}",
            store_tile_kernel,
            (step.kv_heads + 1) * len(self._tiles),
            (*layer._sizes, *layer._blocks, layer._given, given),
            warps=launch.STORE_WARPS,
        )
        run(
            q, k, v, iq, ik, layer.query, layer.index_query, cache, head_cls if given else
            layer._turns, layer._turns,
            step.slots, step.roles, positions, self._order, self._live, step.seq_lens, self._tiles,
            step.block_table,
            self.coordinates, self._start, self._end, step.num_rows,
            q.stride(0), k.stride(0), v.stride(0), iq.stride(0), ik.stride(0), *cache.stride()[:3],
            table_stride,
        )  # fmt: skip

    def select(
        self, index_query: Tensor, cache: Tensor, side: Side, scale: float, floor: float
    ) -> None:
        layer, step, config = self._layer, self._step, self._step.config
        if not self._grouped:
            group_rows(
                step.row_seq,
                step.row_pos,
                self.coordinates[3],
                self.coordinates[2],
                step.query_start,
                side.pages,
                side.ranges,
                cache,
                step.block_table,
                self.groups,
                block=config.block,
                local_blocks=config.local_blocks,
                tile=self._prefill.tile,
                starts_given=layer._pages is not None,
            )
            self._grouped = not step.graph
        self.selected = True
        select_prefill(
            index_query,
            side.summaries,
            side.ranges,
            step.row_pos,
            self.groups,
            self._scratch,
            layer.ids,
            layer.bias,
            scale=scale,
            floor=floor,
            sigma=config.sigma,
            block=config.block,
            topk=config.topk,
            window=config.window,
            tile=self._prefill.tile,
            launch=self._prefill,
        )


def _tiles(step: Step) -> Tensor:
    """Tiles of the store: sequence, and number of the block counted from the sequence's first;
    int32 [tiles, 2].

    A sequence of n rows touches at most (n + block - 2) // block + 1 blocks, wherever it begins.
    """
    block = step.config.block
    if step.query_lens is None:
        lengths = torch.full((step.num_seqs,), min(step.max_query_len, step.num_rows))
    else:
        lengths = torch.tensor(step.query_lens, dtype=torch.int64)
    many = torch.where(lengths > 0, (lengths + block - 2) // block + 1, 0)
    seq = torch.repeat_interleave(torch.arange(step.num_seqs), many)
    number = torch.arange(len(seq)) - (many.cumsum(0) - many)[seq]
    return torch.stack([seq, number], 1).int().to(step.device)


class Side:
    """Summaries, page ranges and page starts beside the cache, compact, trusted as the step says.

    summaries   [R, blocks, D] in the cache's type
    ranges      int32 [R, blocks, 2]    smallest and largest page of a block's images, 0 for none
    pages       int32 [R, pages, 2]     first token and count of each page
    write       everything is made from the keys and goes to the cache's free place instead
    """

    def __init__(self, step: Step, *, write: bool = False) -> None:
        self._step = step
        self._write = write
        self.max_blocks = max(step.max_blocks, 1)
        seqs, device = step.num_seqs, step.device
        pages = min(max(step.max_seq_len, 1), _MAX_PAGES)
        self._given = step.page_table if step.page_table is None else step.page_table.contiguous()
        if self._given is not None:
            pages = max(self._given.shape[1], 1)
        kept = (0, 0) if write else (self.max_blocks, pages)
        self.summaries = torch.empty(
            (seqs, kept[0], step.head_dim), dtype=step.dtype, device=device
        )
        self.ranges = torch.empty((seqs, kept[0], 2), dtype=torch.int32, device=device)
        self.pages = torch.empty((seqs, kept[1], 2), dtype=torch.int32, device=device)
        self._end = torch.empty(seqs, dtype=torch.int32, device=device)
        heads, width, P, block = step.kv_heads, step.head_dim, step.block_size, step.config.block
        half = power_of_two(width // 2)
        self._find_pages = Launch(
            summaries_pages_kernel,
            seqs,
            (heads, width, P, self._given is not None, write, launch.PAGES_TILE),
            warps=launch.SUMMARY_WARPS,
        )
        if write or step.trust is not Trust.CACHED:
            from_keys = write or step.trust is Trust.NONE
            self._summarize = Launch(
                summaries_block_kernel,
                seqs * self.max_blocks,
                (
                    heads,
                    width,
                    half,
                    P,
                    block,
                    power_of_two(block),
                    from_keys,
                    not from_keys,
                    write,
                ),
                warps=launch.SUMMARY_WARPS,
            )
            self._copy = None
        else:
            self._copy = Launch(
                summaries_copy_kernel,
                seqs * -(-self.max_blocks // launch.COPY_TILE),
                (heads, width, half, P, block, launch.COPY_TILE),
                warps=launch.SUMMARY_WARPS,
            )

    def fill(self, cache: Tensor, head_cls: Tensor) -> None:
        """From one layer's cache, after its store."""
        step = self._step
        strides = (*cache.stride()[:3], step.block_table.stride(0))
        given = step.row_pos if self._given is None else self._given
        if (
            self._given is not None
            and step.page_table is not None
            and self._given is not step.page_table
        ):
            self._given.copy_(step.page_table)
        self._find_pages(
            step.seq_lens, cache, step.block_table, given, self.pages, self._end, *strides,
            0 if self._given is None else given.stride(0), self.pages.stride(0),
        )  # fmt: skip
        if self._copy is not None:
            self._copy(
                step.seq_lens,
                cache,
                step.block_table,
                self.summaries,
                self.ranges,
                self.max_blocks,
                *strides,
            )
            return
        prefix = step.seq_lens if step.prefix_lens is None else step.prefix_lens
        self._summarize(
            step.seq_lens, prefix, self._end, cache, step.block_table, head_cls, self.summaries,
            self.ranges,
            self.max_blocks, *strides,
        )  # fmt: skip
