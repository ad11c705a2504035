"""Compile what serving will need before it serves: tiny steps of every kind, by the same calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dash_portable.cache import empty_cache
from dash_portable.config import DashConfig
from dash_portable.describe import describe, length_bound
from dash_portable.pages import prompt_positions
from dash_portable.plan import DashStep
from dash_portable.serve import serve, shared_layer
from dash_portable.step import Step, Trust
from dash_portable.trial.feed import settle

# What a server may call; each takes kernels of its own.
STEP, ESTABLISHED, SHARING = "step", "established", "sharing"
CALLS = (STEP, ESTABLISHED, SHARING)
_SEVERAL = 17  # one more than 16: kernels tell multiples of 16 from other numbers

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel that was compiled, or loaded from Triton's cache, and the step that wanted it."""

    kernel: str
    step: str
    signature: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """What warming up did: steps run, seconds taken, kernels compiled, backend of each phase."""

    steps: int
    seconds: float
    backends: dict[str, str]
    compiled: tuple[Compiled, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of step: how many rows its sequences bring, and what kernels tell apart besides.

    given       rows bring their coordinates in `positions`
    recomputed  coordinates always come from there
    shared      a page table is given
    stores      only stores, as `cache_dash_prefill`: without and with summaries
    bound       tokens that the step is planned for, of those that prompts are; None: as decoded
                rows are, for the longest sequence of the server
    """

    lengths: tuple[int, ...]
    bound: int | None = None
    trust: Trust = Trust.CACHED
    given: bool = False
    recomputed: bool = False
    shared: bool = False
    stores: bool = False

    @property
    def decoding(self) -> bool:
        return max(self.lengths) == 1

    def __str__(self) -> str:
        many = f"{len(self.lengths)} x {max(self.lengths)} rows"
        traits = ("given", "recomputed", "shared", "stores")
        told = [trait for trait in traits if getattr(self, trait)]
        if self.bound is not None:
            told.append(f"up to {self.bound} tokens")
        return " ".join([many, f"trust={self.trust.value}", *told])


def bounds(longest: int, block: int) -> list[int]:
    """All that steps of prompts are planned for where no sequence has more than `longest` tokens,
    blocks of `block`.
    """
    found = [length_bound(0, block)]
    while found[-1] < length_bound(longest, block):
        found.append(length_bound(found[-1] + 1, block))
    return found


def kinds(call: str, rows: Sequence[int], longest: int, planned: Sequence[int]) -> list[Kind]:
    """The kinds of step behind a call of CALLS: `rows` sequences decoded together, prompts of up to
    `longest` rows, planned for so many tokens.
    """
    decode = [(1,) * n for n in rows]
    prompts = [(n,) for n in (longest, longest // 16 * 16, _SEVERAL, 2)]
    most = max(rows)
    mixed = [(longest, 1), (_SEVERAL, 2, 1), (16,) * 16, (3,) * _SEVERAL, (2, *(1,) * (most - 1))]
    found = list[Kind]()
    if call == ESTABLISHED:
        for trust in Trust:
            found += [Kind(lengths=n, trust=trust) for n in decode]
            found += [Kind(lengths=n, trust=trust, given=True) for n in decode]
        for trust in (Trust.CACHED, Trust.PREFIX):
            again = Kind(lengths=(1,), trust=trust, given=True, recomputed=True)
            found += [again, *_planned(again, prompts, planned)]
        return [*found, *(Kind(lengths=n, given=True, stores=True) for n in [(1,), *prompts])]
    continued = Kind(lengths=(1,), shared=call == SHARING)
    given = replace(continued, given=True)
    found += [replace(kind, lengths=n) for kind in (continued, given) for n in decode]
    # A sequence without rows beside those that have one: stored in tiles, attended row by row.
    found += [replace(continued, lengths=(*n, 0), bound=planned[0]) for n in decode]
    return found + _planned(given, [*prompts, *mixed], planned)


def _planned(kind: Kind, lengths: Sequence[tuple[int, ...]], planned: Sequence[int]) -> list[Kind]:
    return [replace(kind, lengths=n, bound=bound) for bound in planned for n in lengths]


def compiles(device: torch.device) -> bool:
    """Whether steps on a device need kernels at all."""
    return device.type != "cpu"


@contextlib.contextmanager
def compilations() -> Iterator[list[tuple[str, str]]]:
    """The (kernel, signature) of everything Triton compiles or loads while this is open.

    Empty, and never filled, where there is no Triton.
    """
    seen: list[tuple[str, str]] = []
    try:
        from triton import knobs
    except ImportError:
        yield seen
        return
    runtime: Any = knobs.runtime
    before = runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        name, _, signature = str(kwargs.get("repr", "")).partition("[")
        seen.append((name, f"[{signature}"))
        return before(*args, **kwargs) if before is not None else None

    runtime.jit_post_compile_hook = hook
    try:
        yield seen
    finally:
        runtime.jit_post_compile_hook = before


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What is the same in every step of one server."""

    config: DashConfig
    heads: int
    kv_heads: int
    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_model_len: int
    backend: str | None = None
    graph: bool = False


class _Scratch:
    """A small cache under block tables of the server's width.

    A sequence has cache blocks of its own for its first tokens and for its last, where steps write;
    those between are the first sequence's.
    """

    def __init__(self, server: Server, sequences: int) -> None:
        self.server = server
        config = server.config
        self.held = (config.local_blocks + 4) * config.block + 5
        used = -(-(self.held + 1) // server.block_size)
        wide = max(used, -(-server.max_model_len // server.block_size))
        own = [*range(min(-(-_SEVERAL // server.block_size), used - 1)), used - 1]
        blocks = used + (sequences - 1) * len(own)
        self.cache = empty_cache(
            config,
            blocks,
            server.kv_heads,
            server.block_size,
            dtype=server.dtype,
            device=server.device,
        )
        self.table = torch.zeros(sequences, wide, dtype=torch.int32)
        self.table[:, :used] = torch.arange(used)
        self.table[1:, own] = torch.arange(used, blocks).int().view(sequences - 1, len(own))
        roles = torch.ones(self.held, dtype=torch.int32)
        roles[0] = 2
        self.roles, self.positions = roles, prompt_positions(roles)
        self.head_cls = torch.zeros(config.index_dim, dtype=server.dtype, device=server.device)

    def step(self, kind: Kind) -> Step:
        """A step of a kind: sequences of one row decode it, and all where no row brings its
        coordinates; the others are prompts.
        """
        server, count, on = self.server, len(kind.lengths), self.server.device
        end = self.held + 1
        rows = [range(n) if kind.given and n > 1 else range(end - n, end) for n in kind.lengths]
        token = torch.tensor([t for of in rows for t in of])
        sequence = torch.tensor([i for i, of in enumerate(rows) for _ in of])
        slots = self.table[sequence, token // server.block_size].long() * server.block_size
        slots += token % server.block_size
        known = token.clamp_max(self.held - 1)
        pages = torch.tensor([[[0, 0], [0, self.held]]], dtype=torch.int32).repeat(count, 1, 1)
        prefix = torch.zeros(count, dtype=torch.int32)
        step = describe(
            list(kind.lengths),
            [of.stop for of in rows],
            self.table[:count].to(on),
            slots.to(on),
            self.roles[known].to(on),
            self.positions[:, known].to(on) if kind.given else None,
            config=server.config,
            cache=self.cache,
            max_model_len=max(server.max_model_len, end),
            num_heads=server.kv_heads if kind.stores else server.heads,
            page_table=pages.to(on) if kind.shared else None,
            trust=kind.trust,
            prefix_lens=prefix.to(on) if kind.trust is Trust.PREFIX else None,
            recomputed=kind.recomputed,
            graph=server.graph and kind.decoding,
        )
        if kind.bound is None:
            return step
        return replace(step, max_seq_len=max(step.max_seq_len, kind.bound))

    def run(self, kind: Kind) -> str:
        """Run a step of a kind; who attended, or "" if nobody did."""
        step = self.step(kind)
        rows = self.inputs(step.num_rows, step.heads)
        if kind.stores:
            for head_cls in (None, self.head_cls):
                shared_layer(step).store(*rows, self.cache, head_cls)
            return ""
        choice, shared, runner = serve(step, self.server.backend)
        DashStep(step, choice, shared, runner).run(*rows, self.cache, self.head_cls, 0)
        return choice.required().name

    def inputs(self, rows: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        server, width = self.server, self.server.config.index_dim

        def ones(*shape: int) -> Tensor:
            return torch.ones(rows, *shape, width, dtype=server.dtype, device=server.device)

        return ones(heads), ones(server.kv_heads), ones(server.kv_heads), ones(), ones()


def warm_up(
    server: Server,
    *,
    max_rows: int = 256,
    calls: Sequence[str] = (STEP, ESTABLISHED),
    progress: Progress = lambda step, done, total: None,
) -> Warmed:
    """Run a tiny step of every kind that a server of these shapes can need; say what compiled.

    max_rows   sequences decoded together at most
    calls      of CALLS: DashStep, the established calls, DashStep with a page table

    Raises UnsupportedError when nobody, or not the forced backend, can serve.
    """
    scratch = _Scratch(server, max(max_rows, _SEVERAL) + 1)  # one may be without rows
    compiled, backends = list[Compiled](), dict[str, str]()
    rows: Sequence[int] = range(1, max_rows + 1)
    planned = bounds(server.max_model_len, server.config.block)
    if not compiles(server.device):  # a few show that the steps run
        rows, planned = sorted({1, 2, max_rows}), planned[:1]
    plans = list(
        dict.fromkeys(k for call in calls for k in kinds(call, rows, scratch.held, planned))
    )
    begin = time.perf_counter()
    for done, kind in enumerate(plans):
        progress(str(kind), done, len(plans))
        with compilations() as seen:
            name = scratch.run(kind)
            settle(server.device)
        compiled += [Compiled(kernel=k, step=str(kind), signature=text) for k, text in seen]
        if name:
            backends["decode" if kind.decoding else "prefill"] = name
    if ESTABLISHED in calls:
        compiled += _rebuilt(scratch)
    return Warmed(
        steps=len(plans),
        seconds=time.perf_counter() - begin,
        backends=backends,
        compiled=tuple(compiled),
    )


def _rebuilt(scratch: _Scratch) -> list[Compiled]:
    """What `rebuild_summaries` compiles."""
    server, on = scratch.server, scratch.server.device
    none = torch.zeros(0, dtype=torch.int64, device=on)
    with compilations() as seen:
        step = describe(
            [0],
            [scratch.held],
            scratch.table[:1].to(on),
            none,
            none,
            None,
            config=server.config,
            cache=scratch.cache,
        )
        shared_layer(step).rebuild(scratch.cache, scratch.head_cls)
        settle(on)
    return [Compiled(kernel=k, step="rebuild_summaries", signature=text) for k, text in seen]
