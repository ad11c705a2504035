"""The shared layer in plain torch: store and select on a paged cache, on any device.

It runs where there is no Triton, and beside Triton it is what the kernels are compared with. The
rule's arithmetic is `reference.py`'s; here is only where its inputs lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dash_portable import cache as layout
from dash_portable import reference
from dash_portable.config import DashConfig
from dash_portable.errors import found_needed
from dash_portable.pages import IMAGE, angles, next_coordinates, next_page, widest
from dash_portable.step import Step, Trust

_SCORES = 1 << 25  # scores of one chunk of rows, in elements


class EagerLayer:
    """Store and select for one step."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.coordinates = torch.zeros(step.num_rows, 4, dtype=torch.int32, device=step.device)
        self._places: dict[int, tuple[Tensor, Tensor]] = {}
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

    @torch.no_grad()
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
        _check_writable(cache)
        view = CacheView(cache, step)
        view.write_pages(live)  # first: a decoded marker of this very step may read them
        self.coordinates.zero_()
        self.coordinates[live] = row_coordinates(view, step, live).int()
        where = self.coordinates[live]
        angle = angles(where[:, 0], where[:, 1], step.config, step.head_dim, torch.float32)
        rows = torch.cat([q[live], k[live], iq[live, None], ik[live, None]], 1)
        turned = reference.turn(rows, angle).to(q.dtype)
        query, index_query = q.new_zeros(q.shape), iq.new_zeros(iq.shape)
        query[live], index_query[live] = turned[:, : step.heads], turned[:, -2]
        view.write_rows(live, turned[:, step.heads : -2], v[live], turned[:, -1], where)
        view.close_blocks(live, head_cls)
        return query, index_query

    def refresh(self) -> None:
        """Which rows are live; where the summaries lie is looked up once a step and sequence."""
        self._live = (self.step.row_pos >= 0).nonzero().flatten()
        self._places.clear()

    @torch.no_grad()
    def rebuild(self, cache: Tensor, head_cls: Tensor) -> None:
        """Summaries, page ranges and page starts of whole sequences, from what any owner stores."""
        step, size = self.step, self.step.config.block
        _check_writable(cache)
        view = CacheView(cache, step)
        for seq, length in enumerate(step.seq_lens.tolist()):
            if not length:
                continue
            first = torch.arange(length // size, device=cache.device) * size
            seqs = torch.full_like(first, seq)
            if len(first):
                view.write_index(seqs, first, head_cls)
            view.write_starts(seq, length)

    @torch.no_grad()
    def select(
        self, index_query: Tensor, cache: Tensor, head_cls: Tensor, scale: float, floor: float
    ) -> reference.Selection:
        """The blocks of every row; padding rows have none."""
        step, config = self.step, self.step.config
        ids = torch.full((step.num_rows, config.topk), -1, dtype=torch.int32, device=step.device)
        bias = torch.zeros((step.num_rows, config.topk), device=step.device)
        view = CacheView(cache, step)
        for seq in range(step.num_seqs):
            rows = self._live[step.row_seq[self._live] == seq]
            if not len(rows):
                continue
            blocks = (int(step.row_pos[rows].max()) // config.block - config.local_blocks) + 1
            if blocks <= 0:
                continue
            if seq not in self._places:
                self._places[seq] = view.summary_places(seq, blocks)
            index = view.index(seq, blocks, head_cls, self._places[seq])
            for part in rows.split(max(1, _SCORES // blocks)):
                picked = self._select_rows(index_query[part], part, index, scale, floor)
                ids[part], bias[part] = picked.ids, picked.bias
        return reference.Selection(ids, bias)

    def _select_rows(
        self, query: Tensor, rows: Tensor, index: BlockIndex, scale: float, floor: float
    ) -> reference.Selection:
        config = self.step.config
        position = self.step.row_pos[rows].long()
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


def _check_writable(cache: Tensor) -> None:
    if cache.is_inference() and not torch.is_inference_mode_enabled():
        raise found_needed(
            "cache", "a tensor made in torch.inference_mode()", "to be used in that mode too"
        )


class BlockIndex:
    """What selection knows of the first B blocks of one sequence.

    summaries   [B, D]
    pages       gives [B, 2]: smallest and largest `image_page + 1` in each, 0 for none
    tokens      gives [n, block] for n blocks: `image_page + 1` of each token, 0 for none

    Pages are only asked for when a row has one, tokens only for blocks with a page strictly between
    the two.
    """

    def __init__(
        self,
        summaries: Tensor,
        pages: Callable[[], Tensor],
        tokens: Callable[[Tensor], Tensor],
    ) -> None:
        self.summaries = summaries
        self._pages = functools.cache(pages)
        self._tokens = tokens

    def holds(self, wanted: Tensor) -> Tensor:
        """Does block b hold an image token with `image_page + 1 == wanted[n]`? `[N]` to `[N, B]`.

        Never for 0.
        """
        low, high = self._pages().unbind(1)
        page = wanted[:, None]
        inside = (low <= page) & (page <= high) & (page > 0)
        row, block = (inside & (low < page) & (page < high)).nonzero(as_tuple=True)
        if len(row):
            several, at = block.unique(return_inverse=True)
            inside[row, block] = (self._tokens(several)[at] == wanted[row, None]).any(1)
        return inside


class CacheView:
    """The cache as the sequences of one step see it."""

    def __init__(self, cache: Tensor, step: Step) -> None:
        self.cache = cache
        self.step = step
        self.config: DashConfig = step.config
        self.dim = step.head_dim
        self.aux = layout.auxiliary(cache)

    def _at(self, seqs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return layout.places(self.step.block_table, seqs, tokens, self.step.block_size)

    def bytes(self, seqs: Tensor, tokens: Tensor, first: int, width: int) -> Tensor:
        """Integers of `width` bytes behind the index key of the given tokens, int64."""
        block, offset = self._at(seqs, tokens)
        at = self.dim + first + torch.arange(width, device=block.device)
        return layout.from_bytes(self.aux[block[..., None], offset[..., None], at])

    def states(self, seqs: Tensor, tokens: Tensor) -> Tensor:
        """tok, page, num_pages, query_page of the given tokens: `[..., 4]` int64."""
        block, offset = self._at(seqs, tokens)
        at = self.dim + layout.STATE + torch.arange(16, device=block.device)
        elements = self.aux[block[..., None], offset[..., None], at]
        return layout.from_bytes(elements.unflatten(-1, (4, 4)))

    def counts(self, seqs: Tensor, pages: Tensor) -> Tensor:
        """Tokens of the given pages up to the last image, int64 `[...]`.

        The state in the cache names the pages and may be nonsense: a page that cannot be has none.
        """
        table, seqs = self.step.page_table, seqs.long()
        limit = self.step.seq_lens[seqs] if table is None else table.shape[1]
        real = (pages >= 0) & (pages < limit)
        pages = torch.where(real, pages, 0).long()
        if table is None:
            count = self.bytes(seqs, pages, layout.COUNT, 4)
        else:
            count = table[seqs, pages, 1].long()
        return torch.where(real, count, 0)

    def write_rows(
        self, live: Tensor, key: Tensor, value: Tensor, index_key: Tensor, state: Tensor
    ) -> None:
        """Keys, values, role and state of the live rows, at their slots."""
        block = self.step.slots[live] // self.step.block_size
        offset = self.step.slots[live] % self.step.block_size
        dim, dtype = self.dim, self.cache.dtype
        self.cache[block, :-1, offset, :dim] = key.to(dtype)
        self.cache[block, :-1, offset, dim:] = value.to(dtype)
        self.aux[block, offset, :dim] = index_key.to(dtype)
        self.aux[block, offset, dim + layout.ROLE] = self.step.roles[live].to(dtype)
        state_bytes = layout.to_bytes(state, 4).flatten(1).to(dtype)
        at = dim + layout.STATE
        self.aux[block, offset, at : at + 16] = state_bytes

    def write_pages(self, live: Tensor) -> None:
        """Counts and starts on the rows of prompt tokens i <= num_pages."""
        step = self.step
        if step.positions is None:
            return
        _, _, num_pages, extra = step.positions[:, live].long().unbind(0)
        at = step.row_pos[live].long()
        known = (extra < 0) & (at <= num_pages)
        rows, token, count = live[known], at[known], -1 - extra[known]
        if not len(rows):
            return
        seqs = step.row_seq[rows].long()
        start = torch.zeros_like(count)
        # Rows come in order; the first of a sequence continues from the row before it in the cache.
        first = torch.ones_like(seqs, dtype=torch.bool)
        first[1:] = seqs[1:] != seqs[:-1]
        carried = first & (token > 0)
        before = token[carried] - 1
        start[carried] = self.bytes(seqs[carried], before, layout.START, 4) + self.bytes(
            seqs[carried], before, layout.COUNT, 4
        )
        running = count.cumsum(0) - count
        group = first.cumsum(0) - 1
        start = start[first][group] + running - running[first][group]
        block, offset = step.slots[rows] // step.block_size, step.slots[rows] % step.block_size
        both = torch.cat([layout.to_bytes(count, 4), layout.to_bytes(start, 4)], 1)
        begin = self.dim + layout.COUNT
        self.aux[block, offset, begin : begin + 8] = both.to(self.cache.dtype)

    def write_starts(self, seq: int, length: int) -> None:
        """First tokens of all pages of one sequence, from its counts."""
        last = torch.tensor([length - 1], device=self.cache.device)
        pages = int(self.states(torch.full_like(last, seq), last)[0, 2])
        pages = min(max(pages, 0), length - 1)
        rows = torch.arange(pages + 1, device=self.cache.device)
        seqs = torch.full_like(rows, seq)
        count = self.counts(seqs, rows)
        block, offset = self._at(seqs, rows)
        at = self.dim + layout.START
        start = layout.to_bytes(count.cumsum(0) - count, 4)
        self.aux[block, offset, at : at + 4] = start.to(self.cache.dtype)

    def close_blocks(self, live: Tensor, head_cls: Tensor | None) -> None:
        """Summary and page range of every block whose last token was just stored."""
        step, size = self.step, self.config.block
        rows = live[(step.row_pos[live] + 1) % size == 0]
        if not len(rows):
            return
        seqs, first = step.row_seq[rows].long(), step.row_pos[rows].long() + 1 - size
        self.write_index(seqs, first, head_cls)

    def write_index(self, seqs: Tensor, first: Tensor, head_cls: Tensor | None) -> None:
        """Summary and page range of the complete blocks that begin at token `first[i]` of
        `seqs[i]`.
        """
        pages = self.page_range(self.image_pages(seqs, first))
        block, offset = self._at(seqs, first)
        at, dtype = self.dim + layout.LOW, self.cache.dtype
        self.aux[block, offset, at : at + 4] = layout.to_bytes(pages, 2).flatten(1).to(dtype)
        if head_cls is None:
            return
        halves = self.summarize(seqs, first, head_cls).unflatten(1, (2, self.dim // 2))
        half = layout.summary_at(self.dim)
        for i in range(2):
            block, offset = self._at(seqs, first + i)
            self.aux[block, offset, half:] = halves[:, i]

    def summarize(self, seqs: Tensor, first: Tensor, head_cls: Tensor) -> Tensor:
        """Summaries `[n, D]` made from the stored index keys, rounded to the cache's type."""
        tokens = first[:, None] + torch.arange(self.config.block, device=first.device)
        block, offset = self._at(seqs[:, None], tokens)
        exact = widest(self.cache.device)  # as for scores, see `_select_rows`
        keys = self.aux[block, offset, : self.dim].to(exact)
        return reference.summarize(keys, head_cls.to(exact)).to(self.cache.dtype)

    def image_pages(self, seqs: Tensor, first: Tensor) -> Tensor:
        """`image_page + 1` of each token of the blocks, `[n, block]`, 0 for none.

        Only images of the prompt have a page: tokens before the end of the last page. Where the row
        that tells this end is not stored yet, all tokens so far are the prompt's.
        """
        size = self.config.block
        tokens = first[:, None] + torch.arange(size, device=first.device)
        seqs = seqs[:, None].expand_as(tokens)
        block, offset = self._at(seqs, tokens)
        role = self.aux[block, offset, self.dim + layout.ROLE]
        state = self.states(seqs, tokens)
        end = self.image_end(seqs[:, 0], state[:, -1, 2], tokens[:, -1])
        shown = (role == IMAGE) & (tokens < end[:, None])
        return torch.where(shown, state[..., 1], 0)

    def image_end(self, seqs: Tensor, num_pages: Tensor, stored: Tensor) -> Tensor:
        """One past the last image of each sequence, `[n]`; past everything where it cannot be
        known yet.
        """
        end = torch.full_like(stored, torch.iinfo(torch.int64).max)
        known = (num_pages >= 0) & (num_pages <= stored)
        if self.step.page_table is not None:
            known = torch.ones_like(known)
            num_pages = num_pages.clamp(0, self.step.page_table.shape[1] - 1)
        seqs, num_pages = seqs[known], num_pages[known]
        if len(seqs):
            # All counts, not the stored start: another owner's cache has none.
            each = torch.arange(int(num_pages.max()) + 1, device=seqs.device)
            within = each <= num_pages[:, None]
            pages = torch.where(within, each, 0)
            counts = self.counts(seqs[:, None].expand_as(pages), pages)
            end[known] = counts.masked_fill(~within, 0).sum(1)
        return end

    @staticmethod
    def page_range(pages: Tensor) -> Tensor:
        """Smallest and largest page above 0 of each block: `[n, block]` to `[n, 2]`, 0 for none."""
        big = torch.where(pages > 0, pages, 1 << 20)
        low = big.amin(1)
        return torch.stack([torch.where(low < 1 << 20, low, 0), pages.amax(1)], 1)

    def index(
        self, seq: int, blocks: int, head_cls: Tensor, places: tuple[Tensor, Tensor]
    ) -> BlockIndex:
        """The first `blocks` blocks of a sequence, trusted as the step says."""
        step, size = self.step, self.config.block
        first = torch.arange(blocks, device=self.cache.device) * size
        seqs = torch.full_like(first, seq)

        def tokens(chosen: Tensor) -> Tensor:
            return self.image_pages(seqs[chosen], first[chosen])

        if step.trust is Trust.NONE:
            made = self.summarize(seqs, first, head_cls)
            return BlockIndex(made, lambda: self.page_range(self.image_pages(seqs, first)), tokens)
        block, offset = places
        head = torch.full_like(block, step.kv_heads)
        halves = layout.read_lines(self.cache, block, head, offset)
        summaries = halves[..., layout.summary_at(self.dim) :].flatten(1)
        if step.trust is Trust.PREFIX and step.prefix_lens is not None:
            later = first + size > step.prefix_lens[seq]
            summaries[later] = self.summarize(seqs[later], first[later], head_cls)

        def pages() -> Tensor:
            ends = [self.bytes(seqs, first, at, 2) for at in (layout.LOW, layout.HIGH)]
            return torch.stack(ends, 1)

        return BlockIndex(summaries, pages, tokens)

    def summary_places(self, seq: int, blocks: int) -> tuple[Tensor, Tensor]:
        """Cache block and offset `[blocks, 2]` of the rows t and t + 1 that hold a summary's
        halves.
        """
        first = torch.arange(blocks, device=self.cache.device)[:, None] * self.config.block
        both = first + torch.arange(2, device=first.device)
        return self._at(torch.full_like(both, seq), both)


def row_coordinates(view: CacheView, step: Step, live: Tensor) -> Tensor:
    """tok, page, num_pages, query_page of the live rows, int64 `[n, 4]`.

    Prompt rows bring theirs in `positions`. A decoded row continues from the token before it: of
    the row before in this step, or of the cache.
    """
    out = torch.zeros(step.num_rows, 4, dtype=torch.int64, device=step.device)
    decoded = torch.ones(step.num_rows, dtype=torch.bool, device=step.device)
    if step.positions is not None:
        tok, raw, pages, extra = step.positions.long().unbind(0)
        given = torch.stack([tok, torch.minimum(raw, pages), pages, raw - 1], 1)
        decoded = torch.zeros_like(decoded) if step.recomputed else extra >= 0
        out[live] = given[live]
    waiting = live[decoded[live]]
    previous = torch.full((step.num_rows,), -1, dtype=torch.int64, device=step.device)
    same = step.row_seq[live[1:]] == step.row_seq[live[:-1]]
    previous[live[1:][same]] = live[:-1][same]
    before = previous[waiting]
    first = waiting[before < 0]
    if len(first):
        seqs, token = step.row_seq[first].long(), step.row_pos[first].long()
        out[first] = _continue(view, step, first, view.states(seqs, token - 1))
    for row in waiting[before >= 0].tolist():  # a later row of its sequence: one after the other
        at = torch.tensor([row], device=step.device)
        out[at] = _continue(view, step, at, out[previous[at]])
    return out[live]


def _continue(view: CacheView, step: Step, rows: Tensor, state: Tensor) -> Tensor:
    """Coordinates of `rows`, whose tokens follow tokens with `state [n, 4]`."""
    seqs, page = step.row_seq[rows].long(), next_page(state)
    return next_coordinates(state, step.roles[rows].long(), view.counts(seqs, page))
