"""Ways to attend side by side, on real shapes and on the worst case, beside dense attention."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dash_portable.backends import probe, records
from dash_portable.backends.spec import Measured
from dash_portable.choice import Choice
from dash_portable.config import DashConfig
from dash_portable.dispatch import platform_for, survey, table
from dash_portable.document import MARKER, TEXT, Document, model_config, paged, plain, tiled
from dash_portable.errors import BackendError, UnsupportedError
from dash_portable.plan import DashStep
from dash_portable.platform.facts import Platform, Vendor
from dash_portable.request import PHASES, Request
from dash_portable.serve import serve
from dash_portable.step import Step
from dash_portable.trial.clock import Limits, Times, time_call
from dash_portable.trial.feed import Feed, watch
from dash_portable.trial.inputs import layer_inputs
from dash_portable.trial.reading import keys_read
from dash_portable.trial.verify import Oracle

SIZES = ("small", "medium", "large")
# Dense attention: as torch chooses, and by a library that is faster where it is there.
DENSE, CUDNN = "dense sdpa", "dense cudnn"
PEERS = (DENSE, CUDNN)
_LOOKED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One shape: a document, how many sequences hold it, and whether its rows select at random.

    size   of SIZES: the smallest run that has it
    """

    name: str
    phase: str
    document: Callable[[], Document]
    sequences: int = 1
    random: bool = False
    size: str = "small"


def _decode(rows: int, pages: int | None, tokens: int, size: str) -> Workload:
    what = f"{pages} pages" if pages else "no pages, random"
    return Workload(
        name=f"decode {tokens // 1024}K x {rows}, {what}",
        phase="decode",
        # The row that is measured is one of text, after the marker that opens its page.
        document=lambda: (
            replace(paged(pages, answer=0), answer=(MARKER, TEXT))
            if pages
            else plain(tokens, answer=1)
        ),
        sequences=rows,
        random=not pages,
        size=size,
    )


def _prefill(pages: int | None, tokens: int, size: str) -> Workload:
    what = f"{pages} pages" if pages else "no pages, random"
    return Workload(
        name=f"prefill {tokens // 1024}K, {what}",
        phase="prefill",
        document=lambda: paged(pages, answer=0) if pages else plain(tokens, answer=0),
        random=not pages,
        size=size,
    )


