"""What selection knows of the blocks of a step's sequences, beside the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import launch
from .kernels.launch import Launch, power_of_two
from .kernels.summaries import (
    summaries_block_kernel,
    summaries_copy_kernel,
    summaries_pages_kernel,
)
from .step import Step, Trust

_MAX_PAGES = 65536  # pages 0..65535


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
        # A sequence without a live row has 0 here: its seq_lens and its table may be anything. What
        # is rebuilt is whole sequences, which need no rows.
        self._lengths = step.seq_lens if write else torch.empty_like(step.seq_lens)
        self._found = False  # pages and their end, which are the same in every layer
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
                fixed={
                    "seq_lens_ptr": self._lengths,
                    "table_ptr": step.block_table,
                    "side_ptr": self.summaries,
                    "range_ptr": self.ranges,
                    "max_blocks": self.max_blocks,
                    "stride_table": step.block_table.stride(0),
                },
                warps=launch.SUMMARY_WARPS,
            )
        self._measure()

    def _measure(self) -> None:
        """Lengths by the rows: the last live row of a sequence is its last token."""
        step = self._step
        if self._write:
            return
        if step.single_row:
            torch.add(step.row_pos, 1, out=self._lengths)
        else:
            self._lengths.zero_()
            self._lengths.scatter_reduce_(0, step.row_seq.long(), step.row_pos + 1, "amax")

    def refresh(self) -> None:
        """Take over what was changed in place in the step's tensors."""
        table = self._step.page_table
        if self._given is not None and table is not None and self._given is not table:
            self._given.copy_(table)
        self._measure()
        self._found = False

    def fill(self, cache: Tensor, head_cls: Tensor) -> None:
        """From one layer's cache, after its store."""
        step = self._step
        strides = (*cache.stride()[:3], step.block_table.stride(0))
        if not self._found:
            given = step.row_pos if self._given is None else self._given
            self._find_pages(
                self._lengths, cache, step.block_table, given, self.pages, self._end, *strides,
                0 if self._given is None else given.stride(0), self.pages.stride(0),
            )  # fmt: skip
            # A captured step runs all its launches in every layer.
            self._found = not step.graph
        if self._copy is not None:
            self._copy(cache, *strides[:3])
            return
        prefix = step.seq_lens if step.prefix_lens is None else step.prefix_lens
        self._summarize(
            self._lengths, prefix, self._end, cache, step.block_table, head_cls.contiguous(),
            self.summaries, self.ranges,
            self.max_blocks, *strides,
        )  # fmt: skip
