"""The golden vectors and their loader: answers in `dash_golden.json`, inputs in `inputs.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.brute import Document, Rule
from tests.golden.inputs import head_cls, index_key, index_query

CASES = (
    "two_pages",
    "small_blocks_many_pages",
    "shorter_than_window",
    "text_between_pages",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The answer for one token, in float32 arithmetic."""

    tok: int
    page: int
    blocks: list[int]
    bias: list[float]
    margin: float  # 1e9 when no candidate is left out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Golden:
    """One case. `document` has two query heads on one kv head, of random q, k, v: the stored
    answers say nothing about them, so that a whole attention can be run beside the selection."""

    name: str
    document: Document
    rows: list[Row]  # prompt, then decoded tokens
    summaries: list[list[float]]  # the first four numbers of each complete block's summary


@cache
def golden(name: str) -> Golden:
    """The case called `name`, one of `CASES`."""
    case = next(case for case in _stored()["cases"] if case["name"] == name)
    seed, dim = case["seed"], case["dim"]
    total = len(case["prompt_roles"]) + len(case["decode_roles"])
    random = np.random.default_rng(seed)
    document = Document(
        prompt=case["prompt_roles"],
        decoded=case["decode_roles"],
        q=random.standard_normal((total, 2, dim)).astype(np.float32).astype(np.float64),
        k=random.standard_normal((total, 1, dim)).astype(np.float32).astype(np.float64),
        v=random.standard_normal((total, 1, dim)).astype(np.float32).astype(np.float64),
        iq=np.stack([index_query(seed, i, dim) for i in range(total)]).astype(np.float64),
        ik=np.stack([index_key(seed, i, dim) for i in range(total)]).astype(np.float64),
        head_cls=head_cls(seed, dim).astype(np.float64),
        rule=Rule(
            dim=dim,
            block=case["block"],
            local_blocks=case["local_blocks"],
            topk=case["topk"],
            window=case["window"],
            scale=case["scale"],
            floor=case["floor"],
            sigma=case["sigma"],
        ),
    )
    return Golden(
        name=name,
        document=document,
        rows=[Row(**row) for row in case["rows"]],
        summaries=case["summaries"],
    )


def entmax_vectors() -> list[tuple[list[float], list[float]]]:
    """Pairs of sorted input and entmax15 of it."""
    return [(pair["x"], pair["p"]) for pair in _stored()["entmax15"]]


@cache
def _stored() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(
        (Path(__file__).parent / "dash_golden.json").read_text(encoding="utf-8")
    )
    return stored
