"""The oracle as a backend: every row gathers its own keys, in float32. Slow, bounded, runs
anywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dash_portable.cache import places, read_lines
from dash_portable.plainly import plainly
from dash_portable.segments.rows import slot_count
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

    @plainly
    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        out.zero_()
        live = (self.step.row_pos >= 0).nonzero().flatten()
        for rows in live.split(self._rows) if len(live) else ():
            made = self._attend(query[rows], cache, ids[rows], bias[rows], rows)
            out[rows] = made.to(out.dtype)

    def _attend(
        self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, rows: Tensor
    ) -> Tensor:
        step = self.step
        keys, values, mask = gather_rows(step, cache, ids, bias, rows)
        grouped = query.float().unflatten(1, (step.kv_heads, step.group))
        logit = torch.einsum("nhgd,nhtd->nhgt", grouped, keys) / math.sqrt(step.head_dim)
        weight = (logit + mask[:, None, None]).softmax(-1)
        return torch.einsum("nhgt,nhtd->nhgd", weight, values).flatten(1, 2)


class GatheredRows:
    """Live rows `[n]` of a step whose keys are gathered, each row's apart.

    W slots a row: topk blocks, then the local window, which is the same in every layer. Slots that
    a row does not use repeat its own token, which is never NaN, under a mask of -inf.
    """

    def __init__(self, step: Step, rows: Tensor) -> None:
        config, device = step.config, rows.device
        self.step, self.rows = step, rows
        self.position = step.row_pos[rows].long()[:, None]  # [n, 1]
        self.low = (self.position + 1 - config.local).clamp_min(0)
        self._seqs = step.row_seq[rows].long()[:, None]
        self._within = torch.arange(config.block, device=device)
        self._heads = torch.arange(step.kv_heads, device=device)[:, None]
        token = self.low + torch.arange(config.local, device=device)
        used = token <= self.position
        self._window = self._places(torch.where(used, token, self.position))
        none = torch.zeros(used.shape, dtype=torch.float32, device=device)
        self._window_mask = none.masked_fill_(~used, -torch.inf)

    def _places(self, token: Tensor) -> tuple[Tensor, Tensor]:
        return places(self.step.block_table, self._seqs, token, self.step.block_size)

    def gather(self, cache: Tensor, ids: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values float32 `[n, H, W, D]`, and what is added to their logits `[n, W]`.

        ids, bias [n, S] of these rows
        """
        step, size = self.step, self.step.config.block
        token = (ids.long() * size)[..., None] + self._within  # [n, S, block]
        # A block of -1, which is none, has tokens below 0.
        used = (token < self.low[..., None]) & (token >= 0)
        mask = torch.where(used, bias.float()[..., None], -torch.inf).flatten(1)
        remote = self._places(torch.where(used, token, self.position[..., None]).flatten(1))
        block, place = (
            torch.cat(both, 1)[:, None] for both in zip(remote, self._window, strict=True)
        )
        both = read_lines(cache, block, self._heads, place).float()
        mask = torch.cat([mask, self._window_mask], 1)
        return both[..., : step.head_dim], both[..., step.head_dim :], mask


def gather_rows(
    step: Step, cache: Tensor, ids: Tensor, bias: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values float32 `[n, H, W, D]` of live rows `[n]`, and what is added to their
    logits `[n, W]`; ids and bias `[n, S]`.
    """
    return GatheredRows(step, rows).gather(cache, ids, bias)
