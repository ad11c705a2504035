"""The three ways to feed a library, each written once: one gathered segment, S + 1 gathered
segments, in place.

A backend row is a way and a library: `class Flash3OneSegment(OneSegment): library = Flash3`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from dash_portable.errors import BackendError
from dash_portable.segments import fused
from dash_portable.segments.call import (
    Addressing,
    Call,
    Library,
    counted,
    fold_groups,
    planned,
    unfold_groups,
    unfold_lse,
)
from dash_portable.segments.gather import (
    BIAS_COLUMNS,
    Room,
    gather_one_segment,
    gather_segments,
    one_segment_widths,
    segment_starts,
)
from dash_portable.segments.merge import merge_segments, normalise_lse
from dash_portable.segments.places import cache_pages, page_size, page_table
from dash_portable.segments.rows import Spans, slot_count, spans

if TYPE_CHECKING:
    from dash_portable.step import Step

SCRATCH_BYTES = (
    1 << 29
)  # of one pass; a prefill of many rows takes several passes through the same scratch


_BUILT: set[tuple[object, ...]] = set()  # configurations that libraries have built


class Way(ABC):
    """A runner over passes of rows; scratch and the library's plan are made once a step."""

    library: ClassVar[type[Library]]

    def __init__(self, step: Step) -> None:
        self.step = step
        self.block, self.local, self.kept = step.config.block, step.config.local, step.config.topk
        self.slots = slot_count(self.kept, block=self.block, local=self.local)
        self.scale = 1.0 / math.sqrt(step.head_dim)
        self.group = step.heads // step.kv_heads
        self.folded = self.group > 1 and not self.library.takes_groups
        self.fused = fused.available(step.device.type)
        most = max(min(SCRATCH_BYTES // self._row_bytes(), self._most_rows()), 1)
        parts = max(-(-step.num_rows // most), 1)
        rows = -(-step.num_rows // parts)
        # Passes of one size share one plan: the last one repeats rows of the one before it.
        stops = [min(rows * part, step.num_rows) for part in range(1, parts + 1)]
        self.passes = [slice(stop - rows, stop) for stop in stops if rows]
        self.merge = fused.Merge(step, rows) if self.fused and rows else None
        if rows:
            self._plan(rows)

    def refresh(self) -> None:  # noqa: B027 - a way without anything of its own has no more to do
        """Positions and tables are read when it runs."""

    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        for part in self.passes:
            self._attend(part, query[part], cache, ids[part], bias[part], out[part])

    @abstractmethod
    def _row_bytes(self) -> int:
        """Scratch of one row."""

    def _most_rows(self) -> int:
        """Rows that the library takes at once, whatever the scratch."""
        return self.step.num_rows

    @abstractmethod
    def _plan(self, rows: int) -> None:
        """Make scratch and the library's plan for passes of `rows` rows."""

    @abstractmethod
    def _attend(
        self, part: slice, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor
    ) -> None:
        """Attend the rows of one pass into `out`."""

    def _spans(self, part: slice, ids: Tensor) -> Spans:
        return spans(self.step.row_pos[part], ids, block=self.block, local=self.local)

    def _merge(self, out: Tensor, got: Tensor, lse: Tensor, used: Tensor, bias: Tensor) -> None:
        """Merge got [N * (S + 1), Hq, .] and natural lse [Hq, N * (S + 1)] into out [N, Hq, D]."""
        rows, segments = used.shape
        # A library that turned its axes round would be merged without an error.
        if lse.shape != (got.shape[1], rows * segments):
            raise BackendError(
                f"{self.library.title}: found a log-sum-exp of {tuple(lse.shape)} by heads and "
                f"runs, needed {(got.shape[1], rows * segments)}"
            )
        if self.merge is not None and out.is_contiguous():
            self.merge(out, got, lse, used, bias)
            return
        parts = got.reshape(rows, segments, *got.shape[1:])[..., : out.shape[-1]]
        mass = lse.reshape(-1, rows, segments).permute(1, 2, 0)
        out.copy_(merge_segments(parts, mass, bias, used))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.step.dtype, device=self.step.device)

    def _counters(self, runs: int) -> Tensor:
        return torch.ones(runs, dtype=torch.int32, device=self.step.device)


class Called(Way):
    """A way whose passes are one planned library call each."""

    gather: fused.Gather | None = None

    def _plan(self, rows: int) -> None:
        self.call = self._call(rows)
        self.planned = planned(self.library.title, lambda: self.library(self.call))
        self.room = self._room(rows)
        if self.library.builds and self.step.graph:
            self._build()

    def _build(self) -> None:
        """One call over the empty room, so that a library that builds itself when it is first
        called does not do so while a graph is captured; once a process for a configuration."""
        call = self.call
        shape = (
            call.width,
            call.value_width,
            call.heads,
            call.kv_heads,
            call.queries,
            call.longest,
        )
        about = (self.library, shape, call.dtype, call.device, call.with_lse)
        if about not in _BUILT:
            planned(self.library.title, lambda: self._ask(*self._keys_and_values()))
            _BUILT.add(about)

    def _keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Those of the room, as the library takes them."""
        rows = self.passes[0].stop - self.passes[0].start
        both = (x[: rows * self.slots] for x in (self.room.key, self.room.value))
        if self.call.table is not None:
            both = (x.view(-1, self.call.page, *x.shape[1:]) for x in both)
        key, value = both
        return key, value

    @abstractmethod
    def _call(self, rows: int) -> Call:
        """The call of a pass."""

    @abstractmethod
    def _room(self, rows: int) -> Room:
        """Scratch of a pass."""

    def _runs(
        self,
        runs: int,
        *,
        width: int,
        value_width: int,
        starts_k: Tensor,
        longest: int,
        with_lse: bool,
        length: Tensor | None = None,
        table: Tensor | None = None,
        page: int = 0,
        window: int | None = None,
    ) -> Call:
        step = self.step
        return Call(
            runs=runs,
            queries=self.group if self.folded else 1,
            heads=step.kv_heads if self.folded else step.heads,
            kv_heads=step.kv_heads,
            width=width,
            value_width=value_width,
            starts_k=starts_k,
            longest=longest,
            with_lse=with_lse,
            length=length,
            table=table,
            page=page,
            window=window,
            scale=self.scale,
            dtype=step.dtype,
            device=step.device,
            graph=step.graph,
            deterministic=step.deterministic,
        )

    def _ask(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """The library's out [B, Hq, .], and its lse in our terms, [Hq, B], when it was asked for
        one."""
        query, library = self.room.query, self.planned
        if self.folded:
            query = fold_groups(query, self.step.kv_heads)
        out, lse = library.attend(query, key, value)
        if lse is not None:
            lse = normalise_lse(lse, layout=library.lse_layout, base=library.lse_base)
            lse = unfold_lse(lse, self.group) if self.folded else lse
        return (unfold_groups(out, self.group) if self.folded else out), lse

    def _ask_and_merge(
        self, key: Tensor, value: Tensor, used: Tensor, bias: Tensor, out: Tensor
    ) -> None:
        got, lse = self._ask(key, value)
        if lse is None:
            raise BackendError(f"{self.library.title}: found no log-sum-exp, needed one a segment")
        self._merge(out, got, lse, used, bias)


class OneSegment(Called):
    """Gather each row's blocks and window into one run, priors in two extra key columns; needs
    neither LSE nor bias."""

    def _row_bytes(self) -> int:
        widths = self._pitch() + one_segment_widths(self.library, self.step.head_dim)[1]
        return self.slots * self.step.kv_heads * widths * self.step.dtype.itemsize

    def _call(self, rows: int) -> Call:
        width, value_width = one_segment_widths(self.library, self.step.head_dim)
        return self._runs(
            rows,
            width=width,
            value_width=value_width,
            starts_k=counted(rows, self.slots, self.step.device),
            longest=self.slots,
            with_lse=False,
        )

    def _pitch(self) -> int:
        """Columns from one key to the next: those of the call, or more so that a key ends where a
        sector of the memory does."""
        width, _ = one_segment_widths(self.library, self.step.head_dim)
        return max(width, self.step.head_dim + fused.key_tail(self.step)) if self.fused else width

    def _tail(self) -> int:
        """Key columns behind the head that the gather writes at once; further ones stay zero."""
        return max(n for n in (2, 4, 8, 16) if n <= self._pitch() - self.step.head_dim)

    def _room(self, rows: int) -> Room:
        keys, value_width = (rows * self.slots, self.step.kv_heads), self.call.value_width
        room = Room(
            query=self._zeros(rows, self.step.heads, self.call.width),
            key=self._zeros(*keys, self._pitch())[..., : self.call.width],
            value=self._zeros(*keys, value_width),
        )
        room.query[..., self.step.head_dim : self.step.head_dim + BIAS_COLUMNS] = 1.0
        if self.fused:
            self.gather = fused.Gather(self.step, rows, room, tail=self._tail())
        return room

    def _attend(
        self, part: slice, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor
    ) -> None:
        step, room = self.step, self.room
        if self.gather is not None:
            self.gather(step, part, query, cache, ids, bias)
        else:
            gather_one_segment(
                query,
                cache,
                self._spans(part, ids),
                bias,
                step.row_seq[part],
                step.block_table,
                block=self.block,
                local=self.local,
                into=room,
            )
        if self.folded:
            got, _ = self._ask(room.key, room.value)
            out.copy_(got[..., : out.shape[-1]])
        else:
            self.planned.attend_into(room.query, room.key, room.value, out)


class Segments(Called):
    """Gather S + 1 runs a row, let the library attend each, merge by LSE and prior."""

    def _width(self) -> int:
        return self.library.width_for(self.step.head_dim)

    def _row_bytes(self) -> int:
        lines = self.slots * self.step.kv_heads + (self.kept + 1) * self.step.heads
        return 2 * lines * self._width() * self.step.dtype.itemsize

    def _call(self, rows: int) -> Call:
        runs, device = rows * (self.kept + 1), self.step.device
        row = torch.arange(rows, dtype=torch.int32, device=device)[:, None] * self.slots
        first = row + torch.arange(self.kept + 1, dtype=torch.int32, device=device) * self.block
        end = torch.full((1,), rows * self.slots, dtype=torch.int32, device=device)
        addressing, table = self.library.addressing, None
        if addressing is Addressing.PAGED:
            step = torch.arange(self.local // self.block, dtype=torch.int32, device=device)
            pages = first.flatten()[:, None] // self.block + step
            table = pages.clamp(max=rows * self.slots // self.block - 1)
        return self._runs(
            runs,
            width=self._width(),
            value_width=self._width(),
            starts_k=torch.cat((first.flatten(), end)),
            length=None if addressing is Addressing.CLOSED else self._counters(runs),
            table=table,
            page=0 if table is None else self.block,
            longest=max(self.block, self.local),
            with_lse=True,
        )

    def _room(self, rows: int) -> Room:
        keys = (rows * self.slots + 1, self.step.kv_heads, self._width())
        room = Room(
            query=self._zeros(rows * (self.kept + 1), self.step.heads, self._width()),
            key=self._zeros(*keys),
            value=self._zeros(*keys),
        )
        if self.fused and self.call.length is not None:
            self.gather = fused.Gather(self.step, rows, room, length=self.call.length)
        return room

    def _attend(
        self, part: slice, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor
    ) -> None:
        step, room, call = self.step, self.room, self.call
        if self.gather is not None:
            self.gather(step, part, query, cache, ids, bias)
            used = self.gather.used
        else:
            where = self._spans(part, ids)
            used = where.length
            starts = None if call.length is not None else segment_starts(used)
            gather_segments(
                query,
                cache,
                where,
                step.row_seq[part],
                step.block_table,
                block=self.block,
                local=self.local,
                starts=starts,
                into=room,
            )
            if starts is not None:
                call.starts_k.copy_(starts)
            if call.length is not None:
                call.length.copy_(used.flatten().clamp(min=1))
        self._ask_and_merge(*self._keys_and_values(), used, bias, out)


class InPlace(Called):
    """Point the library at the cache: a page table line for each of S + 1 runs; its left window
    cuts the local one.

    Only for libraries that clear values past a run's length: the last page of a window holds
    whatever the cache holds.
    """

    def _row_bytes(self) -> int:
        return (self.kept + 1) * self.step.heads * self.step.head_dim * self.step.dtype.itemsize * 2

    def _call(self, rows: int) -> Call:
        step, runs = self.step, rows * (self.kept + 1)
        size = page_size(step.block_size, self.block)
        table = torch.zeros(runs, self.local // size + 1, dtype=torch.int32, device=step.device)
        return self._runs(
            runs,
            width=step.head_dim,
            value_width=step.head_dim,
            starts_k=counted(runs, 1, step.device),
            length=self._counters(runs),
            table=table,
            page=size,
            longest=self.local + size,
            window=self.local - 1,
            with_lse=True,
        )

    tables: fused.Table | None = None

    def _room(self, rows: int) -> Room:
        if self.fused:
            self.tables = fused.Table(self.step, rows, size=self.call.page)
        query = self._zeros(rows * (self.kept + 1), self.step.heads, self.step.head_dim)
        return Room(query=query, key=query, value=query)

    def _attend(
        self, part: slice, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor
    ) -> None:
        rows = len(out)
        call, wide = self.call, self.room.query
        assert call.table is not None
        assert call.length is not None
        pages = cache_pages(cache, size=call.page)
        if self.tables is not None:
            used = self.tables(self.step, part, ids, pages.per_block, call.table, call.length)
        else:
            where = self._spans(part, ids)
            used = where.length
            table = page_table(
                where,
                self.step.row_seq[part],
                self.step.block_table,
                size=call.page,
                per_block=pages.per_block,
                block_size=self.step.block_size,
                local=self.local,
            )
            call.table.copy_(table.pages)
            call.length.copy_(table.length)
        wide.view(rows, self.kept + 1, *query.shape[1:]).copy_(query[:, None])
        self._ask_and_merge(pages.key, pages.value, used, bias, out)
