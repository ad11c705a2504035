"""The whole DASH rule once more, plain and slow, in NumPy float64: what every path is held to.

It shares nothing with the package, not even constants. One function per sentence of the rule, in
the rule's order: coordinates, rotation, summaries, candidates, selection, attention, cache bytes.
Nothing here is clever; where a loop is clearer than an array, it is a loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TEXT, IMAGE, MARKER = 0, 1, 2
LIMIT = 1e4  # where logits and scores are clamped, and what an unusable score becomes
UNDEFINED = -1  # an element of the auxiliary head of which the layout says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The numbers of one layer. `dim` is the width of heads and of the index alike."""

    dim: int
    block: int = 32
    local_blocks: int = 4
    topk: int = 12
    window: int = 16
    scale: float = 60.0
    floor: float = 1e-4
    sigma: float = 1.0
    theta: float = 10000.0
    page_mod: int = 2

    @property
    def local(self) -> int:
        """Tokens of the local window."""
        return self.local_blocks * self.block


def rounded(x: npt.ArrayLike, dtype: str) -> Floats:
    """`x` rounded once to nearest even in `dtype` (a torch type's name), as float64 again."""
    exact: Floats = np.array(x, np.float64)
    if dtype == "float64":
        return exact
    if dtype in ("float32", "float16"):
        with np.errstate(over="ignore"):
            narrow: Floats = exact.astype(dtype).astype(np.float64)
        return narrow
    if dtype != "bfloat16":
        raise ValueError(f"dtype: found {dtype}, needed float64, float32, float16 or bfloat16")
    exponent = np.frexp(exact)[1]
    # 8 bits of significand; below 2**-126 the spacing no longer shrinks.
    spacing = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    nearest: Floats = np.asarray(np.rint(exact / spacing) * spacing)
    nearest[np.abs(nearest) >= 2.0**128] *= np.inf
    return nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where every token of a sequence stands: arrays `[T]` over prompt and decoded tokens.

    counts, starts  [num_pages + 1]   tokens of each page up to the last image, its first token
    """

    tok: Ints
    page: Ints
    query_page: Ints
    image_page: Ints  # -1: no image of a page
    num_pages: int
    counts: Ints
    starts: Ints
    prompt_len: int


def coordinates(prompt: Sequence[int], decoded: Sequence[int] = ()) -> Coordinates:
    """Coordinates of a prompt's roles and of the tokens decoded after it, one by one."""
    roles = list(prompt)
    if not roles:
        raise ValueError("prompt: found no token, needed at least one")
    images = [i for i, role in enumerate(roles) if role == IMAGE]
    markers_until = list(accumulate(int(role == MARKER) for role in roles))

    if images:
        last = images[-1]
        before = markers_until[last]
        raw = [m if i <= last else m - before for i, m in enumerate(markers_until)]
        page = [max(r, 0) for r in raw]
        query_page = [max(r - 1, -1) for r in raw]
    else:  # plain text: no pages, whatever the roles say
        last = -1
        page = [0] * len(roles)
        query_page = [-1] * len(roles)

    num_pages = max(page)
    if num_pages > 65_535:
        raise ValueError(f"prompt: found {num_pages} pages, needed at most 65535")

    tok = [page[:i].count(page[i]) for i in range(len(roles))]
    counts = [page[: last + 1].count(p) for p in range(num_pages + 1)]
    starts = [sum(counts[:p]) for p in range(num_pages + 1)]
    image_page = [
        m - 1 if role == IMAGE else -1 for role, m in zip(roles, markers_until, strict=True)
    ]

    for role in decoded:
        if role == MARKER and images:
            page.append(min(page[-1] + 1, num_pages))
            tok.append(counts[page[-1]])
            query_page.append(query_page[-1] + 1)  # not clamped
        else:
            page.append(page[-1])
            tok.append(tok[-1] + 1)
            query_page.append(query_page[-1])
        image_page.append(-1)

    return Coordinates(
        tok=np.array(tok, np.int64),
        page=np.array(page, np.int64),
        query_page=np.array(query_page, np.int64),
        image_page=np.array(image_page, np.int64),
        num_pages=num_pages,
        counts=np.array(counts, np.int64),
        starts=np.array(starts, np.int64),
        prompt_len=len(roles),
    )


