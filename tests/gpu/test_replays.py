"""Whole layers captured in a graph, replayed a thousand times while everything around them changes.

Beside each replay runs a step that was planned for that moment alone, on a cache of its own: out,
ids, biases and every byte of the cache must be the same. Every so often a step is held to the
eager layer and to float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.device import DEVICE, INTERPRETED
from tests.gpu.held import check_step
from tests.gpu.served import PADDING, Batch, Part, Rows5, Served, bits, planned, prompts

REPLAYS = 8 if INTERPRETED else 1000
LOOKED = 4 if INTERPRETED else 125  # every so many replays one is held to the oracle


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """rooms: rows of each sequence of the step, padding included; given and paged as in `step`."""

    rooms: tuple[int, ...]
    given: bool = False
    paged: bool = False
    deterministic: bool = False

    @property
    def decodes(self) -> bool:
        return set(self.rooms) == {1}


CASES = {
    "one row": Case(rooms=(1,)),
    "rows and padding": Case(rooms=(1,) * (3 if INTERPRETED else 12)),
    "rows with a page table": Case(rooms=(1,) * (2 if INTERPRETED else 12), paged=True),
    "chunks and rows": Case(rooms=(21, 1, 6) if INTERPRETED else (200, 1, 17, 64, 1), given=True),
    "chunks with a page table": Case(
        rooms=(9, 1) if INTERPRETED else (200, 1, 17, 64, 1), given=True, paged=True
    ),
}


def decoding(served: Served, caches: list[Tensor], case: Case) -> Iterator[list[Part]]:
    """Rows of some sequences in any order, each one token further; one that ends moves to other
    cache blocks and begins its answer again.
    """
    at, rooms = list(served.prompt_len), len(case.rooms)
    while True:
        live = int(served.random.integers(1 if rooms == 1 else 0, rooms + 1))
        live = min(live, len(at))
        parts = [PADDING] * rooms
        places = served.random.permutation(rooms)[:live]
        for place, seq in zip(places, served.random.permutation(len(at))[:live], strict=True):
            parts[place] = Part(int(seq), at[seq], at[seq] + 1)
            at[seq] += 1
        yield parts
        for seq, length in enumerate(served.lengths):
            if at[seq] == length:
                old, new = (torch.tensor(x, device=DEVICE) for x in served.move(seq))
                for cache in caches:
                    held = cache[old]
                    cache[old] = torch.nan
                    cache[new] = held
                at[seq] = served.prompt_len[seq]


def reading(served: Served, caches: list[Tensor], case: Case) -> Iterator[list[Part]]:
    """Chunks of any length of some sequences, prompts and answers; one that ends is forgotten and
    begins in other cache blocks.
    """
    at = [0] * len(served.lengths)
    while True:
        seqs = served.random.permutation(len(at))
        parts = []
        for room, seq in zip(case.rooms, [*seqs, *[-1] * len(case.rooms)], strict=False):
            left = served.lengths[seq] - at[seq] if seq >= 0 else 0
            take = min(left, int(served.random.integers(0, room + 1)))
            if not take:
                parts.append(PADDING._replace(padding=room))
                continue
            parts.append(Part(int(seq), at[seq], at[seq] + take, room - take))
            at[seq] += take
        yield parts
        for seq, length in enumerate(served.lengths):
            if at[seq] == length:
                old, _ = served.move(seq)
                for cache in caches:
                    cache[torch.tensor(old, device=DEVICE)] = torch.nan
                at[seq] = 0


def captured(run: Callable[[], Tensor]) -> Callable[[], object]:
    """A graph of one run, warmed up as a server does; without a GPU the run itself."""
    if DEVICE.type == "cpu":
        return run
    room = torch.get_device_module(DEVICE)
    side = room.Stream()
    side.wait_stream(room.current_stream())
    with room.stream(side):
        for _ in range(3):
            run()
    room.current_stream().wait_stream(side)
    graph = room.CUDAGraph() if hasattr(room, "CUDAGraph") else room.XPUGraph()
    with room.graph(graph):
        run()
    replay: Callable[[], object] = graph.replay
    return replay


def forget_nothing(texts: list[list[int]]) -> list[list[int]]:
    """More sequences than a step has, so that every step has others."""
    return texts * (1 if INTERPRETED else 4)


@pytest.mark.parametrize("name", CASES)
def test_replays_equal_steps_that_were_planned_for_their_moment(name: str) -> None:
    case = CASES[name]
    served = Served(forget_nothing(prompts()), spare=40, answer=30)
    cache = served.cache()
    if case.decodes:
        served.fed(cache, served.prompt_len)
    twin = cache.clone()
    options = {"given": case.given, "paged": case.paged}

    quiet = served.batch([PADDING._replace(padding=room) for room in case.rooms])
    ours = planned(served.step(quiet, cache, graph=True, **options))
    rows: Rows5 = served.rows(quiet)
    out = torch.empty_like(rows[0])
    replay = captured(lambda: ours.run(*rows, cache, served.head_cls, 0, out))
    assert torch.equal(bits(cache), bits(twin))  # padding alone writes nothing

    scatter = np.random.default_rng(1)
    traffic = (decoding if case.decodes else reading)(served, [cache, twin], case)
    differs = torch.zeros(REPLAYS, 4, dtype=torch.bool, device=DEVICE)
    for i in range(REPLAYS):
        batch: Batch = served.batch(next(traffic), scatter)
        for own, new in zip(rows, served.rows(batch), strict=True):
            own.copy_(new)
        out.fill_(torch.nan)
        look = i % LOOKED == LOOKED - 1
        before = cache.clone() if look else None
        ours.update(**batch.changes(ours.step))
        replay()
        # For all that the table holds, as the captured one: of the same launches come equal bits.
        moment = replace(served.step(batch, twin, **options), max_seq_len=ours.step.max_seq_len)
        fresh = planned(moment)
        theirs = fresh.run(*rows, twin, served.head_cls, 0)
        assert ours.selection is not None
        assert fresh.selection is not None
        pairs = ((out, theirs), *zip(ours.selection, fresh.selection, strict=True), (cache, twin))
        for j, (x, y) in enumerate(pairs):
            differs[i, j] = (bits(x) != bits(y)).any()
        if before is not None:
            check_step(ours, rows, before, cache, out, served.head_cls)
    found = differs.nonzero().tolist()
    what = ("out", "ids", "bias", "cache")
    assert not found, [f"replay {i}: {what[j]}" for i, j in found[:5]]
