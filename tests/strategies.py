"""Hypothesis strategies over prompts, answers, rules and documents."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.brute import IMAGE, MARKER, TEXT, Document, Rule
from tests.device import COMPILED
from tests.prompts import document, runs

# Small blocks reach every case of the rule with short sequences.
# kv heads and query heads on each; fewer where kernels are compiled for them
HEADS = [(1, 2), (2, 1)] if COMPILED else [(1, 1), (1, 2), (2, 1), (2, 2)]
SMALL = Rule(dim=64, block=8, local_blocks=2, topk=4, window=6, floor=1e-3)


def _of_runs(roles: list[int], longest: int, most: int) -> st.SearchStrategy[list[int]]:
    part = st.tuples(st.sampled_from(roles), st.integers(1, longest))
    return st.lists(part, min_size=1, max_size=most).map(lambda parts: runs(*parts))


@st.composite
def _of_pages(draw: st.DrawFn) -> list[int]:
    """A document with a sensible order: pages of any size, some of text only, an instruction."""
    roles = [TEXT] * draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 5))):
        images = draw(st.sampled_from([0, 1, 2, 7, 25, 40]))
        roles += runs((MARKER, 1), (TEXT, draw(st.integers(0, 4))), (IMAGE, images))
    return roles + [TEXT] * draw(st.integers(0, 30))


def prompts(max_tokens: int = 120) -> st.SearchStrategy[list[int]]:
    """Roles of prompts of every kind, at most `max_tokens`, at least one."""
    every = [TEXT, IMAGE, MARKER]
    return st.one_of(
        _of_pages(),
        _of_runs(every, 40, 8),
        _of_runs(every, 3, 40),  # many tiny pages in a block
        _of_runs([TEXT, MARKER], 30, 6),  # no image at all
        _of_runs([TEXT, IMAGE], 40, 6),  # no marker at all
        _of_runs([IMAGE], 100, 1),
        _of_runs(every, 30, 6).map(lambda roles: [*roles, IMAGE]),
        _of_runs(every, 30, 6).map(lambda roles: [MARKER] * 4 + roles),
        _of_runs([IMAGE, MARKER], 30, 6).map(lambda roles: [*roles, TEXT, MARKER, TEXT, MARKER]),
        st.lists(st.sampled_from(every), min_size=1, max_size=max_tokens),
    ).map(lambda roles: roles[:max_tokens])


def answers(max_tokens: int = 12) -> st.SearchStrategy[list[int]]:
    """Roles of decoded tokens, any of the three."""
    return st.lists(st.sampled_from([TEXT, TEXT, MARKER, IMAGE]), max_size=max_tokens)


@st.composite
def documents(
    draw: st.DrawFn,
    rule: Rule = SMALL,
    max_prompt: int = 120,
    max_decoded: int = 12,
    min_decoded: int = 0,
) -> Document:
    """Documents with 1 or 2 kv heads and 1 or 2 query heads on each."""
    kv_heads, group = draw(st.sampled_from(HEADS))
    decoded = draw(answers(max_decoded).filter(lambda roles: len(roles) >= min_decoded))
    return document(
        draw(prompts(max_prompt)),
        decoded,
        rule,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def cuts(draw: st.DrawFn, total: int) -> list[int]:
    """Lengths of the chunks that `total` tokens are cut into, at least one each."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(draw(st.integers(1, left)))
    return lengths
