"""Sequences in a paged cache as NumPy arrays, and what the brute force says of their last rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests import brute
from tests.brute import Rule
from tests.intel.opencl import narrow
from tests.prompts import IMAGE, MARKER, TEXT, document, runs

OUTSIDE = 2**30  # behind a sequence's last block: what must not be read
PAGES = runs((TEXT, 3), (MARKER, 1), (IMAGE, 273), (MARKER, 1), (IMAGE, 190), (TEXT, 150))
SEQUENCES: tuple[tuple[list[int], list[int]], ...] = (
    (PAGES, [TEXT, MARKER, *[TEXT] * 84]),  # 704 tokens: the last one closes a block
    ([TEXT] * 2600, [MARKER, TEXT, TEXT]),  # no page: a marker is text, every remote block counts
    ([TEXT] * 20, [TEXT]),  # nothing but the local window
    (PAGES, [MARKER]),  # opens the first page: its blocks are the candidates
)
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
EPS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}


class Scene:
    """The last token of each of SEQUENCES, and one row of padding between them."""

    def __init__(self, dtype: str, kv_heads: int, group: int, dim: int, block_size: int) -> None:
        self.dtype, self.rule = dtype, Rule(dim=dim, sigma=2.0)
        self.kv_heads, self.group, self.block_size = kv_heads, group, block_size
        self.documents = [
            document(prompt, decoded, self.rule, heads=kv_heads * group, kv_heads=kv_heads, seed=i)
            for i, (prompt, decoded) in enumerate(SEQUENCES)
        ]
        self.head_cls = self.rounded(self.documents[0].head_cls)
        self.lengths = [len(of.roles) for of in self.documents]
        self.rows: list[int | None] = [0, None, 1, 2, 3]  # sequence of each row; None is padding
        blocks = [-(-length // block_size) for length in self.lengths]
        order = np.random.default_rng(0).permutation(sum(blocks) + 2)
        self.blocks = np.split(order, np.cumsum(blocks))[:-1]
        self.num_blocks = len(order)
        self.facts = [self._facts(seq) for seq in range(len(self.documents))]

    def rounded(self, x: Any) -> Any:
        return brute.rounded(x, NAMES[self.dtype])

    def _facts(self, seq: int) -> dict[str, Any]:
        of = self.documents[seq]
        where = brute.coordinates(of.prompt, of.decoded)
        places = list(zip(where.tok.tolist(), where.page.tolist(), strict=True))

        def rotated(x: Any) -> Any:
            x = self.rounded(x)
            return self.rounded([brute.rotate(x[i], *places[i], self.rule) for i in range(len(x))])

        index_keys = rotated(of.ik)
        return {
            "where": where,
            "keys": rotated(of.k),
            "values": self.rounded(of.v),
            "index_keys": index_keys,
            "query": self.rounded(brute.rotate(self.rounded(of.q[-1]), *places[-1], self.rule)),
            "index_query": self.rounded(
                brute.rotate(self.rounded(of.iq[-1]), *places[-1], self.rule)
            ),
            "summaries": brute.block_summaries(
                index_keys, self.head_cls, self.rule, NAMES[self.dtype]
            ),
            "bytes": brute.auxiliary_bytes(of.roles, where, self.rule),
        }

    def cache(self, without_last: bool = False, into: np.ndarray | None = None) -> np.ndarray:
        """[NB, H + 1, P, 2 D] with everything stored, or all but each sequence's last token and
        what that token completes; NaN in every blank.
        """
        dim, heads = self.rule.dim, self.kv_heads
        full = np.full((self.num_blocks, heads + 1, self.block_size, 2 * dim), np.nan)
        for seq, facts in enumerate(self.facts):
            token = np.arange(self.lengths[seq] - without_last)
            block = self.blocks[seq][token // self.block_size]
            at = token % self.block_size
            full[block, :heads, at, :dim] = facts["keys"][token]
            full[block, :heads, at, dim:] = facts["values"][token]
            complete = len(token) // self.rule.block
            auxiliary = brute.auxiliary_numbers(
                facts["index_keys"][token], facts["summaries"][:complete], self.rule
            )
            octets = facts["bytes"][token].copy()
            octets[complete * self.rule.block :, dim + 26 : dim + 30] = brute.UNDEFINED
            auxiliary = np.where(octets != brute.UNDEFINED, octets, auxiliary)
            full[block, heads, at] = auxiliary
        stored = narrow(full, self.dtype)
        if into is None:
            return stored
        into[...] = stored
        return into

    def table(self) -> np.ndarray:
        """int32 [N, width]."""
        width = max(map(len, self.blocks)) + 1
        found = np.full((len(self.rows), width), OUTSIDE, np.int32)
        for row, seq in enumerate(self.rows):
            if seq is not None:
                found[row, : len(self.blocks[seq])] = self.blocks[seq]
        return found

    def row_pos(self) -> np.ndarray:
        return np.array([-1 if s is None else self.lengths[s] - 1 for s in self.rows], np.int32)

    def slots(self) -> np.ndarray:
        found = np.full(len(self.rows), -1, np.int64)
        for row, seq in enumerate(self.rows):
            if seq is not None:
                token = self.lengths[seq] - 1
                block = self.blocks[seq][token // self.block_size]
                found[row] = block * self.block_size + token % self.block_size
        return found

    def roles(self) -> np.ndarray:
        last = [77 if s is None else self.documents[s].roles[-1] for s in self.rows]
        return np.array(last, np.int32)

    def inputs(self, name: str) -> np.ndarray:
        """Unrotated `q`, `k`, `v`, `iq` or `ik` of the rows; NaN for padding."""
        like = getattr(self.documents[0], name)[-1]
        found = np.full((len(self.rows), *like.shape), np.nan)
        for row, seq in enumerate(self.rows):
            if seq is not None:
                found[row] = self.rounded(getattr(self.documents[seq], name)[-1])
        return narrow(found, self.dtype)

    def of_rows(self, name: str) -> np.ndarray:
        """A fact of each row's last token, as numbers; NaN for padding."""
        found = np.full((len(self.rows), *self.facts[0][name].shape), np.nan)
        for row, seq in enumerate(self.rows):
            if seq is not None:
                found[row] = self.facts[seq][name]
        return found

    def selection(
        self, seq: int, query: np.ndarray | None = None, stretch: float = 1.0
    ) -> brute.Selection:
        """What the last row of a sequence reads, by this rotated index query [D] where one is
        given; `stretch` multiplies its scores.
        """
        facts, position = self.facts[seq], self.lengths[seq] - 1
        where = facts["where"]
        page = int(where.query_page[position])
        blocks = brute.candidate_blocks(position, page, where.image_page, self.rule)
        query = (facts["index_query"] if query is None else query) * stretch
        return brute.select(position, query, facts["summaries"], blocks, self.rule)

    def selections(self) -> tuple[np.ndarray, np.ndarray]:
        """ids int32 [N, S] and bias float32 [N, S] as the kernels pass them."""
        ids = np.full((len(self.rows), self.rule.topk), -1, np.int32)
        bias = np.zeros(ids.shape, np.float32)
        for row, seq in enumerate(self.rows):
            if seq is not None:
                chosen = self.selection(seq)
                ids[row, : len(chosen.blocks)] = chosen.blocks
                bias[row, : len(chosen.bias)] = chosen.bias
        return ids, bias

    def attended(self, query: np.ndarray, ids: np.ndarray, bias: np.ndarray) -> np.ndarray:
        """Exact outputs [N, Hq, D]; zeros for padding."""
        out = np.zeros(query.shape)
        for row, seq in enumerate(self.rows):
            if seq is not None:
                used = ids[row] >= 0
                facts, position = self.facts[seq], self.lengths[seq] - 1
                out[row] = brute.attend(
                    position,
                    query[row],
                    facts["keys"],
                    facts["values"],
                    ids[row][used].tolist(),
                    bias[row][used].tolist(),
                    self.rule,
                )
        return out

    def allowed(self, exact: np.ndarray, keys: int) -> float:
        """The bar of a sum over so many keys in float32 with a result in the cache's dtype."""
        largest = float(np.abs(exact).max())
        return 2 * largest * (EPS[self.dtype] + EPS["fp32"] * float(np.sqrt(keys)))

    def tokens(self, seq: int, ids: Sequence[int]) -> list[list[int]]:
        """Tokens of each of a row's segments: the kept blocks, then the local window."""
        position = self.lengths[seq] - 1
        low = max(position + 1 - self.rule.local, 0)
        size = self.rule.block
        kept = [list(range(b * size, min((b + 1) * size, low))) if b >= 0 else [] for b in ids]
        return [*kept, list(range(low, position + 1))]
