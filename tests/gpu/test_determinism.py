"""Bits that do not depend on the batch: selections always, outputs in the deterministic mode.

A row alone, among eight, among many; a prompt whole, in chunks, and beside others; with scores that
tie. On a GPU the numbers of rows are those for which other launch rows are chosen.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from tests.device import INTERPRETED
from tests.gpu.served import PADDING, Part, Served, bits, planned, prompts, same

BATCHES = (1, 2, 5) if INTERPRETED else (1, 3, 8, 30, 64, 100, 256)
MANY = BATCHES[-1]
CUTS = ((40, 1000), (17, 2, 33, 1000)) if INTERPRETED else ((64, 4096), (100, 300, 7, 4096))
MODES = {"as planned": None, "deterministic": True}


def differ(x: Tensor, y: Tensor) -> Tensor:
    """Where bits differ. NumPy's matrix product, which the interpreter uses, gives a row other bits
    in another place; there a rounding is let pass.
    """
    if not INTERPRETED or not x.is_floating_point():
        return bits(x) != bits(y)
    return (x - y).abs() > torch.finfo(x.dtype).eps * (4 + 4 * y.abs())


def texts(count: int) -> list[list[int]]:
    """Contexts of every length up to the longest."""
    made, random = [], Served(prompts(), answer=0).random
    for i in range(count):
        text = prompts()[i % 4]
        made.append(text[: int(random.integers(len(text) // 2, len(text) + 1))])
    return made


@pytest.mark.parametrize("mode", MODES)
def test_a_row_has_the_same_bits_in_every_batch(mode: str) -> None:
    """Decode: each of the rows alone or in a part of the batch, in another order."""
    served = Served(texts(MANY), answer=2, tied=3)
    cache = served.fed(served.cache(), served.prompt_len)
    rows = [Part(s, at, at + 1) for s, at in enumerate(served.prompt_len)]
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for count in reversed(BATCHES):
        chosen = rows[:count][::-1]
        parts = [*chosen, PADDING] if count == 30 else chosen
        batch = served.batch(parts)
        step = planned(served.step(batch, cache, given=False, deterministic=MODES[mode]))
        out = step.run(*served.rows(batch), cache, served.head_cls, 0)
        assert step.selection is not None
        ids, bias = step.selection
        for place, part in enumerate(chosen):
            now = (ids[place].clone(), bias[place].clone(), out[place].clone())
            first = seen.setdefault(part.seq, now)
            assert same(first[0], now[0]), f"ids of row {part.seq} among {count}"
            assert same(first[1], now[1]), f"biases of row {part.seq} among {count}"
            if MODES[mode]:
                assert same(first[2], now[2]), f"output of row {part.seq} among {count}"
    ties = [seen[s][1] for s, at in enumerate(served.prompt_len) if (served.base[s] + at) % 3 == 0]
    assert any(float(bias.abs().max()) < 1e-5 for bias in ties)  # equal scores, equal priors


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_has_the_same_bits_however_it_is_cut(mode: str) -> None:
    """Prefill: whole and alone, whole beside others, and in chunks of two rows and more."""
    served = Served(prompts(), answer=0, tied=3)

    def run(parts: list[Part], cache: Tensor) -> list[tuple[Tensor, ...]]:
        batch = served.batch(parts)
        step = planned(served.step(batch, cache, deterministic=MODES[mode]))
        out = step.run(*served.rows(batch), cache, served.head_cls, 0)
        assert step.selection is not None
        ids, bias = (x.clone() for x in step.selection)
        counts = [part.end - part.first + part.padding for part in parts]
        return list(zip(*(x.split(counts) for x in (ids, bias, out)), strict=True))

    def check(found: tuple[Tensor, ...], part: Part, how: str) -> None:
        live = part.end - part.first
        for what, x, y in zip(("ids", "bias", "out"), found, whole[part.seq], strict=True):
            if what != "out" or MODES[mode]:
                wrong = differ(x[:live], y[part.first : part.end]).flatten(1).any(1)
                assert not bool(wrong.any()), f"{what} {how}: {int(wrong.sum())} rows of {part}"

    lengths, whole = served.prompt_len, {}
    for seq, length in enumerate(lengths):
        (whole[seq],) = run([Part(seq, 0, length)], served.cache())
    together = [Part(seq, 0, length, seq) for seq, length in enumerate(lengths)]
    for part, found in zip(together, run(together[::-1], served.cache())[::-1], strict=True):
        check(found, part, "beside others")
    for cuts in CUTS:
        cache = served.cache()
        ends = list(accumulate(cuts))
        for first, end in zip([0, *ends], ends, strict=False):
            parts = [
                Part(seq, first, min(end, length))
                for seq, length in enumerate(lengths)
                if min(end, length) - first >= 2
            ]
            for part, found in zip(parts, run(parts, cache) if parts else [], strict=True):
                check(found, part, f"in chunks {cuts}")
