"""The oracle as a backend: every row gathers its own keys, in float32. Slow, bounded, runs
anywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dash_portable.segments.places import token_places
from dash_portable.segments.rows import slot_count, slot_tokens, spans
from dash_portable.step import Step

_ELEMENTS = 1 << 25  # gathered numbers of one chunk of rows


class Runner:
    """Gather, softmax, weigh: dash.md's attention as it reads."""

    def __init__(self, step: Step) -> None:
        self.step = step
        config = step.config
        slots = slot_count(config.topk, block=config.block, local=config.local)
        self._rows = max(1, _ELEMENTS // (slots * 2 * step.head_dim * step.kv_heads))

    def refresh(self) -> None:
        """Nothing was read from the step's tensors yet."""

    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        for part in torch.arange(self.step.num_rows, device=query.device).split(self._rows):
            out[part] = self._attend(query[part], cache, ids[part], bias[part], part).to(out.dtype)

    def _attend(
        self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, rows: Tensor
    ) -> Tensor:
        step, config = self.step, self.step.config
        keys, values, used = gather_rows(step, cache, ids, rows)
        prior = bias.float().repeat_interleave(config.block, 1)
        prior = torch.cat([prior, prior.new_zeros(len(rows), config.local)], 1)
        grouped = query.float().unflatten(1, (step.kv_heads, step.group))
        logit = torch.einsum("nhgd,nthd->nhgt", grouped, keys) / math.sqrt(step.head_dim)
        logit = logit + prior[:, None, None]
        weight = logit.masked_fill(~used[:, None, None], -torch.inf).softmax(-1)
        # A row of padding has no key at all: its softmax is no number, its output is zero.
        weight = weight.masked_fill(~used.any(1)[:, None, None, None], 0.0)
        return torch.einsum("nhgt,nthd->nhgd", weight, values).flatten(1, 2)


def gather_rows(
    step: Step, cache: Tensor, ids: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values float32 `[n, W, H, D]` of the given rows, and which of the W slots are used
    `[n, W]`.

    Unused slots hold zeros.
    """
    config = step.config
    where = spans(step.row_pos[rows], ids, block=config.block, local=config.local)
    token, used = slot_tokens(where, block=config.block, local=config.local)
    block, place = token_places(
        token, used, step.row_seq[rows], step.block_table, block_size=step.block_size
    )
    both = cache[block, :-1, place].float()
    both = both.masked_fill(~used[..., None, None], 0.0)
    return both[..., : step.head_dim], both[..., step.head_dim :], used
