"""A serving step: described once, run once per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dash_portable.checks import INDEX, check_backend, check_tensor, on_host
from dash_portable.config import DashConfig
from dash_portable.describe import Lengths, check_values, describe, trust_of
from dash_portable.errors import ArgumentError, found_needed
from dash_portable.layer_form import LayerForm, layer_numbers
from dash_portable.serve import serve
from dash_portable.step import Step, facts_text, row_positions

if TYPE_CHECKING:
    from dash_portable.backends.spec import Runner
    from dash_portable.choice import Choice
    from dash_portable.shared_layer import SharedLayer


class DashStep:
    """One step of a batch, for all layers; made by `DashStep.plan`."""

    def __init__(self, step: Step, choice: Choice, shared: SharedLayer, runner: Runner) -> None:
        self.step = step
        self.choice = choice
        self.backend = choice.required().name
        self.selection: tuple[Tensor, Tensor] | None = None
        self.facts = ""
        self._form = LayerForm.of(step)
        self._shared = shared
        self._runner = runner

    @classmethod
    def plan(
        cls,
        query_lens: Lengths,
        seq_lens: Lengths,
        block_table: Tensor,
        slots: Tensor,
        roles: Tensor,
        positions: Tensor | None = None,
        *,
        config: DashConfig,
        cache: Tensor,
        backend: str | None = None,
        max_model_len: int | None = None,
        num_heads: int | None = None,
        max_query_len: int | None = None,
        page_table: Tensor | None = None,
        cached_summaries: bool = True,
        prefix_lens: Tensor | None = None,
        deterministic: bool | None = None,
        graph: bool = False,
    ) -> DashStep:
        """Describe a step of R sequences with N new rows in all.

        query_lens    [R]          new rows of each sequence: whole prompts, chunks and decodes
                                   mixed
        seq_lens      [R]          tokens of each sequence, the new ones included
        block_table   [R, max]     cache blocks of each sequence
        slots         [N]          cache place of each new token; below 0: padding, not counted
                                   anywhere
        roles         [N]          0 text, 1 image, 2 page marker
        positions     [4, N]       `prompt_positions` of prompt rows; row 3 of at least 0 marks a
                                   decoded
                                   row, which continues from the token before it. None: all are
                                   decoded
        page_table    [R, pages, 2]  first token and count of each page, for sequences that share
                                   cache blocks; used instead of what the cache holds
        num_heads     query heads; as many as the cache has kv heads if not given
        cached_summaries, prefix_lens   as in `paged_dash_decode`
        graph         the step will be captured; its tensors become copies that `update` refills

        Lengths are host lists or CPU tensors; on the cache's GPU they may be tensors there, with
        `max_query_len` (1 for a decode step) given. Index tensors are int32 or int64.
        Raises ArgumentError for wrong arguments, UnsupportedError when no backend (or not the
        forced one) serves the request, BackendError when the forced one fails to plan.
        """
        step = describe(
            query_lens,
            seq_lens,
            block_table,
            slots,
            roles,
            positions,
            config=config,
            cache=cache,
            max_model_len=max_model_len,
            num_heads=num_heads,
            max_query_len=max_query_len,
            page_table=page_table,
            trust=trust_of(cached_summaries, prefix_lens),
            prefix_lens=prefix_lens,
            deterministic=deterministic,
            graph=graph,
        )
        planned = cls.of(step, backend)
        planned.facts = facts_text(step)  # made here: a compiled program may only read it
        return planned

    @classmethod
    def of(cls, step: Step, backend: str | None) -> DashStep:
        """Choose who serves a described step, and let it plan."""
        check_backend(backend)
        choice, shared, runner = serve(step, backend)
        return cls(step, choice, shared, runner)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        cache: Tensor,
        head_cls: Tensor,
        layer: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """Store the new tokens of one layer and attend; gives `[N, Hq, D]`, zeros for padding.

        q [N, Hq, D], k and v [N, H, D], iq and ik [N, D], head_cls [D]: unrotated, in the cache's
        type. The cache is written. `out`, if given, is contiguous; it is filled and returned.
        No gradient flows through it.
        """
        if head_cls is None:
            raise found_needed("head_cls", None, "a tensor [D]: without it nothing can be selected")
        self._form.check(q, k, v, iq, ik, head_cls, cache)
        scale, floor = layer_numbers(self.step.config, layer)
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            self._form.check_out(out)
        query, ids, bias = self._shared.prepare(q, k, v, iq, ik, cache, head_cls, scale, floor)
        self.selection = (ids, bias)
        self._runner.run(query, cache, ids, bias, out)
        return out

    def update(
        self,
        seq_lens: Tensor,
        block_table: Tensor,
        slots: Tensor,
        roles: Tensor,
        positions: Tensor | None = None,
        page_table: Tensor | None = None,
        prefix_lens: Tensor | None = None,
    ) -> None:
        """Refill a planned decode step in place, for the next replay of a graph that captured it.

        Every tensor has the shape it had in the plan; nothing is allocated that the graph reads.
        ArgumentError unless the step was planned with `graph=True`, if a tensor comes or goes, and
        as `plan` for wrong ones. The step is then as it was.
        """
        step = self.step
        if not step.graph:
            raise ArgumentError("update: found a step planned with graph=False, needed graph=True")
        new = {
            "seq_lens": (seq_lens, step.seq_lens),
            "block_table": (block_table, step.block_table),
            "slots": (slots, step.slots),
            "roles": (roles, step.roles),
            "positions": (positions, step.positions),
            "page_table": (page_table, step.page_table),
            "prefix_lens": (prefix_lens, step.prefix_lens),
        }
        for name, (value, own) in new.items():
            if (value is None) != (own is None):
                planned = "without" if own is None else "with"
                raise found_needed(
                    name, "None" if value is None else "a tensor", f"as planned, {planned} it"
                )
            if value is not None and own is not None:
                where = own.device
                if isinstance(value, Tensor) and on_host(value):
                    where = value.device
                check_tensor(name, value, tuple(own.shape), dtypes=INDEX, device=where)
        if on_host(step.slots):
            lengths = seq_lens.clamp(-(2**31), 2**31 - 1)
            row_pos = row_positions(
                slots, step.row_seq, step.query_start, lengths, alone=step.single_row
            )
            check_values(step, slots, row_pos, roles, positions, seq_lens, block_table, page_table)
        for value, own in new.values():
            if value is not None and own is not None:
                own.copy_(value)
        place = (step.slots, step.row_seq, step.query_start, step.seq_lens)
        step.row_pos.copy_(row_positions(*place, alone=step.single_row))
        self._shared.refresh()
        self._runner.refresh()
