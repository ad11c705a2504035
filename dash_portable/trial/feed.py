"""A document's caches, and the steps that take it through prefill and decode."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dash_portable.cache import empty_cache, summary_at
from dash_portable.config import DashConfig
from dash_portable.describe import describe
from dash_portable.document import Document
from dash_portable.layer_form import LayerForm, layer_numbers
from dash_portable.pages import prompt_positions
from dash_portable.shared_layer import SharedLayer
from dash_portable.step import Step

if TYPE_CHECKING:
    from dash_portable.backends.spec import Runner

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, iq, ik of one layer of a step


def settle(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(slots=True, kw_only=True)
class Ran:
    """What one layer of one step did: seconds of its stages, and what passed between them.

    query [N, Hq, D] and index_query [N, D] rotated, ids and bias [N, S], out [N, Hq, D]
    """

    seconds: dict[str, float]
    query: Tensor
    index_query: Tensor
    ids: Tensor
    bias: Tensor
    out: Tensor


def watch(
    step: Step,
    shared: SharedLayer,
    runner: Runner,
    rows: Rows,
    cache: Tensor,
    head_cls: Tensor,
    layer: int,
) -> Ran:
    """One layer of a planned step as `DashStep.run` does it, its stages one by one and waited for.

    Store and select run apart, also where one launch could do both.
    """
    q, k, v, iq, ik = rows
    LayerForm.of(step).check(q, k, v, iq, ik, head_cls, cache)
    scale, floor = layer_numbers(step.config, layer)
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    seconds: dict[str, float] = {}
    settle(step.device)
    begin = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal begin
        settle(step.device)
        now = time.perf_counter()
        seconds[name], begin = now - begin, now

    query, index_query = shared.store(q, k, v, iq, ik, cache, head_cls)
    stage("store")
    ids, bias = shared.select(index_query, cache, head_cls, scale, floor)
    stage("select")
    runner.run(query, cache, ids, bias, out)
    stage("attend")
    return Ran(seconds=seconds, query=query, index_query=index_query, ids=ids, bias=bias, out=out)


@dataclass(kw_only=True)
class Feed:
    """Caches of one document, or of `copies` sequences that all hold it, one cache a layer.

    Cache blocks are handed out in random order, as a server's are after a while; what is not
    written holds NaN, so that nobody reads it unnoticed.
    """

    document: Document
    config: DashConfig
    heads: int = 10
    kv_heads: int = 10
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    block_size: int = 64
    layers: int = 1
    copies: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        per_copy = -(-len(self.document) // self.block_size)
        total = per_copy * self.copies
        random = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(total, generator=random).view(self.copies, per_copy)
        self.block_table = order.int().to(self.device)
        self.roles = torch.tensor(self.document.roles, dtype=torch.int32, device=self.device)
        prompt = torch.tensor(self.document.prompt)
        self.positions = prompt_positions(prompt).to(self.device)
        self.caches = [
            empty_cache(
                self.config,
                total,
                self.kv_heads,
                self.block_size,
                dtype=self.dtype,
                device=self.device,
            ).fill_(torch.nan)
            for _ in range(self.layers)
        ]

    @property
    def prompt_len(self) -> int:
        return len(self.document.prompt)

    def slots(self, first: int, last: int, sequence: int = 0) -> Tensor:
        """Cache places of tokens `first .. last`, int64."""
        token = torch.arange(first, last, device=self.device)
        block = self.block_table[sequence, token // self.block_size].long()
        return block * self.block_size + token % self.block_size

    def describe(
        self, first: int, last: int, *, sequences: int | None = None, graph: bool = False
    ) -> Step:
        """A step for prompt tokens `first .. last`, or for the one answer token `first`.

        sequences   how many of the copies take part: the first one of a prompt, all of an answer
        """
        prompt = last <= self.prompt_len
        if sequences is None:
            sequences = 1 if prompt else self.copies
        slots = [self.slots(first, last, sequence) for sequence in range(sequences)]
        return describe(
            [last - first] * sequences,
            [last] * sequences,
            self.block_table[:sequences],
            torch.cat(slots),
            self.roles[first:last].repeat(sequences),
            self.positions[:, first:last].repeat(1, sequences) if prompt else None,
            config=self.config,
            cache=self.caches[0],
            num_heads=self.heads,
            graph=graph,
        )

    def replicate(self) -> None:
        """Give every sequence what the first one holds."""
        first = self.block_table[0].long()
        for cache in self.caches:
            held = cache[first]
            for other in self.block_table[1:].long():
                cache[other] = held

    def summaries(self, layer: int, blocks: int) -> Tensor:
        """Stored summaries `[blocks, D]` of the first sequence."""
        first = torch.arange(blocks, device=self.device) * self.config.block
        at = summary_at(self.config.index_dim)
        halves = []
        for token in (first, first + 1):
            block = self.block_table[0, token // self.block_size].long()
            halves.append(self.caches[layer][block, -1, token % self.block_size, at:])
        return torch.cat(halves, 1)

    def keys_and_values(self, layer: int, head: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Stored keys and values `[tokens, D]` of one kv head of the first sequence."""
        token = torch.arange(tokens, device=self.device)
        block = self.block_table[0, token // self.block_size].long()
        both = self.caches[layer][block, head, token % self.block_size]
        return both[:, : self.config.index_dim], both[:, self.config.index_dim :]
