"""Attention by torch alone, fast enough for a CPU.

A sequence with few new rows gathers each row's keys and calls `scaled_dot_product_attention` with
the
bias as an additive mask. A sequence with many is worked block-major: the rows that chose a block
meet its
keys in one matrix product, so that nothing is gathered 512 times over. Memory is bounded by chunks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dash_portable.backends.eager import GatheredRows
from dash_portable.cache import read_lines
from dash_portable.plainly import plainly
from dash_portable.segments.given import given_slots
from dash_portable.segments.rows import slot_count
from dash_portable.step import Step

_FEW = 32  # below this many new rows of a sequence a matrix product per block does not pay
_GATHERED = 1 << 25  # numbers of one gathered chunk
_ROWS = 16384  # rows of one block-major chunk
_TILE = 64  # rows that share one stretch of keys in the local window


class Runner:
    """Chooses per sequence between gathered rows and blocks."""

    def __init__(self, step: Step) -> None:
        self.step = step
        config = step.config
        slots = slot_count(config.topk, block=config.block, local=config.local)
        self._gathered = max(1, _GATHERED // (slots * 2 * step.head_dim * step.kv_heads))
        self.refresh()

    def refresh(self) -> None:
        """Which rows are live, and which sequences have many: read again after an update."""
        step = self.step
        few = step.row_pos >= 0
        self._many: list[tuple[int, Tensor]] = []
        if step.max_query_len >= _FEW:
            lengths = torch.bincount(step.row_seq[few].long(), minlength=step.num_seqs)
            for seq in (lengths >= _FEW).nonzero().flatten().tolist():
                mine = few & (step.row_seq == seq)
                few = few & ~mine
                self._many.append((seq, mine.nonzero().flatten()))
        rows = few.nonzero().flatten()
        parts = rows.split(self._gathered) if len(rows) else ()
        self._few = [GatheredRows(step, part) for part in parts]

    @plainly
    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        if len(self._few) == 1 and len(self._few[0].rows) == len(out):
            out.copy_(self._gather(query, cache, ids, bias, self._few[0]))
            return
        out.zero_()
        for part in self._few:
            rows = part.rows
            out[rows] = self._gather(query[rows], cache, ids[rows], bias[rows], part).to(out.dtype)
        for seq, rows in self._many:
            for part in rows.split(_ROWS):
                self._attend_blocks(seq, part, query, cache, ids, bias, out)

    def _attend_blocks(
        self,
        seq: int,
        rows: Tensor,
        query: Tensor,
        cache: Tensor,
        ids: Tensor,
        bias: Tensor,
        out: Tensor,
    ) -> None:
        position = self.step.row_pos[rows].long()
        blocks = SequenceBlocks(self.step, cache, seq)
        made = blocks.attend(query[rows], ids[rows], bias[rows], position)
        out[rows] = made.to(out.dtype)
        # In a shared product, NaN and infinity reach rows that do not read them.
        again = rows[~made.flatten(1).sum(1).isfinite()]
        for some in again.split(self._gathered) if len(again) else ():
            part = GatheredRows(self.step, some)
            out[some] = self._gather(query[some], cache, ids[some], bias[some], part).to(out.dtype)

    def _gather(
        self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, part: GatheredRows
    ) -> Tensor:
        step = self.step
        keys, values, mask = part.gather(cache, ids, bias)
        # [n, H, G, D]: the query heads of a kv head stand where the query tokens would.
        grouped = query.float().unflatten(1, (step.kv_heads, step.group))
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None])
        return out.flatten(1, 2)


@plainly
def attend_given(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    used: Tensor,
    bias: Tensor,
    *,
    block: int,
    local: int,
) -> Tensor:
    """Attention over segments that lie side by side, see `flash_dash_attention`."""
    rows, heads, width = query.shape
    kept, kv_heads = bias.shape[1], key.shape[1]
    live = given_slots(used, kept, block=block, local=local)
    both = [
        x.float()
        .view(rows, kept * block + local, kv_heads, width)
        .masked_fill(~live[..., None, None], 0.0)
        for x in (key, value)
    ]
    prior = bias.repeat_interleave(block, 1)
    prior = torch.cat([prior, prior.new_zeros(rows, local)], 1)
    mask = prior.masked_fill(~live, -torch.inf)[:, None, None]
    # A row without any key would divide by nothing: it may look at its first slot, a zero.
    mask = mask.masked_fill(~live.any(1)[:, None, None, None], 0.0)
    grouped = query.float().unflatten(1, (kv_heads, heads // kv_heads))
    keys, values = (x.transpose(1, 2) for x in both)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.flatten(1, 2).to(query.dtype)


class SequenceBlocks:
    """One sequence's keys, met block by block by the rows that chose them.

    Rows are kept as [H, n G, D]; every row carries a running maximum, its mass and a weighted sum,
    begun by the local window, which no row is without.
    """

    def __init__(self, step: Step, cache: Tensor, seq: int) -> None:
        self.step = step
        self.config = step.config
        self.cache = cache
        self.table = step.block_table[seq].long()
        self.scale = 1 / math.sqrt(step.head_dim)

    def attend(self, query: Tensor, ids: Tensor, bias: Tensor, position: Tensor) -> Tensor:
        """`[n, Hq, D]` for consecutive tokens at `position [n]`, float32."""
        step = self.step
        grouped = query.float().unflatten(1, (step.kv_heads, step.group))
        wide = grouped.transpose(0, 1).contiguous() * self.scale  # [H, n, G, D]
        top, mass, total = self._local(wide, position)
        lo = (position - self.config.local + 1).clamp_min(0)
        row, slot = (ids >= 0).nonzero(as_tuple=True)
        block = ids[row, slot].long()
        order = torch.argsort(block, stable=True)
        row, prior = row[order], bias[row, slot][order].float()
        chosen, counts = torch.unique_consecutive(block[order], return_counts=True)
        parts = zip(
            chosen.tolist(), row.split(counts.tolist()), prior.split(counts.tolist()), strict=True
        )
        for at, rows, added in parts:
            self._meet(at, rows, added, lo[rows], wide, top, mass, total)
        return (total / mass[..., None]).transpose(0, 1).flatten(1, 2)

    def _read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, count, D]` of tokens first.. of the sequence, float32."""
        token = torch.arange(first, first + count, device=self.table.device)
        size = self.step.block_size
        heads = torch.arange(self.step.kv_heads, device=token.device)[:, None]
        both = read_lines(self.cache, self.table[token // size], heads, token % size).float()
        return both[..., : self.step.head_dim], both[..., self.step.head_dim :]

    def _meet(
        self,
        block: int,
        rows: Tensor,
        bias: Tensor,
        lo: Tensor,
        query: Tensor,
        top: Tensor,
        mass: Tensor,
        total: Tensor,
    ) -> None:
        """Add one block to the rows that chose it; its tokens from `lo` on belong to the local
        window.
        """
        size = self.config.block
        keys, values = self._read(block * size, size)
        mine = query.index_select(1, rows)  # [H, n, G, D]
        logit = torch.matmul(mine.flatten(1, 2), keys.transpose(1, 2)).unflatten(1, mine.shape[1:3])
        logit += bias[:, None, None]
        token = torch.arange(block * size, (block + 1) * size, device=lo.device)
        if int(lo.min()) <= block * size + size - 1:
            logit.masked_fill_((token >= lo[:, None])[:, None], -torch.inf)
        old = top.index_select(1, rows)
        new = torch.maximum(old, logit.amax(-1))
        weight = logit.sub_(new[..., None]).exp_()
        fade = (old - new).exp_()
        top[:, rows] = new
        mass[:, rows] = mass.index_select(1, rows).mul_(fade).add_(weight.sum(-1))
        seen = torch.matmul(weight.flatten(1, 2), values).view_as(mine)
        total[:, rows] = total.index_select(1, rows).mul_(fade[..., None]).add_(seen)

    def _local(self, query: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maximum, mass and weighted sum `[H, n, G(, D)]` of every row's local window."""
        heads, rows, group, width = query.shape
        begin, span = int(position[0]), self.config.local - 1
        before = min(begin, span)
        keys, values = self._read(begin - before, before + rows)
        tiles = -(-rows // _TILE)
        # Every tile sees the tokens from `span` before its first row to its last row.
        pad = (0, 0, span - before, tiles * _TILE - rows)
        stretch = span + _TILE
        windows = [
            torch.nn.functional.pad(x, pad).unfold(1, stretch, _TILE) for x in (keys, values)
        ]  # [H, tiles, D, stretch]
        tiled = torch.nn.functional.pad(query, (0, 0, 0, 0, 0, tiles * _TILE - rows))
        tiled = tiled.view(heads, tiles, _TILE * group, width)
        logit = torch.matmul(tiled, windows[0]).view(heads, tiles, _TILE, group, stretch)
        at = torch.arange(_TILE, device=query.device)[:, None]
        key = torch.arange(stretch, device=query.device)
        seen = (key >= at) & (key <= at + span)  # key j of tile i is token 64 i - span + j
        real = key + torch.arange(tiles, device=query.device)[:, None] * _TILE >= span - before
        visible = (seen[None] & real[:, None])[:, :, None]  # [tiles, TILE, 1, stretch]
        logit.masked_fill_(~visible, -torch.inf)
        top = logit.amax(-1)
        # Rows beyond the last see only padding, whose zero keys are real numbers: they are cut off
        # below.
        weight = logit.sub_(top[..., None]).exp_()
        mass = weight.sum(-1)
        total = torch.matmul(weight.flatten(2, 3), windows[1].transpose(-1, -2)).view(
            heads, tiles * _TILE, group, width
        )[:, :rows]
        shape = (heads, tiles * _TILE, group)
        return (
            top.reshape(shape)[:, :rows].contiguous(),
            mass.reshape(shape)[:, :rows].contiguous(),
            total.contiguous(),
        )
