"""Documents in a paged cache, driven through the package's public calls.

Cache blocks lie in random order, everything unused is NaN, and table entries behind a sequence's
last block point far outside the cache, so that reading what must not be read shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import dash_portable
from tests import brute
from tests.brute import Document, Rule
from tests.device import BACKENDS

OUTSIDE = 2**30
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def model_config(rule: Rule) -> dict[str, Any]:
    """The rule as a model's `sparse_attention_config`, of one layer."""
    return {
        "sparse_block_size": rule.block,
        "sparse_local_block": rule.local_blocks,
        "sparse_index_dim": rule.dim,
        "dash_topk_blocks": rule.topk,
        "dash_scale_per_layer": [rule.scale],
        "dash_floor_per_layer": [rule.floor],
        "dash_sigma": rule.sigma,
        "sparse_main_rope_mode": "page2d",
        "sparse_rope_page_pairs": 1,
        "sparse_rope_page_mod": rule.page_mod,
        "sparse_rope_tok_theta": rule.theta,
        "training_stage": "dash",
        "dash_stage0": "head_cls",
        "window": rule.window,
        "image_token_id": 1,
        "page_token_id": 2,
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """What the cache holds of one sequence of T tokens, as float64."""

    keys: brute.Floats  # [T, H, D]
    values: brute.Floats  # [T, H, D]
    index_keys: brute.Floats  # [T, D]
    summaries: brute.Floats  # [B, D]
    auxiliary: brute.Floats  # [T, 2 D]


class Paged:
    """Documents of one rule and one number of heads in a cache, sequence r being `documents[r]`."""

    def __init__(
        self, documents: Sequence[Document], block_size: int, dtype: str = "float32", seed: int = 0
    ) -> None:
        self.documents = documents
        self.rule = documents[0].rule
        self.config = model_config(self.rule)
        self.block_size = block_size
        self.dtype = DTYPES[dtype]
        self.where = [brute.coordinates(of.prompt, of.decoded) for of in documents]
        self.head_cls = [self._tensor(of.head_cls) for of in documents]
        need = [-(-len(of.roles) // block_size) for of in documents]
        order = np.random.default_rng(seed).permutation(sum(need) + 2)
        self.blocks = np.split(order, np.cumsum(need))[:-1]
        kv_heads = documents[0].k.shape[1]
        shape = (len(order), kv_heads + 1, block_size, 2 * self.rule.dim)
        self.cache = torch.full(shape, torch.nan, dtype=self.dtype)

    def _tensor(self, x: brute.Floats) -> Tensor:
        return torch.tensor(np.asarray(x)).to(self.dtype)

    def table(self, seqs: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Block table int32 `[len(seqs), max]`; only the blocks of `lengths` tokens are real."""
        widest = max(len(self.blocks[seq]) for seq in seqs) + 1
        table = torch.full((len(seqs), widest), OUTSIDE, dtype=torch.int32)
        for row, (seq, length) in enumerate(zip(seqs, lengths, strict=True)):
            live = -(-length // self.block_size)
            table[row, :live] = torch.tensor(self.blocks[seq][:live].astype(np.int32))
        return table

    def slots(self, seq: int, first: int, end: int) -> Tensor:
        """Cache places int64 of tokens `first .. end`."""
        token = np.arange(first, end)
        block = self.blocks[seq][token // self.block_size]
        return torch.tensor(block * self.block_size + token % self.block_size)

    def positions(self, seq: int, first: int, end: int) -> Tensor:
        """Their columns of `positions`."""
        return torch.tensor(brute.positions(self.where[seq])[:, first:end]).int()

    def roles(self, seq: int, first: int, end: int) -> Tensor:
        return torch.tensor(self.documents[seq].roles[first:end], dtype=torch.int32)

    def inputs(self, seq: int, first: int, end: int) -> tuple[Tensor, ...]:
        """q, k, v, iq, ik of tokens `first .. end`."""
        of = self.documents[seq]
        return tuple(self._tensor(x[first:end]) for x in (of.q, of.k, of.v, of.iq, of.ik))

    def prefill(
        self, cuts: Sequence[int], backend: str = BACKENDS[0], seq: int = 0, prefix: bool = False
    ) -> Tensor:
        """Feed a sequence's first tokens in chunks of lengths `cuts`; their outputs.

        Decoded tokens among them are recomputed. prefix: trust what earlier chunks summarised.
        """
        outputs, first = [], 0
        for count in cuts:
            end = first + count
            outputs.append(
                dash_portable.paged_dash_prefill(
                    *self.inputs(seq, first, end),
                    self.roles(seq, first, end),
                    self.positions(seq, first, end),
                    self.cache,
                    self.table([seq], [end]),
                    end,
                    self.slots(seq, first, end),
                    self.head_cls[seq],
                    self.config,
                    0,
                    backend,
                    prefix_lens=torch.tensor([first], dtype=torch.int32) if prefix else None,
                )
            )
            first = end
        return torch.cat(outputs)

    def decode(
        self,
        rows: Sequence[tuple[int, int] | None],
        backend: str = BACKENDS[0],
        cached: bool = True,
        prefix_lens: Sequence[int] | None = None,
    ) -> Tensor:
        """One decode call for `(sequence, token index)` rows, None being padding; `[N, Hq, D]`.

        All sequences share the head_cls of the first.
        """
        n = len(rows)
        shapes = [x.shape[1:] for x in self.inputs(0, 0, 1)]
        given = [torch.full((n, *shape), torch.nan, dtype=self.dtype) for shape in shapes]
        roles = torch.full((n,), 77, dtype=torch.int32)
        slots = torch.full((n,), -1, dtype=torch.int64)
        lengths = torch.full((n,), -12345, dtype=torch.int32)
        table = torch.full((n, max(map(len, self.blocks)) + 1), OUTSIDE, dtype=torch.int32)
        for i, row in enumerate(rows):
            if row is None:
                continue
            seq, at = row
            for whole, one in zip(given, self.inputs(seq, at, at + 1), strict=True):
                whole[i] = one[0]
            roles[i] = self.documents[seq].roles[at]
            slots[i], lengths[i] = self.slots(seq, at, at + 1)[0], at + 1
            own = self.table([seq], [at + 1])[0]
            table[i, : len(own)] = own
        prefix = None if prefix_lens is None else torch.tensor(prefix_lens, dtype=torch.int32)
        return dash_portable.paged_dash_decode(
            *given,
            roles,
            self.cache,
            table,
            lengths,
            slots,
            self.head_cls[0],
            self.config,
            0,
            1 << 14,
            prefix_lens=prefix,
            backend=backend,
            cached_summaries=cached,
        )

    def page_table(self, seqs: Sequence[int]) -> Tensor:
        """Start and count of every page, int32 `[len(seqs), max, 2]`, nonsense behind the last."""
        widest = max(self.where[seq].num_pages for seq in seqs) + 2
        table = torch.full((len(seqs), widest, 2), -OUTSIDE, dtype=torch.int32)
        for row, seq in enumerate(seqs):
            pages = self.where[seq].num_pages + 1
            table[row, :pages, 0] = torch.tensor(self.where[seq].starts)
            table[row, :pages, 1] = torch.tensor(self.where[seq].counts)
        return table

    def step(
        self,
        parts: Sequence[tuple[int, int, int]],
        backend: str = BACKENDS[0],
        padding: Sequence[int] = (),
        page_table: bool = False,
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """One `DashStep` over parts `(sequence, first, end)`, each followed by `padding[i]` rows.

        Gives the outputs of each part and what its rows selected (ids and biases). All sequences
        share the head_cls of the first.
        """
        padding = [*padding, *[0] * (len(parts) - len(padding))]
        rows: list[Tensor] = []
        given: list[list[Tensor]] = [[] for _ in range(5)]
        for (seq, first, end), extra in zip(parts, padding, strict=True):
            roles, slots = self.roles(seq, first, end), self.slots(seq, first, end)
            place = self.positions(seq, first, end)
            place[:3, place[3] >= 0] = 4321  # a decoded token's coordinates come from the cache
            live = torch.cat([slots[None], roles[None], place])
            rows.append(torch.nn.functional.pad(live, (0, extra), value=-7))
            for whole, own in zip(given, self.inputs(seq, first, end), strict=True):
                whole += [own, own.new_full((extra, *own.shape[1:]), torch.nan)]
        numbers = torch.cat(rows, 1)
        seqs, ends = [part[0] for part in parts], [part[2] for part in parts]
        lengths = [
            end - first + extra for (_, first, end), extra in zip(parts, padding, strict=True)
        ]
        planned = dash_portable.DashStep.plan(
            lengths,
            ends,
            self.table(seqs, ends),
            numbers[0],
            numbers[1],
            numbers[2:],
            config=dash_portable.DashConfig.from_model(self.config),
            cache=self.cache,
            backend=backend,
            num_heads=self.documents[0].q.shape[1],
            page_table=self.page_table(seqs) if page_table else None,
        )
        out = planned.run(*map(torch.cat, given), self.cache, self.head_cls[0], 0)
        assert planned.selection is not None
        assert (out[numbers[0] < 0] == 0).all()
        ids, bias = planned.selection

        def live_rows(x: Tensor) -> list[Tensor]:
            parted = zip(x.split(lengths), padding, strict=True)
            return [own[: len(own) - extra] for own, extra in parted]

        return live_rows(out), list(zip(live_rows(ids), live_rows(bias), strict=True))

    def decode_from(self, first: int, backend: str = BACKENDS[0], **options: Any) -> Tensor:
        """Decode the tokens of sequence 0 from index `first` on, one after another."""
        total = len(self.documents[0].roles)
        outputs = [self.decode([(0, at)], backend, **options) for at in range(first, total)]
        return torch.cat(outputs) if outputs else self.inputs(0, 0, 0)[0]

    def run(self, cuts: Sequence[int], backend: str = BACKENDS[0], **options: Any) -> Tensor:
        """Prefill sequence 0 in chunks `cuts`, decode the rest; outputs of all its tokens."""
        return torch.cat(
            [self.prefill(cuts, backend), self.decode_from(sum(cuts), backend, **options)]
        )

    def rows_of(self, seq: int = 0) -> tuple[Tensor, Tensor]:
        """Cache blocks and offsets of all tokens of a sequence."""
        slots = self.slots(seq, 0, len(self.documents[seq].roles))
        return slots // self.block_size, slots % self.block_size

    def stored(self, seq: int = 0) -> Stored:
        """What lies in the cache."""
        block, offset = self.rows_of(seq)
        dim, size = self.rule.dim, self.rule.block
        rows = self.cache[block, :, offset].double().cpu().numpy()
        auxiliary = rows[:, -1]
        complete = len(rows) // size * size
        first, second = auxiliary[0:complete:size], auxiliary[1:complete:size]
        half = dim + dim // 2
        return Stored(
            keys=rows[:, :-1, :dim],
            values=rows[:, :-1, dim:],
            index_keys=auxiliary[:, :dim],
            summaries=np.concatenate([first[:, half:], second[:, half:]], 1),
            auxiliary=auxiliary,
        )

    def spoil(self, what: float, seq: int = 0) -> None:
        """Fill the free place of a sequence's rows, which another owner's cache does not know."""
        block, offset = self.rows_of(seq)
        dim = self.rule.dim
        self.cache[block, -1, offset, dim + 22 :] = what


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """What the rows of a sequence should be, computed from its stored cache."""

    out: brute.Floats  # [T, Hq, D]
    safe: npt.NDArray[
        np.bool_
    ]  # [T] no left-out block is within the arithmetic's error of a kept one
    bound: brute.Floats  # [T] how far an output may be off
    bias_error: brute.Floats  # [T] how far a bias may be
    selections: list[brute.Selection]


def expected(paged: Paged, seq: int = 0) -> Expected:
    """The brute force fed with what a sequence has in the cache."""
    of, rule, held = paged.documents[seq], paged.rule, paged.stored(seq)
    where, total = paged.where[seq], len(paged.documents[seq].roles)
    dtype = str(paged.dtype).removeprefix("torch.")
    eps = torch.finfo(paged.dtype).eps

    def rotated(x: brute.Floats) -> brute.Floats:
        rows = [
            brute.rotate(x[i], int(where.tok[i]), int(where.page[i]), rule) for i in range(total)
        ]
        return brute.rounded(np.stack(rows), dtype)

    query, index_query = rotated(brute.rounded(of.q, dtype)), rotated(brute.rounded(of.iq, dtype))
    selections = brute.select_rows(where, index_query, held.summaries, rule)
    out = np.stack(
        [
            brute.attend(i, query[i], held.keys, held.values, chosen.blocks, chosen.bias, rule)
            for i, chosen in enumerate(selections)
        ]
    )
    # Scores are float32 sums of D products. One element of the rotated index query may also be
    # rounded the other way, where the angles of float32 and float64 fall on two sides of a tie.
    kbar = float(np.abs(held.summaries).max(initial=0.0))
    flip = eps * float(np.abs(index_query).max()) * kbar * rule.scale / rule.dim
    # A logit is such a sum of products too, of the size of its two vectors.
    longest = [float(np.linalg.norm(x, axis=-1).max()) for x in (query, held.keys)]
    logit_error = 2.0**-23 * longest[0] * longest[1]
    worst = np.array([max(map(abs, s.scores.values()), default=0.0) for s in selections])
    score_error = flip * (worst > 0) + rule.dim * 2.0**-23 * worst
    # A prior is (x - tau) ** 2, x half a score: its logarithm moves by at most twice the score's
    # error over its root, which is no less than the floor's; and so may the mean over the kept.
    moved = 4 * score_error / math.sqrt(rule.floor) + 4 * 2.0**-23 * abs(math.log(rule.floor))
    return Expected(
        out=out,
        safe=np.array([s.margin for s in selections]) > 2 * score_error,
        bound=2 * eps * float(np.abs(out).max())
        + (4 * score_error + 2 * logit_error) * float(np.abs(of.v).max()),
        bias_error=moved / rule.sigma,
        selections=selections,
    )
