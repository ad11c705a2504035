"""Compile what serving will need before it serves: tiny steps of every kind, by the same calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dash_portable.cache import empty_cache
from dash_portable.config import DashConfig
from dash_portable.pages import prompt_positions
from dash_portable.plan import DashStep, describe
from dash_portable.serve import serve, shared_layer
from dash_portable.step import Step, Trust
from dash_portable.trial.feed import settle

# What a server may call; each takes kernels of its own.
STEP, ESTABLISHED, SHARING = "step", "established", "sharing"
CALLS = (STEP, ESTABLISHED, SHARING)
_TRUSTS = {STEP: (Trust.CACHED,), SHARING: (Trust.CACHED,), ESTABLISHED: (Trust.NONE, Trust.PREFIX)}

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
    """A small cache whose blocks all sequences share, under a block table of the server's width."""

    def __init__(self, server: Server) -> None:
        self.server = server
        config = server.config
        self.held = (config.local_blocks + 4) * config.block + 5
        used = -(-(self.held + 1) // server.block_size)
        wide = max(used, -(-server.max_model_len // server.block_size))
        self.cache = empty_cache(
            config,
            used,
            server.kv_heads,
            server.block_size,
            dtype=server.dtype,
            device=server.device,
        )
        self.table = torch.zeros(wide, dtype=torch.int32)
        self.table[:used] = torch.arange(used)
        roles = torch.ones(self.held, dtype=torch.int32)
        roles[0] = 2
        self.roles, self.positions = roles, prompt_positions(roles)
        self.head_cls = torch.zeros(config.index_dim, dtype=server.dtype, device=server.device)

    def step(self, query_lens: Sequence[int], call: str, trust: Trust, *, graph: bool) -> Step:
        """Sequences of which the first of several rows are prompts, and single rows are decoded."""
        server, count = self.server, len(query_lens)
        decoding = max(query_lens) == 1
        rows = [range(self.held, self.held + 1) if n == 1 else range(n) for n in query_lens]
        token = torch.tensor([t for of in rows for t in of])
        slots = self.table[token // server.block_size].long() * server.block_size
        slots += token % server.block_size
        known = token.clamp_max(self.held - 1)
        positions = self.positions[:, known].clone()
        positions[3, token == self.held] = 0
        on = server.device
        shared = torch.tensor([[[0, 0], [0, self.held]]], dtype=torch.int32).repeat(count, 1, 1)
        return describe(
            list(query_lens),
            [of[-1] + 1 for of in rows],
            self.table.repeat(count, 1).to(on),
            slots.to(on),
            self.roles[known].to(on),
            None if decoding else positions.to(on),
            config=server.config,
            cache=self.cache,
            max_model_len=server.max_model_len,
            num_heads=server.heads,
            max_query_len=1 if decoding else None,
            page_table=shared.to(on) if call == SHARING else None,
            trust=trust,
            prefix_lens=torch.zeros(count, dtype=torch.int32, device=on)
            if trust is Trust.PREFIX
            else None,
            graph=graph,
        )

    def inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        server, width = self.server, self.server.config.index_dim

        def ones(*shape: int) -> Tensor:
            return torch.ones(rows, *shape, width, dtype=server.dtype, device=server.device)

        return ones(server.heads), ones(server.kv_heads), ones(server.kv_heads), ones(), ones()


def _shapes(call: str, max_rows: int, longest: int) -> list[list[int]]:
    """Query lengths of the steps to run.

    How many rows are decoded together decides tiles and splits, so every number is tried for the
    main call, and for the others those where a table of launches can change.
    """
    counts = range(1, max_rows + 1)
    few = [n for n in counts if n < 4 or n == max_rows or (n & (n - 1)) == 0 or (n - 1) % 64 == 0]
    decode = [[1] * n for n in (counts if call == STEP else few)]
    prompts = [n for n in (longest, longest // 16 * 16, 17, 2) if n > 1]
    return [*decode, *([n] for n in prompts), [longest, 1], [17, 2, 1], [16] * 16, [3] * 17]


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
    scratch, compiled, backends = _Scratch(server), list[Compiled](), dict[str, str]()
    plans = [
        (call, trust, lengths)
        for call in calls
        for trust in _TRUSTS[call]
        for lengths in _shapes(call, max_rows, scratch.held)
    ]
    begin = time.perf_counter()
    for done, (call, trust, lengths) in enumerate(plans):
        decoding = max(lengths) == 1
        kind = f"decode x {len(lengths)}" if decoding else f"prefill {lengths[:3]} x {len(lengths)}"
        name = f"{call}, {trust.value}: {kind}"
        progress(name, done, len(plans))
        with compilations() as seen:
            step = scratch.step(lengths, call, trust, graph=server.graph and decoding)
            choice, shared, runner = serve(step, server.backend)
            planned = DashStep(step, choice, shared, runner)
            rows = scratch.inputs(step.num_rows)
            planned.run(*rows, scratch.cache, scratch.head_cls, 0)
            if call == ESTABLISHED and not decoding:
                shared.store(*rows, scratch.cache, None)
            settle(server.device)
        compiled += [Compiled(kernel=k, step=name, signature=text) for k, text in seen]
        backends["decode" if decoding else "prefill"] = choice.required().name
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
            scratch.table[None].to(on),
            none,
            none,
            None,
            config=server.config,
            cache=scratch.cache,
        )
        shared_layer(step).rebuild(scratch.cache, scratch.head_cls)
        settle(on)
    return [Compiled(kernel=k, step="rebuild_summaries", signature=text) for k, text in seen]
