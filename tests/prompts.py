"""Prompts of every kind, and documents around them.

`PROMPTS` are the kinds by name, each long enough for remote blocks of 32 where it can be.
`document` adds inputs to one; hypothesis strategies are in `strategies.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.brute import IMAGE, MARKER, TEXT, Document, Rule

PAGE_IMAGE_TOKENS = 273  # 16 x 16 patches, 16 ends of rows, one more


def runs(*parts: tuple[int, int]) -> list[int]:
    """Roles of runs given as (role, length).

    >>> runs((2, 1), (1, 3), (0, 2))
    [2, 1, 1, 1, 0, 0]
    """
    return [role for role, length in parts for _ in range(length)]


def pages_prompt(pages: int, instruction: int = 40) -> list[int]:
    """The usual document: each page a marker and 273 image tokens, then an instruction."""
    page = runs((MARKER, 1), (IMAGE, PAGE_IMAGE_TOKENS))
    return page * pages + [TEXT] * instruction


def tiled_prompt(columns: int, rows: int, instruction: int = 40) -> list[int]:
    """One page as a grid of tiles: the overview's tokens, then every tile's."""
    tokens = PAGE_IMAGE_TOKENS + (10 * columns + 1) * 10 * rows
    return runs((MARKER, 1), (IMAGE, tokens), (TEXT, instruction))


def random_prompt(length: int, seed: int) -> list[int]:
    """Runs of random roles and lengths, in no sensible order."""
    random = np.random.default_rng(seed)
    roles: list[int] = []
    while len(roles) < length:
        role = int(random.integers(3))
        longest = 3 if role == MARKER else 60
        roles += [role] * int(random.integers(1, longest))
    return roles[:length]


def answer_roles(markers: int, text: int) -> list[int]:
    """Decoded roles of an answer: some text, then a marker and `text` tokens for each page."""
    return [TEXT] * 2 + runs((MARKER, 1), (TEXT, text)) * markers


def random_answer(length: int, seed: int) -> list[int]:
    """Decoded roles of every kind: mostly text, some markers, some that claim to be images."""
    random = np.random.default_rng(seed)
    return [int(role) for role in random.choice(3, size=length, p=[0.7, 0.15, 0.15])]


PROMPTS: dict[str, list[int]] = {
    "pages": pages_prompt(2, instruction=11),
    "ending_in_image": runs((MARKER, 1), (IMAGE, 150), (MARKER, 1), (IMAGE, 75)),
    "images_before_first_marker": runs(
        (TEXT, 3), (IMAGE, 90), (MARKER, 1), (IMAGE, 100), (TEXT, 21)
    ),
    "images_only": runs((IMAGE, 230)),
    "text_only": runs((TEXT, 230)),
    "text_and_markers_only": runs((TEXT, 5), (MARKER, 2), (TEXT, 190), (MARKER, 1), (TEXT, 20)),
    "markers_first": runs((MARKER, 5), (IMAGE, 160), (TEXT, 40)),
    "markers_without_pages_between": runs(
        (MARKER, 40), (IMAGE, 20), (MARKER, 40), (IMAGE, 100), (TEXT, 9)
    ),
    # Page 2 stands strictly inside block 1, between images of pages 1 and 3.
    "page_of_text_inside_a_block": runs(
        (MARKER, 1), (IMAGE, 40), (MARKER, 1), (TEXT, 5), (MARKER, 1), (IMAGE, 120), (TEXT, 60)
    ),
    "pages_of_text": runs(
        (MARKER, 1), (IMAGE, 60), (MARKER, 1), (TEXT, 70), (MARKER, 1), (IMAGE, 60), (TEXT, 30)
    ),
    "markers_in_instruction": runs(
        (MARKER, 1), (IMAGE, 90), (MARKER, 1), (IMAGE, 60), (TEXT, 20), (MARKER, 1), (TEXT, 20),
        (MARKER, 1), (TEXT, 20), (MARKER, 1), (TEXT, 20)
    ),
    "tiny_pages": runs((MARKER, 1), (IMAGE, 2)) * 70 + runs((TEXT, 17)),
    "tiny_mixed_pages": runs((MARKER, 1), (IMAGE, 1), (MARKER, 1), (TEXT, 2)) * 40
    + runs((IMAGE, 1), (TEXT, 6)),
    "one_text_token": [TEXT],
    "one_image_token": [IMAGE],
    "one_marker_token": [MARKER],
    "marker_and_image": [MARKER, IMAGE],
    "exactly_128": runs((MARKER, 1), (IMAGE, 100), (TEXT, 27)),
    "exactly_129": runs((MARKER, 1), (IMAGE, 100), (TEXT, 28)),
    "odd_length": runs((TEXT, 1), (MARKER, 1), (IMAGE, 197), (TEXT, 14)),
    "late_image_after_text": runs((TEXT, 190), (MARKER, 1), (IMAGE, 3), (TEXT, 7)),
    "random": random_prompt(260, seed=7),
}  # fmt: skip


def document(
    prompt: Sequence[int],
    decoded: Sequence[int] = (),
    rule: Rule | None = None,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    seed: int = 0,
) -> Document:
    """A document with random inputs, all exact in float32.

    Router rows are a topic's pattern and noise, topics change every 40 keys, so that scores differ
    by more than rounding: a selection by chance would flip under any change of summing order.
    """
    rule = rule or Rule(dim=64)
    random = np.random.default_rng(seed)
    total = len(prompt) + len(decoded)

    def normal(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return random.standard_normal(shape).astype(np.float32).astype(np.float64)

    topics = normal(12, rule.dim)
    key_topic = np.repeat(random.integers(12, size=total // 40 + 1), 40)[:total]
    query_topic = random.integers(12, size=total)
    return Document(
        prompt=prompt,
        decoded=decoded,
        q=normal(total, heads, rule.dim),
        k=normal(total, kv_heads, rule.dim),
        v=normal(total, kv_heads, rule.dim),
        iq=(topics[query_topic] + normal(total, rule.dim) / 2).astype(np.float32).astype(float),
        ik=(topics[key_topic] + normal(total, rule.dim) / 2).astype(np.float32).astype(float),
        head_cls=normal(rule.dim),
        rule=rule,
    )
