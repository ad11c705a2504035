"""The cache as one step's sequences see it: what plain torch reads and writes there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dash_portable import cache as layout
from dash_portable import reference
from dash_portable.config import DashConfig
from dash_portable.errors import found_needed
from dash_portable.pages import IMAGE, widest
from dash_portable.step import Step

if TYPE_CHECKING:
    from dash_portable.live_rows import LiveRows


def check_writable(cache: Tensor) -> None:
    """ArgumentError for a cache of inference mode outside of it: torch refuses to write there."""
    if cache.is_inference() and not torch.is_inference_mode_enabled():
        raise found_needed(
            "cache", "a tensor made in torch.inference_mode()", "to be used in that mode too"
        )


class CacheView:
    """The cache as the sequences of one step see it."""

    def __init__(self, cache: Tensor, step: Step) -> None:
        self.cache = cache
        self.step = step
        self.config: DashConfig = step.config
        self.dim = step.head_dim
        self.aux = layout.auxiliary(cache)

    def at(self, seqs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return layout.places(self.step.block_table, seqs, tokens, self.step.block_size)

    def bytes(self, seqs: Tensor, tokens: Tensor, first: int, width: int) -> Tensor:
        """Integers of `width` bytes behind the index key of the given tokens, int64."""
        return self.bytes_at(*self.at(seqs, tokens), first, width)

    def bytes_at(self, block: Tensor, offset: Tensor, first: int, width: int) -> Tensor:
        """The same of given cache blocks and offsets."""
        begin = self.dim + first
        return layout.from_bytes(self.aux[..., begin : begin + width][block, offset])

    def states(self, seqs: Tensor, tokens: Tensor) -> Tensor:
        """tok, page, num_pages, query_page of the given tokens: `[..., 4]` int64."""
        return self.states_at(*self.at(seqs, tokens))

    def states_at(self, block: Tensor, offset: Tensor) -> Tensor:
        """The same of given cache blocks and offsets."""
        begin = self.dim + layout.STATE
        elements = self.aux[..., begin : begin + 16][block, offset]
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
        self, live: LiveRows, key: Tensor, value: Tensor, index_key: Tensor, state: Tensor
    ) -> None:
        """Keys, values, role and state of the live rows, at their slots."""
        dim, dtype = self.dim, self.cache.dtype
        self.cache[live.block, :-1, live.place] = torch.cat([key, value], -1).to(dtype)
        told = torch.cat([index_key.to(dtype), live.roles[:, None].to(dtype)], 1)
        self.aux[live.block, live.place, : dim + layout.ROLE + 1] = told
        state_bytes = layout.to_bytes(state, 4).flatten(1).to(dtype)
        at = dim + layout.STATE
        self.aux[live.block, live.place, at : at + 16] = state_bytes

    def write_pages(self, live: LiveRows) -> None:
        """Counts and starts on the rows of prompt tokens i <= num_pages."""
        step = self.step
        if step.positions is None:
            return
        _, _, num_pages, extra = step.positions[:, live.rows].long().unbind(0)
        known = (extra < 0) & (live.position <= num_pages)
        token, count = live.position[known], -1 - extra[known]
        if not len(token):
            return
        seqs = live.seqs[known]
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
        block, offset = live.block[known], live.place[known]
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
        block, offset = self.at(seqs, rows)
        at = self.dim + layout.START
        start = layout.to_bytes(count.cumsum(0) - count, 4)
        self.aux[block, offset, at : at + 4] = start.to(self.cache.dtype)

    def write_index(self, seqs: Tensor, first: Tensor, head_cls: Tensor | None) -> None:
        """Summary and page range of the complete blocks that begin at token `first[i]` of
        `seqs[i]`.
        """
        pages = self.page_range(self.image_pages(seqs, first))
        block, offset = self.at(seqs, first)
        at, dtype = self.dim + layout.LOW, self.cache.dtype
        self.aux[block, offset, at : at + 4] = layout.to_bytes(pages, 2).flatten(1).to(dtype)
        if head_cls is None:
            return
        halves = self.summarize(seqs, first, head_cls).unflatten(1, (2, self.dim // 2))
        half = layout.summary_at(self.dim)
        for i in range(2):
            block, offset = self.at(seqs, first + i)
            self.aux[block, offset, half:] = halves[:, i]

    def summarize(self, seqs: Tensor, first: Tensor, head_cls: Tensor) -> Tensor:
        """Summaries `[n, D]` made from the stored index keys, rounded to the cache's type."""
        tokens = first[:, None] + torch.arange(self.config.block, device=first.device)
        block, offset = self.at(seqs[:, None], tokens)
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
        block, offset = self.at(seqs, tokens)
        shown = self.aux[..., self.dim + layout.ROLE][block, offset] == IMAGE
        if not bool(shown.any()):
            return torch.zeros_like(tokens)
        state = self.states_at(block, offset)
        end = self.image_end(seqs[:, 0], state[:, -1, 2], tokens[:, -1])
        shown = shown & (tokens < end[:, None])
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
