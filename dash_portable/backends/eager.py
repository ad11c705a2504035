"""The oracle as a backend: every row gathers its own keys, in float32. Slow, bounded, runs
anywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dash_portable.cache import places, read_lines
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

    @torch.no_grad()
    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        out.zero_()
        live = (self.step.row_pos >= 0).nonzero().flatten()
        for part in live.split(self._rows) if len(live) else ():
            out[part] = self._attend(query[part], cache, ids[part], bias[part], part).to(out.dtype)

    def _attend(
        self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, rows: Tensor
    ) -> Tensor:
        step = self.step
        keys, values, mask = gather_rows(step, cache, ids, bias, rows)
        grouped = query.float().unflatten(1, (step.kv_heads, step.group))
        logit = torch.einsum("nhgd,nhtd->nhgt", grouped, keys) / math.sqrt(step.head_dim)
        weight = (logit + mask[:, None, None]).softmax(-1)
        return torch.einsum("nhgt,nhtd->nhgd", weight, values).flatten(1, 2)


def gather_rows(
    step: Step, cache: Tensor, ids: Tensor, bias: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values float32 `[n, H, W, D]` of live rows, and what is added to their logits `[n,
    W]`.

    Slots that a row does not use repeat its own token, which is never NaN, under a mask of -inf.
    """
    config, position = step.config, step.row_pos[rows]
    where = spans(position, ids, block=config.block, local=config.local)
    token, used = slot_tokens(where, block=config.block, local=config.local)
    token = torch.where(used, token, position[:, None]).long()
    block, place = places(step.block_table, step.row_seq[rows, None], token, step.block_size)
    heads = torch.arange(step.kv_heads, device=rows.device)[:, None]
    both = read_lines(cache, block[:, None], heads, place[:, None]).float()
    prior = bias.float().repeat_interleave(config.block, 1)
    prior = torch.cat([prior, prior.new_zeros(len(rows), config.local)], 1)
    mask = prior.masked_fill(~used, -torch.inf)
    return both[..., : step.head_dim], both[..., step.head_dim :], mask
