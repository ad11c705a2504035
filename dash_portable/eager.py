"""The shared layer in plain torch: store and select on a paged cache, on any device.

It runs where there is no Triton, and beside Triton it is what the kernels are compared with. The
rule's arithmetic is `reference.py`'s; here is only where its inputs lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dash_portable import reference
from dash_portable.block_index import BlockIndex, RemoteBlocks
from dash_portable.cache_view import CacheView, check_writable
from dash_portable.live_rows import LiveRows
from dash_portable.pages import angle_steps, angles, widest
from dash_portable.plainly import plainly
from dash_portable.step import Step

_SCORES = 1 << 25  # scores of one chunk of rows, in elements


class EagerLayer:
    """Store and select for one step."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.coordinates = torch.zeros(step.num_rows, 4, dtype=torch.int32, device=step.device)
        self._frequency = angle_steps(step.config, step.head_dim, step.device)
        self.refresh()

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
        query, index_query = self.store(q, k, v, iq, ik, cache, head_cls)
        ids, bias = self.select(index_query, cache, head_cls, scale, floor)
        return query, ids, bias

    @plainly
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
        """Write the rows' tokens and give the rotated `query [N, Hq, D]` and `index_query [N,
        D]`.
        """
        step, live = self.step, self._live
        check_writable(cache)
        view = CacheView(cache, step)
        view.write_pages(live)  # first: a decoded marker of this very step may read them
        where = live.coordinates(view)
        self.coordinates.copy_(live.spread(where))
        angle = angles(where[:, 0], where[:, 1], step.config, self._frequency, torch.float32)
        rows = torch.cat(
            [live.pick(q), live.pick(k), live.pick(iq)[:, None], live.pick(ik)[:, None]], 1
        )
        turned = reference.turn(rows, angle).to(q.dtype)
        view.write_rows(live, turned[:, step.heads : -2], live.pick(v), turned[:, -1], where)
        if len(live.closing[0]):
            view.write_index(*live.closing, head_cls)
        query = live.spread(turned[:, : step.heads]).contiguous()
        return query, live.spread(turned[:, -2]).contiguous()

    def refresh(self) -> None:
        """Which rows are live, and what of their sequences all layers share, once a step."""
        self._live = LiveRows.of(self.step)
        self._remote: list[RemoteBlocks] | None = None

    def _remote_blocks(self) -> list[RemoteBlocks]:
        """Of every sequence with a row that may select; found once a step."""
        if self._remote is None:
            live, found = self._live, []
            for seq in live.seqs.unique().tolist():
                mine = (live.seqs == seq).nonzero().flatten()
                of = RemoteBlocks.of(self.step, seq, live.rows[mine], live.position[mine])
                found += [of] if of is not None else []
            self._remote = found
        return self._remote

    @plainly
    def rebuild(self, cache: Tensor, head_cls: Tensor) -> None:
        """Summaries, page ranges and page starts of whole sequences, from what any owner stores."""
        step, size = self.step, self.step.config.block
        check_writable(cache)
        view = CacheView(cache, step)
        for seq, length in enumerate(step.seq_lens.tolist()):
            if not length:
                continue
            first = torch.arange(length // size, device=cache.device) * size
            seqs = torch.full_like(first, seq)
            if len(first):
                view.write_index(seqs, first, head_cls)
            view.write_starts(seq, length)

    @plainly
    def select(
        self, index_query: Tensor, cache: Tensor, head_cls: Tensor, scale: float, floor: float
    ) -> reference.Selection:
        """The blocks of every row; padding rows have none."""
        step, config = self.step, self.step.config
        view = CacheView(cache, step)
        ids = torch.full((step.num_rows, config.topk), -1, dtype=torch.int32, device=step.device)
        bias = torch.zeros(ids.shape, dtype=torch.float32, device=step.device)
        for remote in self._remote_blocks():
            index = remote.index(view, head_cls)
            most = max(1, _SCORES // remote.blocks)
            if len(remote.rows) == step.num_rows <= most:
                return self._select_rows(
                    index_query, remote.position, remote.rows, index, scale, floor
                )
            for part, position in zip(
                remote.rows.split(most), remote.position.split(most), strict=True
            ):
                picked = self._select_rows(index_query[part], position, part, index, scale, floor)
                ids[part], bias[part] = picked.ids, picked.bias
        return reference.Selection(ids, bias)

    def _select_rows(
        self,
        query: Tensor,
        position: Tensor,
        rows: Tensor,
        index: BlockIndex,
        scale: float,
        floor: float,
    ) -> reference.Selection:
        config = self.step.config
        at = torch.arange(len(index.summaries), device=rows.device)
        candidate = at <= (position // config.block - config.local_blocks)[:, None]
        wanted = self.coordinates[rows, 3].long() + 1
        if bool((wanted > 0).any()):
            restricted = candidate & index.holds(wanted)
            candidate = torch.where(restricted.any(1, keepdim=True), restricted, candidate)
        # A matrix product's order of summation depends on its shape, and a row's selection must not
        # depend on what else is in the batch: in float64 the order leaves no trace once rounded.
        exact = widest(rows.device)
        score = reference.block_scores(query.to(exact), index.summaries.to(exact), scale).float()
        return reference.select(score, candidate, position, config, floor)