# 30, 120 and 478 pages are 8, 32 and 128 thousand tokens.
WORKLOADS = (
    _decode(1, 120, 32768, "small"),
    _decode(1, None, 32768, "small"),
    _decode(8, 120, 32768, "medium"),
    _decode(64, 120, 32768, "large"),
    _decode(64, None, 32768, "large"),
    _decode(256, 120, 32768, "large"),
    _prefill(8, 2048, "small"),
    _prefill(30, 8192, "small"),
    _prefill(None, 8192, "small"),
    _prefill(120, 32768, "medium"),
    _prefill(None, 32768, "medium"),
    _prefill(478, 131072, "large"),
    _prefill(None, 131072, "large"),
    Workload(
        name="prefill, one page of 16 tiles",
        phase="prefill",
        document=lambda: tiled(4, 4, answer=0),
    ),
    Workload(
        name="prefill, 16 pages of 16 tiles at once",
        phase="prefill",
        document=lambda: tiled(4, 4, answer=0),
        sequences=16,
        size="medium",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One way on one workload: its times, or why there are none.

    floor    seconds that the layer cannot be faster than, on this machine; None for dense attention
    stages   seconds of store, select and attend, each waited for
    error    against the oracle, and what is allowed; None where not compared
    """

    workload: str
    phase: str
    way: str
    times: Times | None = None
    floor: float | None = None
    stages: dict[str, float] | None = None
    error: float | None = None
    allowed: float | None = None
    note: str = ""

    @property
    def wrong(self) -> bool:
        return self.error is not None and not self.error <= (self.allowed or 0.0)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Bench:
    """One workload made ready: the caches are filled, the rows to measure are at hand."""

    def __init__(
        self,
        workload: Workload,
        *,
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        config: DashConfig | None = None,
    ) -> None:
        self.workload = workload
        self.config = config or model_config()
        document = workload.document()
        self.feed = Feed(
            document=document,
            config=self.config,
            heads=heads,
            kv_heads=kv_heads,
            dtype=dtype,
            device=device,
            block_size=block_size,
            copies=workload.sequences,
        )
        self.oracle = Oracle(self.feed)
        self.inputs = layer_inputs(
            document,
            self.config,
            heads=heads,
            kv_heads=kv_heads,
            dtype=dtype,
            device=device,
            seed=0,
            alike=not workload.random,
        )
        prompt = self.feed.prompt_len
        self.span = (0, prompt)
        if workload.phase == "decode":
            last = len(document) - 1
            self.span = (last, last + 1)
            self._store(0, prompt)
            self.feed.replicate()
            for token in range(prompt, last):
                self._store(token, token + 1)
        rows = self.inputs.rows(*self.span)
        self.rows = tuple(x.repeat(workload.sequences, *[1] * (x.dim() - 1)) for x in rows)

    def _store(self, first: int, last: int) -> None:
        step = self.feed.describe(first, last)
        _, shared, _ = serve(step, None)
        sequences = step.num_seqs
        rows = [x.repeat(sequences, *[1] * (x.dim() - 1)) for x in self.inputs.rows(first, last)]
        q, k, v, iq, ik = rows
        shared.store(q, k, v, iq, ik, self.feed.caches[0], self.inputs.head_cls)

    def step(self, *, graph: bool) -> Step:
        return self.feed.describe(*self.span, sequences=self.workload.sequences, graph=graph)

    def way(self, name: str, limits: Limits, budget: float) -> tuple[Result, Choice | None]:
        """Measure the whole layer with one backend, and hold some rows to the oracle."""
        phase, title = self.workload.phase, self.workload.name
        device, cache = self.feed.device, self.feed.caches[0]
        try:
            graph = device.type != "cpu"
            try:
                step = self.step(graph=graph)
                choice, shared, runner = serve(step, name)
            except UnsupportedError:
                if not graph:
                    raise
                graph, step = False, self.step(graph=False)  # one that cannot be captured
                choice, shared, runner = serve(step, name)
        except (UnsupportedError, BackendError) as error:
            note = str(error).splitlines()[0]
            return Result(workload=title, phase=phase, way=name, note=note), None
        q, k, v, iq, ik = self.rows
        out = torch.empty_like(q)
        planned = DashStep(step, choice, shared, runner)
        times = time_call(
            lambda: planned.run(q, k, v, iq, ik, cache, self.inputs.head_cls, 0, out),
            device,
            graph=graph,
            budget=budget,
        )
        ran = watch(step, shared, runner, (q, k, v, iq, ik), cache, self.inputs.head_cls, 0)
        last = self.span[1] - self.span[0]
        looked = torch.linspace(0, last - 1, min(last, _LOOKED)).long()
        check = self.oracle.check(self.inputs, 0, step, ran, looked)[-1]
        result = Result(
            workload=title,
            phase=phase,
            way=name,
            times=times,
            floor=self._floor(step, ran.ids, limits),
            stages=ran.seconds,
            error=check.error,
            allowed=check.allowed,
        )
        return result, choice

    def _floor(self, step: Step, ids: Tensor, limits: Limits) -> float:
        """From what must be read and multiplied at least.

        In prefill every key of a sequence moves once, in decode those that its row reads and the
        summaries of the blocks it may choose from; inputs and outputs move once.
        """
        feed, config = self.feed, self.config
        size, width = feed.dtype.itemsize, 2 * config.index_dim
        position = step.row_pos.long()
        read = keys_read(ids, position, config)
        decoding = self.workload.phase == "decode"
        keys = int(read.sum()) if decoding else step.num_rows
        scored = self.oracle.candidates(position[:1].cpu()) * step.num_rows if decoding else 0
        moved = keys * feed.kv_heads * width + scored * config.index_dim
        moved += 2 * sum(x.numel() for x in self.rows)
        products = int(read.sum()) * feed.heads * width
        return limits.floor(moved * size, products)

    def dense(self, name: str, budget: float) -> Result:
        """Causal attention over everything by torch, what a user without DASH pays."""
        first, last = self.span
        q, k, v, _, _ = self.rows
        count = self.workload.sequences
        query = q.view(count, last - first, *q.shape[1:]).transpose(1, 2).contiguous()
        keys, values = (
            x[:last].expand(count, *x[:last].shape).transpose(1, 2).contiguous()
            for x in (self.inputs.k, self.inputs.v)
        )
        del k, v
        causal, shared = first == 0, self.feed.heads != self.feed.kv_heads

        def attend() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if name == CUDNN else nullcontext():
                return scaled_dot_product_attention(
                    query, keys, values, is_causal=causal, enable_gqa=shared
                )

        device, title, phase = self.feed.device, self.workload.name, self.workload.phase
        try:
            times = time_call(attend, device, graph=device.type != "cpu", budget=budget)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a library's word for "not this shape"
            return Result(workload=title, phase=phase, way=name, note=str(error).splitlines()[0])
        return Result(workload=title, phase=phase, way=name, times=times)


def peers(device: torch.device) -> tuple[str, ...]:
    """The kinds of dense attention to measure on a device."""
    return PEERS if platform_for(device, table()).vendor is Vendor.NVIDIA else (DENSE,)


def chosen(size: str, only: Iterable[str] = ()) -> list[Workload]:
    """The workloads of a size and of the smaller ones, or those whose names hold one of `only`."""
    words = [re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE) for word in only]
    if words:
        return [one for one in WORKLOADS if any(word.search(one.name) for word in words)]
    return [one for one in WORKLOADS if SIZES.index(one.size) <= SIZES.index(size)]


def usable(
    device: torch.device, *, dtype: str, head_dim: int, group_size: int, block_size: int
) -> list[str]:
    """Backends that can serve here, verified ones and those that need no verifying, best first.

    The last resort is left out where there is a better one: it is too slow to wait for.
    """
    request = Request(
        phase="prefill",
        dtype=dtype,
        cache_dtype=dtype,
        head_dim=head_dim,
        group_size=group_size,
        block=model_config().block,
        block_size=block_size,
    )
    names = dict[str, None]()
    for phase in PHASES:
        one = replace(request, phase=phase)
        choice = survey(one, platform_for(device, table()), table())
        names |= dict.fromkeys(row.backend.name for row in choice.decisions if row.ok)
    able = list(names)
    return able[:-1] if len(able) > 1 else able


def figures(results: Iterable[Result]) -> dict[tuple[str, str], float]:
    """(phase, backend) -> geometric mean of its figures in microseconds.

    Only of backends that were measured, and right, on all workloads of the phase that anybody was.
    """
    times: dict[tuple[str, str], dict[str, float]] = {}
    for one in results:
        if one.way not in PEERS and one.times is not None and not one.wrong:
            found = times.setdefault((one.phase, one.way), {})
            found[one.workload] = one.times.figure * 1e6
    wanted = {
        phase: set().union(*(found for (other, _), found in times.items() if other == phase))
        for phase, _ in times
    }
    return {
        key: math.exp(sum(map(math.log, found.values())) / len(found))
        for key, found in times.items()
        if set(found) == wanted[key[0]]
    }


def record(results: Iterable[Result], platform: Platform) -> dict[tuple[str, str], float]:
    """Keep this machine's own figures; from now on they decide who is asked first here."""
    found, rows = figures(results), {row.name: row for row in table()}
    for (phase, name), figure in found.items():
        versions = " ".join(probe.identity(rows[name], platform)[2:-2])
        row = Measured(
            arch=platform.arch,
            phase=phase,
            figure=round(figure, 1),
            versions=versions,
            date=date.today().isoformat(),
        )
        records.record_measured(name, row)
    return found
