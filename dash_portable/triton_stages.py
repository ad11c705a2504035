"""Store and select of the Triton layer, for its two kinds of step: rows alone, rows in tiles."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kernels import launch
from .kernels.group_rows import group_rows, group_shapes
from .kernels.launch import Launch, power_of_two
from .kernels.launch_prefill import prefill_row
from .kernels.prefill import SelectPrefill, select_shapes
from .kernels.select_decode import select_decode_kernel, select_merge_kernel, store_select_kernel
from .kernels.store import store_row_kernel
from .kernels.store_tiles import store_coordinates_kernel, store_tile_kernel
from .step import Step
from .triton_side import Side

if TYPE_CHECKING:
    from .triton_layer import TritonLayer

# Which selected last for a step, by the step's id: it holds the step, so while it lives its id is
# no other's.
_TILE_ROWS: weakref.WeakValueDictionary[int, TileRows] = weakref.WeakValueDictionary()


def grouped_rows(step: Step) -> dict[str, Tensor] | None:
    """How selection grouped the rows of a step, for attention to tile them alike; None if no layer
    of ours selected.
    """
    rows = _TILE_ROWS.get(id(step))
    return None if rows is None else rows.groups


def _rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Rows may be any stride apart; what a row holds is one piece."""
    whole = []
    for x in tensors:
        dense = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2] or x.shape[1] == 1)
        whole.append(x if dense else x.contiguous())
    return tuple(whole)


# Arguments that the decode kernels share, in their order.
_COMMON = ("row_pos_ptr", "slots_ptr", "roles_ptr", "positions_ptr", "table_ptr", "pages_ptr")


