"""What a sequence's rows may select from: the summaries and pages of the blocks behind them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dash_portable import cache as layout
from dash_portable.cache_view import CacheView
from dash_portable.step import Step, Trust


class RemoteBlocks:
    """The blocks that some row of one sequence may select, the same in every layer.

    rows, position [n]     the sequence's live rows: their numbers, and token indices, int64
    blocks                 how many blocks, from the sequence's first
    """

    def __init__(self, step: Step, seq: int, rows: Tensor, position: Tensor, blocks: int) -> None:
        self.step = step
        self.rows, self.position, self.blocks = rows, position, blocks
        self.seqs = torch.full((blocks,), seq, dtype=torch.int64, device=rows.device)
        self.first = torch.arange(blocks, device=rows.device) * step.config.block
        # Rows t and t + 1 of a block that begins at t hold a half of its summary each.
        both = self.first[:, None] + torch.arange(2, device=rows.device)
        seqs = self.seqs[:, None].expand_as(both)
        self._halves = layout.places(step.block_table, seqs, both, step.block_size)
        self._lines: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def of(cls, step: Step, seq: int, rows: Tensor, position: Tensor) -> RemoteBlocks | None:
        """None where no block is far enough behind any row."""
        config = step.config
        blocks = int(position.max()) // config.block - config.local_blocks + 1
        return cls(step, seq, rows, position, blocks) if blocks > 0 else None

    def index(self, view: CacheView, head_cls: Tensor) -> BlockIndex:
        """What a layer's cache says of them, trusted as the step says."""
        step = self.step

        def tokens(chosen: Tensor) -> Tensor:
            return view.image_pages(self.seqs[chosen], self.first[chosen])

        if step.trust is Trust.NONE:
            made = view.summarize(self.seqs, self.first, head_cls)
            return BlockIndex(
                made, lambda: view.page_range(view.image_pages(self.seqs, self.first)), tokens
            )
        summaries = self._stored(view.cache)
        if step.trust is Trust.PREFIX and step.prefix_lens is not None:
            later = self.first + step.config.block > step.prefix_lens[self.seqs]
            summaries[later] = view.summarize(self.seqs[later], self.first[later], head_cls)

        def pages() -> Tensor:
            block, offset = (half[:, 0] for half in self._halves)
            both = (layout.LOW, layout.HIGH)
            return torch.stack([view.bytes_at(block, offset, at, 2) for at in both], 1)

        return BlockIndex(summaries, pages, tokens)

    def _stored(self, cache: Tensor) -> Tensor:
        """The summaries in the cache, `[blocks, D]`."""
        begin, lines = layout.summary_at(self.step.head_dim), layout.Lines.of(cache)
        block, offset = self._halves
        if lines is None:
            return cache[block, self.step.kv_heads, offset, begin:].flatten(1)
        key = (lines.per_block, lines.per_head)
        if key not in self._lines:
            self._lines[key] = lines.number(block, self.step.kv_heads, offset).flatten()
        return lines.data[:, begin:].index_select(0, self._lines[key]).view(self.blocks, -1)


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