def positions(where: Coordinates) -> Ints:
    """The `[4, T]` tensor of a server. Decoded tokens, there to be recomputed, have 0 in row 3."""
    table = np.zeros((4, len(where.tok)), np.int64)
    table[0] = where.tok
    table[1] = where.query_page + 1  # the page that is not clamped to num_pages
    table[2] = where.num_pages
    for i in range(where.prompt_len):
        table[3, i] = -1 - where.counts[i] if i <= where.num_pages else -1
    return table


def rotate(x: npt.ArrayLike, tok: int, page: int, rule: Rule) -> Floats:
    """`x [..., D]` of one token, rotated by its coordinates ("page2d")."""
    x = np.asarray(x, np.float64)
    half = rule.dim // 2
    angle = np.array(
        [tok * rule.theta ** (-j / (half - 1)) for j in range(half - 1)] + [page % rule.page_mod]
    )
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def summarise(keys: npt.ArrayLike, head_cls: npt.ArrayLike) -> Floats:
    """`kbar [D]` of a complete block's rotated index keys `[bs, D]`."""
    keys = np.asarray(keys, np.float64)
    logit = np.clip(keys @ np.asarray(head_cls, np.float64) / math.sqrt(keys.shape[1]), -1e4, 1e4)
    weight = np.exp(logit - logit.max())
    return np.asarray(weight / max(weight.sum(), 1e-6) @ keys, np.float64)