class RowSelection:
    """Steps in which every row is alone in its sequence."""

    def __init__(self, layer: TritonLayer) -> None:
        # The layer holds this: a cycle would keep the step's memory until it is collected.
        self._layer: TritonLayer = weakref.proxy(layer)
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
            (rows, groups) if several else (1, 1), dtype=torch.float32, device=device
        )
        self.coordinates = torch.empty((rows, 4), dtype=torch.int32, device=device)
        self._ticket = torch.zeros((rows, 1 if row.ticket else 2), dtype=torch.int32, device=device)
        self._chunk = min(max(power_of_two(groups), 16), launch.CHUNK)
        self._two = several and not row.ticket  # a second launch ends the rows
        self._joint: Launch | None = None
        self._select = (
            config.local_blocks,
            config.topk,
            config.window,
            row.tile,
            self._split,
            self._chunk,
            row.ticket,
            row.ahead,
            launch.NARROW,
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

    def _parts(self, heads: int) -> tuple[int, int]:
        """kv heads of one program that stores, and how many such programs a row has."""
        heads = min(heads, power_of_two(self._step.kv_heads))
        return heads, -(-self._step.kv_heads // heads)

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
        heads, parts = self._parts(launch.STORE_ROW_HEADS)
        run = layer.launch(
            f"store {given}",
            store_row_kernel,
            (parts + 1) * step.num_rows,
            (
                *layer._sizes,
                *layer._blocks,
                layer._given,
                layer._pages is not None,
                given,
                heads,
                parts,
            ),
            warps=launch.store_warps(layer._arch, step.head_dim)[1],
        )
        run(
            q, k, v, iq, ik, layer.query, layer.index_query, cache, head_cls if given else
            layer._turns, layer._turns,
            *self._common(), self.coordinates, step.num_rows,
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
        if not self._step.num_rows:
            return
        q, k, v, iq, ik = _rows_contiguous(q, k, v, iq, ik)
        run = self._joint
        if run is None:
            run = self._joint = self._join()
        run(
            q, k, v, iq, ik, cache, head_cls, scale, floor,
            q.stride(0), k.stride(0), v.stride(0), iq.stride(0), ik.stride(0), *cache.stride()[:3],
        )  # fmt: skip
        if self._two:
            self._merge(floor)

    def _join(self) -> Launch:
        layer, step, row = self._layer, self._step, self._row
        heads, parts = self._parts(launch.JOINT_HEADS)
        pages = layer._pages
        return Launch(
            store_select_kernel,
            (self._split + parts + 1) * step.num_rows,
            (
                *layer._sizes, *layer._blocks, layer._given, pages is not None, True,
                *self._select, heads, parts, row.dependent,
            ),
            fixed=dict(zip(_COMMON, self._common(), strict=True)) | {
                "query_ptr": layer.query,
                "index_ptr": layer.index_query,
                "turn_ptr": layer._turns,
                "score_ptr": self._score,
                "group_ptr": self._group,
                "ticket_ptr": self._ticket,
                "ids_ptr": layer.ids,
                "bias_ptr": layer.bias,
                "num_rows": step.num_rows,
                "max_scores": self._scores,
                "inv_sigma": self._inverse_sigma,
                "stride_table": step.block_table.stride(0),
                "stride_pages": 0 if pages is None else pages.stride(0),
            },
            warps=row.warps,
        )  # fmt: skip

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
        if self._two:
            self._merge(floor)

    def _merge(self, floor: float) -> None:
        """The second launch, where a ticket is not allowed and a row may have several tiles."""
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
        # The layer holds this: a cycle would keep the step's memory until it is collected.
        self._layer: TritonLayer = weakref.proxy(layer)
        step = self._step = layer.step
        rows, seqs, device = step.num_rows, step.num_seqs, step.device

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        self.coordinates = ints(4, rows)
        self._start, self._end = ints(max(rows, 1)), ints(max(seqs, 1))
        self._order, self._live = ints(rows), ints(seqs + 1)
        self._tiles = _tiles(step)
        self._prefill = prefill_row(
            layer._arch, step.dtype.itemsize, block=step.config.block, width=step.head_dim
        )
        grouped = group_shapes(rows, seqs, self._prefill.tile)
        self.groups = {name: ints(*shape) for name, shape in grouped.items()}
        self._scratch = {name: ints(*shape) for name, shape in select_shapes(rows, seqs).items()}
        self._store: dict[bool, Launch] = {}
        self._select: SelectPrefill | None = None
        self._located = self._grouped = False
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
        stored = self._store.get(given)
        if stored is None:
            stored = self._store[given] = self._stored(given)
        stored(
            q, k, v, iq, ik, cache, head_cls if given else layer._turns,
            q.stride(0), k.stride(0), v.stride(0), iq.stride(0), ik.stride(0), *cache.stride()[:3],
        )  # fmt: skip

    def _stored(self, given: bool) -> Launch:
        """The launch that stores the rows; given: whether it summarises the blocks they end."""
        layer, step = self._layer, self._step
        # Grouped queries make one kv head's share large enough.
        heads = max(1, min(launch.STORE_HEADS // step.group, step.kv_heads))
        parts = -(-step.kv_heads // heads)
        return Launch(
            store_tile_kernel,
            (parts + 1) * len(self._tiles),
            (*layer._sizes, *layer._blocks, layer._given, given, heads, parts),
            fixed={
                "query_ptr": layer.query,
                "index_ptr": layer.index_query,
                "turn_ptr": layer._turns,
                "slots_ptr": step.slots,
                "roles_ptr": step.roles,
                "positions_ptr": step.row_pos if layer._positions is None else layer._positions,
                "order_ptr": self._order,
                "live_ptr": self._live,
                "seq_lens_ptr": step.seq_lens,
                "tile_ptr": self._tiles,
                "table_ptr": step.block_table,
                "coords_ptr": self.coordinates,
                "start_ptr": self._start,
                "end_ptr": self._end,
                "num_rows": step.num_rows,
                "stride_table": step.block_table.stride(0),
            },
            warps=launch.store_warps(layer._arch, step.head_dim)[0],
        )

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
        if _TILE_ROWS.get(id(step)) is not self:
            _TILE_ROWS[id(step)] = self
        if self._select is None:
            self._select = SelectPrefill(
                side.summaries,
                side.ranges,
                step.row_pos,
                self.groups,
                self._scratch,
                layer.ids,
                layer.bias,
                sigma=config.sigma,
                block=config.block,
                window=config.window,
                launch=self._prefill,
            )
        self._select(index_query, scale, floor)


def _tiles(step: Step) -> Tensor:
    """Tiles of the store: sequence, and number of the block counted from the sequence's first;
    int32 [tiles, 2].

    A sequence of n rows touches at most (n + block - 2) // block + 1 blocks, wherever it begins.
    """
    block = step.config.block
    if step.query_lens is None:
        lengths = torch.full((step.num_seqs,), min(step.max_query_len, step.num_rows), device="cpu")
    else:
        lengths = torch.tensor(step.query_lens, dtype=torch.int64, device="cpu")
    many = torch.where(lengths > 0, (lengths + block - 2) // block + 1, 0)
    seq = torch.repeat_interleave(torch.arange(step.num_seqs, device="cpu"), many)
    number = torch.arange(len(seq), device="cpu") - (many.cumsum(0) - many)[seq]
    return torch.stack([seq, number], 1).int().to(step.device)
