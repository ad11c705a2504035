"""A whole document read: prefill, decode, stage times, tokens read, and rows held to the oracle."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dash_portable.backends.spec import Runner
from dash_portable.choice import Choice
from dash_portable.config import DashConfig
from dash_portable.serve import serve
from dash_portable.shared_layer import SharedLayer
from dash_portable.step import Step
from dash_portable.trial.feed import Feed, Ran, watch
from dash_portable.trial.inputs import layer_inputs
from dash_portable.trial.verify import Check, Oracle, worst

PHASES = ("prefill", "decode")
STAGES = ("plan", "store", "select", "attend")
_PROMPT_LOOKED = 64  # rows of the prompt that are held against the oracle, in each layer
_ANSWER_LOOKED = 16

Progress = Callable[[str, int], None]
Plan = tuple[Step, SharedLayer, Runner]


@dataclass(kw_only=True)
class Reading:
    """What reading a document took and gave.

    choices   phase -> who served it
    seconds   phase -> stage -> seconds, over all layers and steps
    first     phase -> seconds of the very first call on a GPU, which compiles; not in `seconds`
    checks    phase -> comparisons with the oracle
    ids       [T, S]  blocks that each row of the first layer chose, -1 for none, on the host
    own       [T]     whether the row was bound to blocks of its own page
    read      [T]     keys that each row of the first layer read
    """

    choices: dict[str, Choice] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    checks: dict[str, list[Check]] = field(default_factory=dict)
    ids: Tensor
    own: Tensor
    read: Tensor

    @property
    def ok(self) -> bool:
        return all(check.ok for checks in self.checks.values() for check in checks)


def keys_read(ids: Tensor, position: Tensor, config: DashConfig) -> Tensor:
    """How many keys rows at `position [N]` read that chose `ids [N, S]`; int64 `[N]`."""
    lo = (position - config.local + 1).clamp_min(0)
    begin = ids.long() * config.block
    length = (lo[:, None] - begin).clamp(0, config.block).masked_fill(ids < 0, 0)
    return length.sum(1) + position - lo + 1


def _spans(feed: Feed, chunk: int | None) -> Iterator[tuple[str, int, int]]:
    size = chunk or feed.prompt_len
    for first in range(0, feed.prompt_len, size):
        yield "prefill", first, min(first + size, feed.prompt_len)
    for token in range(feed.prompt_len, len(feed.document)):
        yield "decode", token, token + 1


def _looked(feed: Feed) -> set[int]:
    """Tokens whose rows are checked: spread over prompt and answer, first and last included."""
    prompt, end = feed.prompt_len, len(feed.document)
    chosen = torch.linspace(0, prompt - 1, min(prompt, _PROMPT_LOOKED)).long().tolist()
    if end > prompt:
        wanted = min(end - prompt, _ANSWER_LOOKED)
        chosen += torch.linspace(prompt, end - 1, wanted).long().tolist()
    return set(chosen)


def read(
    feed: Feed,
    *,
    backend: str | None = None,
    chunk: int | None = None,
    progress: Progress = lambda phase, tokens: None,
) -> Reading:
    """Take the feed's document through all layers, `chunk` prompt tokens at a time (None: all).

    `progress` is told the phase and how many tokens were done. Raises UnsupportedError when nobody
    can serve, BackendError when a forced backend fails.
    """
    config, tokens = feed.config, len(feed.document)
    inputs = [
        layer_inputs(
            feed.document,
            config,
            heads=feed.heads,
            kv_heads=feed.kv_heads,
            dtype=feed.dtype,
            device=feed.device,
            seed=feed.seed + layer,
        )
        for layer in range(feed.layers)
    ]
    oracle, looked = Oracle(feed), _looked(feed)
    at = torch.arange(tokens)
    reading = Reading(
        ids=torch.full((tokens, config.topk), -1, dtype=torch.int32),
        own=oracle.bound(at),
        read=torch.zeros(tokens, dtype=torch.int64),
    )
    found: dict[str, list[Check]] = defaultdict(list)
    seconds = {phase: dict.fromkeys(STAGES, 0.0) for phase in PHASES}
    for phase, first, last in _spans(feed, chunk):
        begin = time.perf_counter()
        step = feed.describe(first, last)
        choice, shared, runner = serve(step, backend)
        seconds[phase]["plan"] += time.perf_counter() - begin
        reading.choices.setdefault(phase, choice)
        rows = torch.tensor([t - first for t in range(first, last) if t in looked])

        def ran(layer: int, plan: Plan = (step, shared, runner), first: int = first) -> Ran:
            given = inputs[layer]
            rows_of = given.rows(first, first + plan[0].num_rows)
            return watch(*plan, rows_of, feed.caches[layer], given.head_cls, layer)

        if phase not in reading.first and feed.device.type != "cpu":
            # The first call compiles; what it writes is written again below.
            begin = time.perf_counter()
            ran(0)
            reading.first[phase] = time.perf_counter() - begin
        for layer in range(feed.layers):
            one = ran(layer)
            for stage, took in one.seconds.items():
                seconds[phase][stage] += took
            if len(rows):
                found[phase] += oracle.check(inputs[layer], layer, step, one, rows)
            if layer == 0:
                reading.ids[first:last] = one.ids.cpu()
        progress(phase, last - first)
    reading.read = keys_read(reading.ids, at, config)
    reading.seconds = {phase: seconds[phase] for phase in reading.choices}
    reading.checks = {phase: worst(checks) for phase, checks in found.items()}
    return reading
