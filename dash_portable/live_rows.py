"""The rows of a step that are no padding, and what of them is the same in every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dash_portable.cache import places
from dash_portable.cache_view import CacheView
from dash_portable.pages import MARKER, next_coordinates, next_page
from dash_portable.step import Step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveRows:
    """n live rows of the N of a step; all tensors int64 but the roles.

    rows             [n]      their numbers in the step; `total` is N, `whole`: all of them
    seqs, position   [n]      sequence, and token index in it
    block, place     [n]      where their tokens are stored
    roles            [n]
    given            [n, 4]   coordinates of prompt rows; None where no row has any
    first            [m]      which continue from the cache: decoded, the first of their sequence
    before           ([m], [m])  block and place of the token before each of `first`
    marked           whether one of `first` is a page marker
    later            (i, j) of the decoded rows i that continue from row j, in order
    closing          ([c], [c])  sequence and first token of each block that is completed
    """

    rows: Tensor
    total: int
    whole: bool
    seqs: Tensor
    position: Tensor
    block: Tensor
    place: Tensor
    roles: Tensor
    given: Tensor | None
    first: Tensor
    before: tuple[Tensor, Tensor]
    marked: bool
    later: tuple[tuple[int, int], ...]
    closing: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, step: Step) -> LiveRows:
        rows = (step.row_pos >= 0).nonzero().flatten()
        seqs, position = step.row_seq[rows].long(), step.row_pos[rows].long()
        roles, slots = step.roles[rows].long(), step.slots[rows]
        given, decoded = None, torch.ones_like(rows, dtype=torch.bool)
        if step.positions is not None:
            tok, raw, pages, extra = step.positions[:, rows].long().unbind(0)
            given = torch.stack([tok, torch.minimum(raw, pages), pages, raw - 1], 1)
            decoded = torch.zeros_like(decoded) if step.recomputed else extra >= 0
        follows = torch.zeros_like(decoded)
        follows[1:] = seqs[1:] == seqs[:-1]
        first = (decoded & ~follows).nonzero().flatten()
        later = (decoded & follows).nonzero().flatten().tolist()
        last = ((position + 1) % step.config.block == 0).nonzero().flatten()
        return cls(
            rows=rows,
            total=step.num_rows,
            whole=len(rows) == step.num_rows,
            seqs=seqs,
            position=position,
            block=slots // step.block_size,
            place=slots % step.block_size,
            roles=roles,
            given=given,
            first=first,
            before=places(step.block_table, seqs[first], position[first] - 1, step.block_size),
            marked=bool((roles[first] == MARKER).any()),
            later=tuple((row, row - 1) for row in later),
            closing=(seqs[last], position[last] + 1 - step.config.block),
        )

    def pick(self, values: Tensor) -> Tensor:
        """The live ones of `[N, ...]`."""
        return values if self.whole else values[self.rows]

    def spread(self, values: Tensor) -> Tensor:
        """`[n, ...]` as `[N, ...]`, zeros for padding."""
        if self.whole:
            return values
        out = values.new_zeros(self.total, *values.shape[1:])
        out[self.rows] = values
        return out

    def coordinates(self, view: CacheView) -> Tensor:
        """tok, page, num_pages, query_page, int64 `[n, 4]`.

        Prompt rows bring theirs in `positions`. A decoded row continues from the token before it:
        of the row before in this step, or of the cache.
        """
        if len(self.first):
            state = view.states_at(*self.before)
            if self.marked:
                state = self._continued(view, self.first, state)
            else:  # text and images only count on
                state[:, 0] += 1
            if len(self.first) == len(self.rows):
                return state
        out = torch.zeros(len(self.rows), 4, dtype=torch.int64, device=self.rows.device)
        if self.given is not None:
            out.copy_(self.given)
        if len(self.first):
            out[self.first] = state
        for row, before in self.later:  # one after the other
            at = self.rows.new_tensor([row])
            out[at] = self._continued(view, at, out[before : before + 1])
        return out

    def _continued(self, view: CacheView, at: Tensor, state: Tensor) -> Tensor:
        """Coordinates of live rows `at [m]`, whose tokens follow tokens with `state [m, 4]`."""
        counts = view.counts(self.seqs[at], next_page(state))
        return next_coordinates(state, self.roles[at], counts)
