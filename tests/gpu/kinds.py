"""Every kind of step and every kernel once, on few rows: for canaries and for sanitizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from dash_portable.cache import summary_at
from dash_portable.kernels import launch, launch_prefill
from dash_portable.kernels.cases import CASES
from dash_portable.kernels.launch import Launch
from dash_portable.plan import DashStep
from dash_portable.segments import fused
from dash_portable.step import Step, Trust
from dash_portable.triton_layer import TritonLayer
from tests.device import DEVICE
from tests.gpu.plain_library import WAYS
from tests.gpu.served import (
    GROUPED,
    LONG,
    PADDING,
    SHAPE,
    Part,
    Served,
    Shape,
    parts_of,
    planned,
    prompts,
)

Fence = Callable[[Tensor], Tensor]  # a tensor's copy where trespassing shows


def _plain(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """parts: what the step takes of sequences of `texts` that hold `held` tokens.

    run      "layer", "store" (with and without summaries), "rebuild", "segments"
    rows     changes of the launch rows: of decode selection, decode attention, prefill
    """

    texts: list[list[int]]
    parts: tuple[Part, ...]
    held: tuple[int, ...]
    run: str = "layer"
    options: dict[str, Any] = field(default_factory=dict)
    rows: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = ({}, {}, {})
    shape: Shape = SHAPE

    @property
    def trust(self) -> Trust:
        trust: Trust = self.options.get("trust", Trust.CACHED)
        return trust


def kinds(texts: list[list[int]]) -> dict[str, Kind]:
    """All of them, on four sequences."""
    lengths, kind = [len(text) for text in texts], partial(Kind, texts=texts)
    a, b, _, d = lengths
    held = tuple(lengths)
    some = (Part(0, a, a + 1), PADDING, Part(1, b, b + 1), Part(3, d + 1, d + 2))
    held_some = (a, b, 0, d + 1)
    one = (Part(1, b, b + 1),)
    chunks = (Part(0, a - 30, a + 3, 2), Part(1, b, b + 1), PADDING, Part(2, 0, 70, 1))
    held_chunks = (a - 30, b, 0, 0)
    prompt = (Part(0, 0, a, 1), Part(3, 0, d))
    empty = (0, 0, 0, 0)
    plain: dict[str, Any] = {"given": False}
    apart = {"ticket": False, "dependent": False, "ahead": False}
    unsplit = {"split": 1, "ticket": False}
    two = {"split": 4, "ticket": False}
    grouped = {"shape": GROUPED}
    prefix = {"trust": Trust.PREFIX}
    wide = {"wide": True}  # in the launches of prompts longer than these
    return {
        "decode": kind(parts=some, held=held_some, options=plain),
        "decode one": kind(parts=one, held=held_some, options=plain),
        "decode in two launches": kind(
            parts=some, held=held_some, options=plain, rows=({**apart, "tile": 16}, two, {})
        ),
        "decode unsplit": kind(
            parts=some, held=held_some, options=plain, rows=(apart, unsplit, {})
        ),
        "decode groups": kind(parts=some, held=held_some, options=plain, **grouped),
        "decode through a page table": kind(
            parts=some, held=held_some, options={"given": False, "paged": True}
        ),
        "decode with given coordinates": kind(
            parts=(Part(0, a - 1, a), Part(1, b - 1, b)), held=(a - 1, b - 1, 0, 0)
        ),
        "decode another's cache": kind(
            parts=some, held=held_some, options={**plain, "trust": Trust.NONE}
        ),
        "decode behind a prefix": kind(
            parts=some, held=held_some, options={**plain, **prefix}
        ),
        "prompts": kind(parts=prompt, held=empty),
        "prompts among longer ones": kind(parts=prompt, held=empty, options=wide),
        "prompts by block": kind(parts=prompt, held=empty, options={"deterministic": True}),
        "prompts by many blocks": kind(
            parts=prompt, held=empty, options={"deterministic": True, **wide}, shape=LONG
        ),
        "prompts by tile": kind(
            parts=prompt, held=empty, rows=({}, {}, {"union_limit": 64, "tile_blocks": 2})
        ),
        "prompts of groups": kind(parts=prompt, held=empty, **grouped),
        "chunks": kind(parts=chunks, held=held_chunks),
        "chunks through a page table": kind(
            parts=chunks, held=held_chunks, options={"paged": True, **wide}
        ),
        "chunks in another's cache": kind(
            parts=chunks, held=held_chunks, options={"trust": Trust.NONE, **wide}
        ),
        "chunks behind a prefix": kind(
            parts=chunks, held=held_chunks, options={**prefix, **wide}
        ),
        "store": kind(parts=prompt, held=empty, run="store"),
        "store rows": kind(parts=some, held=held_some, run="store", options=plain),
        "rebuild": kind(parts=(), held=held, run="rebuild"),
        "segments": kind(parts=some, held=held_some, run="segments", options=plain),
    }  # fmt: skip


KINDS = kinds(prompts())


@contextmanager
def launched(kind: Kind) -> Iterator[set[str]]:
    """The kernels that were launched while this was open, under the kind's launch rows."""
    seen: set[str] = set()
    call, through = Launch.__call__, KernelInterface.__getitem__
    selecting, attending, tiling = (
        launch.select_row, launch.attend_row, launch_prefill.prefill_row,
    )  # fmt: skip
    changes = kind.rows

    def noted(self: Launch, *args: Any) -> None:
        seen.add(named(self._kernel))
        call(self, *args)

    def taken(self: Any, grid: Any) -> Any:
        seen.add(named(self))
        return through(self, grid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", noted)
        patch.setattr(KernelInterface, "__getitem__", taken)
        patch.setattr(
            launch, "select_row", lambda *a, **k: selecting(*a, **k)._replace(**changes[0])
        )
        patch.setattr(
            launch, "attend_row", lambda *a, **k: attending(*a, **k)._replace(**changes[1])
        )
        changed = lambda *a, **k: tiling(*a, **k)._replace(**changes[2])  # noqa: E731
        for user in ("dash_portable.backends.triton", "dash_portable.triton_stages"):
            patch.setattr(f"{user}.prefill_row", changed)
        patch.setattr(fused, "available", lambda device: True)  # the interpreter's CPU, too
        yield seen


@dataclass(slots=True, kw_only=True)
class Done:
    """What a kind did: its results, the cache, and which numbers of the cache it may write."""

    results: dict[str, Tensor]
    cache: Tensor
    before: Tensor
    allowed: Tensor


class Prepared:
    """A kind's sequences with the cache that its step finds.

    fed   what another kind of the same texts and shape left of all tokens, to save the feeding
    """

    def __init__(self, kind: Kind, fed: Tensor | None = None) -> None:
        self.kind = kind
        self.served = Served(kind.texts, shape=kind.shape, answer=8)
        if fed is None:
            fed = self.served.fed(self.served.cache(), kind.held)
        self.cache = fed.clone()
        if kind.trust is Trust.NONE or kind.run == "rebuild":  # another owner's: garbage there
            self.cache[:, -1, :, kind.shape.width + 22 :] = 9.0
        self.batch = self.served.batch(kind.parts or [Part(s, 0, 0) for s in range(4)])
        if kind.run == "rebuild":
            self.batch.seq_lens[:] = kind.held
            for row, of in enumerate(self.served.blocks):
                self.batch.table[row, : len(of)] = torch.tensor(of).int()

    def step(self, cache: Tensor) -> Step:
        options = dict(self.kind.options)
        given = options.pop("given", True)
        if self.kind.trust is Trust.PREFIX:
            lens = [max(part.first - 40, 0) for part in self.kind.parts]
            options["prefix_lens"] = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        return self.served.step(self.batch, cache, given=given, **options)

    def run(self, fence: Fence = _plain) -> Done:
        """Once; every tensor that a kernel gets goes through `fence`."""
        cache = fence(self.cache.clone())
        before = cache.clone()
        step = self.step(cache)
        tensors = {
            name: fence(getattr(step, name))
            for name in step.__dataclass_fields__
            if torch.is_tensor(getattr(step, name))
        }
        step = replace(step, **tensors)
        q, k, v, iq, ik = (fence(x) for x in self.served.rows(self.batch))
        head_cls = fence(self.served.head_cls)
        results: dict[str, Tensor] = {}
        if self.kind.run == "rebuild":
            TritonLayer(step).rebuild(cache, head_cls)
        elif self.kind.run == "store":
            layer = TritonLayer(step)
            for head in (None, head_cls):
                query, index_query = layer.store(q, k, v, iq, ik, cache, head)
            live = step.slots >= 0  # the others' queries are nobody's
            results["query"], results["index query"] = query[live], index_query[live]
        else:
            made = planned(step)
            results["out"] = made.run(q, k, v, iq, ik, cache, head_cls, 0)
            assert made.selection is not None
            results["ids"], results["bias"] = made.selection
            if self.kind.run == "segments":
                results |= segments(made, cache)
        return Done(results=results, cache=cache, before=before, allowed=self.allowed(step))

    def allowed(self, step: Step) -> Tensor:
        """Live rows; the free place of the blocks that they complete; whole free places of
        sequences that are rebuilt.
        """
        shape = self.kind.shape
        size, block, width = shape.block_size, shape.config.block, shape.width
        allowed = torch.zeros(self.cache.shape, dtype=torch.bool, device=DEVICE)
        if self.kind.run == "rebuild":
            for blocks in self.served.blocks:
                allowed[torch.tensor(blocks), -1, :, width + 22 :] = True
            return allowed
        live = step.slots[step.slots >= 0]
        allowed[live // size, :, live % size] = True
        for part in self.kind.parts:
            for number in range(part.first // block, part.end // block):
                for token in (number * block, number * block + 1):
                    (slot,) = self.served.slots(part.seq, token, token + 1)
                    at = allowed[slot // size, -1, slot % size]
                    at[width + 26 : width + 30] = True
                    at[summary_at(width) :] = True
        return allowed


def segments(made: DashStep, cache: Tensor) -> dict[str, Tensor]:
    """The ways to feed a library, over a plain one: gather, page table and merge."""
    layer, _ = parts_of(made)
    assert made.selection is not None
    found = {}
    for way in WAYS:
        out = torch.full_like(layer.query, torch.nan)
        way(made.step).run(layer.query, cache, *made.selection, out)
        found[way.__name__] = out
    return found


def named(kernel: Any) -> str:
    """`file.kernel`."""
    fn = kernel.fn
    return f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}"


def every_kernel() -> set[str]:
    """The kernels that are compiled for all GPUs."""
    return {named(case.kernel) for case in CASES.values()}