def remote_blocks(position: int, rule: Rule) -> list[int]:
    """Blocks far enough behind the row at `position` to be selectable."""
    return list(range(max(position // rule.block - rule.local_blocks + 1, 0)))


def candidate_blocks(
    position: int, query_page: int, image_page: npt.ArrayLike, rule: Rule
) -> list[int]:
    """Remote blocks holding an image of the row's page; all of them where there is none.

    image_page  [>= position]   of the sequence's tokens
    """
    remote = remote_blocks(position, rule)
    if query_page < 0:
        return remote
    pages = np.asarray(image_page)
    own = [b for b in remote if query_page in pages[b * rule.block : (b + 1) * rule.block]]
    return own or remote


def entmax15(values: Sequence[float]) -> list[float]:
    """Entmax of exponent 1.5 of values that are sorted, best first."""
    x = [(value - values[0]) / 2 for value in values]
    tau, support = [], 0
    for i in range(1, len(x) + 1):
        mean = sum(x[:i]) / i
        mean_square = sum(v * v for v in x[:i]) / i
        tau.append(mean - math.sqrt(max((1 - i * (mean_square - mean * mean)) / i, 0.0)))
        support += tau[-1] <= x[i - 1]
    threshold = tau[max(1, support) - 1]
    return [max(v - threshold, 0.0) ** 2 for v in x]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one row reads of the remote blocks, best block first."""

    blocks: list[int]
    bias: list[float]
    prior: list[float]  # of the kept blocks
    margin: float  # last kept score less the best left-out one; inf when nothing is left out
    candidates: list[int]
    scores: dict[int, float]  # of every candidate


def select(
    position: int,
    index_query: npt.ArrayLike,
    summaries: npt.ArrayLike,
    candidates: Sequence[int],
    rule: Rule,
) -> Selection:
    """Select blocks for the row at `position`.

    index_query  [D]        rotated
    summaries    [>= b, D]  of the sequence's blocks; only those of `candidates` are read
    """
    root = math.sqrt(rule.dim)
    query = np.asarray(index_query, np.float64)
    kbar = np.asarray(summaries, np.float64)
    scores: dict[int, float] = {}
    for block in candidates:
        with np.errstate(invalid="ignore", over="ignore"):
            product = float(query @ kbar[block]) / root
        score = float(np.clip(product, -LIMIT, LIMIT)) * rule.scale / root
        scores[block] = score if math.isfinite(score) else -LIMIT

    order = sorted(candidates, key=lambda block: (-scores[block], block))
    if not order:
        return Selection(blocks=[], bias=[], prior=[], margin=math.inf, candidates=[], scores={})
    seen = [scores[block] for block in order[: rule.window]]
    places = min(rule.window, position // rule.block + 1)
    prior = entmax15(seen + [-LIMIT] * (places - len(seen)))

    kept = order[: rule.topk]
    log_prior = [math.log(max(p, rule.floor)) for p in prior[: len(kept)]]
    mean = sum(log_prior) / len(kept)
    left_out = order[len(kept) :]
    return Selection(
        blocks=kept,
        bias=[(value - mean) / rule.sigma for value in log_prior],
        prior=prior[: len(kept)],
        margin=scores[kept[-1]] - scores[left_out[0]] if left_out else math.inf,
        candidates=list(candidates),
        scores=scores,
    )


def _softmax_over(logit: Floats, value: Floats) -> tuple[Floats, float]:
    """Normalised output `[D]` and natural-log mass of logits `[n]` over values `[n, D]`."""
    top = logit.max()
    weight = np.exp(logit - top)
    return weight @ value / weight.sum(), float(top + math.log(weight.sum()))


def attend(
    position: int,
    query: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    blocks: Sequence[int],
    bias: Sequence[float],
    rule: Rule,
) -> Floats:
    """Output `[Hq, D]` of the row at `position` over kept blocks and the local window.

    query         [Hq, D]              rotated
    keys, values  [> position, H, D]   of the sequence, keys rotated
    """
    query = np.asarray(query, np.float64)
    keys, values = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    low = max(position + 1 - rule.local, 0)
    read: list[tuple[int, float]] = []
    for block, extra in zip(blocks, bias, strict=True):
        end = min((block + 1) * rule.block, low)  # the local window wins where they overlap
        read += [(token, float(extra)) for token in range(block * rule.block, end)]
    read += [(token, 0.0) for token in range(low, position + 1)]
    tokens = [token for token, _ in read]
    extras = np.array([extra for _, extra in read])

    out = np.empty_like(query)
    group = query.shape[0] // keys.shape[1]
    for head in range(query.shape[0]):
        key, value = keys[tokens, head // group], values[tokens, head // group]
        logit = key @ query[head] / math.sqrt(rule.dim) + extras
        out[head] = _softmax_over(logit, value)[0]
    return out


def attend_segments(
    query: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    used: Sequence[int],
    bias: Sequence[float],
    block: int,
) -> Floats:
    """The same for one row's gathered segments, merged by their masses.

    query         [Hq, D]
    keys, values  [S * block + local, H, D]   S blocks, then the local window
    used          [S + 1]                     valid tokens at the head of each segment
    bias          [S]

    Gives `[Hq, D]`; zeros for a row without any valid token.
    """
    query = np.asarray(query, np.float64)
    keys, values = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    group = query.shape[0] // keys.shape[1]
    out = np.zeros_like(query)
    for head in range(query.shape[0]):
        parts: list[Floats] = []
        masses: list[float] = []
        for segment, (length, extra) in enumerate(zip(used, [*bias, 0.0], strict=True)):
            if length <= 0:
                continue
            at = slice(segment * block, segment * block + int(length))
            logit = keys[at, head // group] @ query[head] / math.sqrt(query.shape[1])
            part, mass = _softmax_over(logit, values[at, head // group])
            parts.append(part)
            masses.append(mass + float(extra))
        if parts:
            out[head] = _softmax_over(np.array(masses), np.stack(parts))[0]
    return out


def causal(query: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike) -> Floats:
    """Dense causal attention: rotated `query [T, Hq, D]`, `keys, values [T, H, D]`."""
    query = np.asarray(query, np.float64)
    keys, values = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    group = query.shape[1] // keys.shape[1]
    out = np.empty_like(query)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            key, value = keys[: row + 1, head // group], values[: row + 1, head // group]
            logit = key @ query[row, head] / math.sqrt(query.shape[2])
            out[row, head] = _softmax_over(logit, value)[0]
    return out


def auxiliary_bytes(roles: Sequence[int], where: Coordinates, rule: Rule) -> Ints:
    """Expected byte values `[T, 2 D]` of the auxiliary head, `UNDEFINED` where none is defined.

    Role, state, counts, starts and page ranges; the index key and the halves of the summaries are
    numbers, not bytes: see `auxiliary_numbers`.
    """
    dim, total = rule.dim, len(where.tok)
    expected = np.full((total, 2 * dim), UNDEFINED, np.int64)
    for i in range(total):
        state = (where.tok[i], where.page[i], where.num_pages, where.query_page[i])
        expected[i, dim] = roles[i]
        expected[i, dim + 2 : dim + 18] = list(b"".join(_int32(value) for value in state))
        if i <= where.num_pages:
            expected[i, dim + 18 : dim + 22] = list(_int32(where.counts[i]))
            expected[i, dim + 22 : dim + 26] = list(_int32(where.starts[i]))
    for first in range(0, total - rule.block + 1, rule.block):
        held = [int(p) + 1 for p in where.image_page[first : first + rule.block] if p >= 0]
        low, high = (min(held), max(held)) if held else (0, 0)
        expected[first, dim + 26 : dim + 28] = list(low.to_bytes(2, "little"))
        expected[first, dim + 28 : dim + 30] = list(high.to_bytes(2, "little"))
    return expected


def auxiliary_numbers(index_keys: Floats, summaries: Floats, rule: Rule) -> Floats:
    """Index keys and summaries where the auxiliary head `[T, 2 D]` keeps them, NaN elsewhere."""
    dim, half = rule.dim, rule.dim // 2
    expected = np.full((len(index_keys), 2 * dim), np.nan)
    expected[:, :dim] = index_keys
    for block, kbar in enumerate(summaries):
        expected[block * rule.block, dim + half :] = kbar[:half]
        expected[block * rule.block + 1, dim + half :] = kbar[half:]
    return expected


def _int32(value: int | np.int64) -> bytes:
    return int(value).to_bytes(4, "little", signed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything about a document's rows. T tokens, B complete blocks, heads as in the document."""

    where: Coordinates
    positions: Ints  # [4, T]
    query: Floats  # [T, Hq, D] rotated and rounded, like the next three
    keys: Floats  # [T, H, D]
    values: Floats  # [T, H, D]
    index_query: Floats  # [T, D]
    index_keys: Floats  # [T, D]
    summaries: Floats  # [B, D]
    selections: list[Selection]
    out: Floats  # [T, Hq, D]
    auxiliary: Ints  # [T, 2 D] bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """One sequence: roles, unrotated inputs of every token, and the numbers of the layer.

    q  [T, Hq, D]   k, v  [T, H, D]   iq, ik  [T, D]   head_cls  [D]
    """

    prompt: Sequence[int]
    decoded: Sequence[int]
    q: Floats = field(repr=False)
    k: Floats = field(repr=False)
    v: Floats = field(repr=False)
    iq: Floats = field(repr=False)
    ik: Floats = field(repr=False)
    head_cls: Floats = field(repr=False)
    rule: Rule

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis shows a counterexample: without the arrays, which follow from a seed."""
        printer.text(repr(self))

    @property
    def roles(self) -> list[int]:
        """Roles of prompt and decoded tokens, `[T]`."""
        return [*self.prompt, *self.decoded]

    def run(self, dtype: str = "float64") -> Answer:
        """Everything, with inputs and whatever is stored rounded to `dtype`."""
        rule, where = self.rule, coordinates(self.prompt, self.decoded)

        def rotated(x: Floats) -> Floats:
            given = rounded(x, dtype)
            rows = [rotate(given[i], int(where.tok[i]), int(where.page[i]), rule) for i in span]
            return rounded(np.stack(rows), dtype)

        span = range(len(where.tok))
        query, keys, values = rotated(self.q), rotated(self.k), rounded(self.v, dtype)
        index_query, index_keys = rotated(self.iq), rotated(self.ik)
        summaries = block_summaries(index_keys, self.head_cls, rule, dtype)
        selections = select_rows(where, index_query, summaries, rule)
        out = [
            attend(i, query[i], keys, values, selections[i].blocks, selections[i].bias, rule)
            for i in span
        ]
        return Answer(
            where=where,
            positions=positions(where),
            query=query,
            keys=keys,
            values=values,
            index_query=index_query,
            index_keys=index_keys,
            summaries=summaries,
            selections=selections,
            out=np.stack(out),
            auxiliary=auxiliary_bytes(self.roles, where, rule),
        )


def block_summaries(
    index_keys: Floats, head_cls: Floats, rule: Rule, dtype: str = "float64"
) -> Floats:
    """Summaries `[B, D]` of the complete blocks of rotated `index_keys [T, D]`, rounded."""
    complete = len(index_keys) // rule.block
    blocks = index_keys[: complete * rule.block].reshape(complete, rule.block, rule.dim)
    kbar = [rounded(summarise(block, head_cls), dtype) for block in blocks]
    return np.array(kbar, np.float64).reshape(complete, rule.dim)


def select_rows(
    where: Coordinates, index_query: Floats, summaries: Floats, rule: Rule
) -> list[Selection]:
    """`select` for every row: `index_query [T, D]` rotated, `summaries [B, D]` as they are kept."""
    chosen = []
    for i in range(len(where.tok)):
        blocks = candidate_blocks(i, int(where.query_page[i]), where.image_page, rule)
        chosen.append(select(i, index_query[i], summaries, blocks, rule))
    return chosen
