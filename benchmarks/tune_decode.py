"""Decode on this GPU: is it right, how long does every stage and every candidate launch row take?

    python benchmarks/tune_decode.py                        everything, compiled by 12 processes
    first; some minutes
    python benchmarks/tune_decode.py check layer --jobs 4   only these parts: check select pages
    attend layer host

Times are medians of CUDA graphs with L2 emptied before every call (the emptying alone is
subtracted), in us.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dash_portable import cache as layout
from dash_portable.backends.triton import Runner
from dash_portable.cache import CacheShape
from dash_portable.config import DashConfig
from dash_portable.eager import EagerLayer
from dash_portable.kernels import launch
from dash_portable.step import Step, row_positions
from dash_portable.triton_layer import TritonLayer

D, BS, P = 128, 32, 64
PAGE = 274  # a marker and 273 image tokens
CONFIG = DashConfig(index_dim=D, scale=(60.0,), floor=(1e-4,))
DEVICE = torch.device("cuda")
SELECTS = [
    launch.SelectRow(tile=tile, programs=programs, warps=warps, ticket=ticket, dependent=True)
    for tile, warps, programs, ticket in [
        *itertools.product((64,), (4,), (512, 1024, 2048, 4096), (True,)),
        *itertools.product((32,), (2, 4), (1024, 4096), (True,)),
        *itertools.product((128,), (4, 8), (512, 1024, 2048), (True,)),
        *itertools.product((64,), (2, 8), (1024, 2048), (True,)),
        (64, 4, 1024, False),
    ]
]
CHECKED = [SELECTS[1], SELECTS[5], SELECTS[10], SELECTS[-1]]
ATTENDS = [
    launch.AttendRow(split=split, warps=warps, ticket=ticket)
    for split, warps, ticket in [
        *itertools.product((1, 2, 4, 8, 16), (1, 2), (True,)),
        (4, 1, False),
        (16, 1, False),
    ]
]
_flush: list[Tensor] = []


class Case:
    """N sequences of a context, each about to decode one token, in one layer's cache."""

    def __init__(
        self, rows: int, context: int, *, pages: bool, heads: int = 10, group: int = 1
    ) -> None:
        self.rows, self.context, self.paged = rows, context, pages
        random = torch.Generator(DEVICE).manual_seed(rows + context)
        blocks = rows * context // P
        shape = (blocks, heads + 1, P, 2 * D)
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(
            generator=random
        )
        self.table = torch.randperm(blocks, generator=random, device=DEVICE).int().view(rows, -1)
        aux = layout.auxiliary(self.cache)
        aux[..., D : D + 32] = 0
        aux[..., D + D // 2 :] *= 0.4
        position = context - 1 - torch.randint(0, 64, (rows,), generator=random, device=DEVICE)
        slots = self._slots(torch.arange(rows, device=DEVICE), position)
        self.num_pages = (context - 256) // PAGE if pages else 0
        self._states(aux, position, random)
        seq_lens = (position + 1).int()
        start = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
        self.step = Step(
            config=CONFIG,
            cache_shape=CacheShape.of(self.cache, CONFIG),
            heads=heads * group,
            dtype=torch.bfloat16,
            device=DEVICE,
            row_seq=start[:-1],
            row_pos=row_positions(slots, start[:-1], start, seq_lens),
            slots=slots,
            roles=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
            positions=None,
            query_start=start,
            seq_lens=seq_lens,
            block_table=self.table,
            max_query_len=1,
            max_seq_len=context,
        )
        like = [(rows, heads * group, D), (rows, heads, D), (rows, heads, D), (rows, D), (rows, D)]
        self.inputs = [torch.randn(of, generator=random, device=DEVICE).bfloat16() for of in like]
        self.head_cls = torch.randn(D, generator=random, device=DEVICE).bfloat16()

    def _slots(self, seq: Tensor, token: Tensor) -> Tensor:
        return self.table[seq, token // P].long() * P + token % P

    def _write(self, aux: Tensor, slots: Tensor, first: int, values: Tensor, width: int) -> None:
        at = D + first + torch.arange(values.shape[-1] * width, device=DEVICE)
        made = layout.to_bytes(values, width).flatten(-2).to(aux.dtype)
        aux[(slots // P)[..., None], (slots % P)[..., None], at] = made

    def _states(self, aux: Tensor, position: Tensor, random: torch.Generator) -> None:
        """The token before each row; of documents also counts, starts and page ranges."""
        rows, pages = self.rows, self.num_pages
        seq = torch.arange(rows, device=DEVICE)
        page = torch.randint(1, max(pages, 2), (rows,), generator=random, device=DEVICE)
        page = page if pages else torch.zeros_like(page)
        state = torch.stack([page * 0 + 300, page, page * 0 + pages, page - 1], 1)
        self._write(aux, self._slots(seq, position - 1), layout.STATE, state, 4)
        if not pages:
            return
        number = torch.arange(pages + 1, device=DEVICE)
        numbers = torch.stack(
            [torch.where(number > 0, PAGE, 0), (number - 1).clamp_min(0) * PAGE], 1
        )
        block = torch.arange(pages * PAGE // BS, device=DEVICE)
        ranges = torch.stack([block * BS // PAGE + 1, (block * BS + BS - 1) // PAGE + 1], 1)
        for r in range(rows):
            own = torch.full_like(number, r)
            self._write(aux, self._slots(own, number), layout.COUNT, numbers, 4)
            own = torch.full_like(block, r)
            self._write(aux, self._slots(own, block * BS), layout.LOW, ranges, 2)

    def layer(self, row: launch.SelectRow | None = None) -> TritonLayer:
        if row is not None:
            launch.SELECT = {"*": (row,)}
        return TritonLayer(self.step)

    def runner(self, row: launch.AttendRow | None = None) -> Runner:
        if row is not None:
            launch.ATTEND = {"*": (row,)}
        return Runner(self.step)


def median_us(call: Callable[[], object], calls: int) -> float:
    """A graph of some calls, median of its replays, per call."""
    call()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2] / calls * 1e3


def cold_us(call: Callable[[], object]) -> float:
    """With L2 emptied before each call by a read of 128 MB, whose own time is subtracted."""
    if not _flush:
        _flush.extend([torch.ones(32 << 20, device=DEVICE), torch.zeros((), device=DEVICE)])

    def empty() -> None:
        torch.sum(_flush[0], 0, out=_flush[1])

    def both() -> None:
        empty()
        call()

    return median_us(both, 8) - median_us(empty, 8)


def selected(case: Case, layer: TritonLayer) -> Callable[[], object]:
    _, index_query = layer.store(*case.inputs, case.cache, case.head_cls)
    return lambda: layer.select(index_query, case.cache, case.head_cls, 60.0, 1e-4)


def prepared(case: Case, layer: TritonLayer) -> Callable[[], object]:
    return lambda: layer.prepare(*case.inputs, case.cache, case.head_cls, 60.0, 1e-4)


def attended(case: Case, layer: TritonLayer, runner: Runner) -> Callable[[], object]:
    query, ids, bias = prepared(case, layer)()
    out = torch.empty_like(query)
    return lambda: runner.run(query, case.cache, ids, bias, out)


def whole(case: Case, layer: TritonLayer, runner: Runner) -> Callable[[], object]:
    out = torch.empty_like(case.inputs[0])

    def call() -> None:
        query, ids, bias = layer.prepare(*case.inputs, case.cache, case.head_cls, 60.0, 1e-4)
        runner.run(query, case.cache, ids, bias, out)

    return call


def wrong_rows(case: Case, found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> str:
    """Rows with other blocks than the eager layer, and the largest difference of a bias in the
    rest.
    """
    same = (found[0] == wanted[0]).all(1)
    bias = (found[1] - wanted[1])[same].abs().max() if bool(same.any()) else float("nan")
    return f"{int((~same).sum())} of {case.rows} rows differ, bias {float(bias):.1e}"


def check(lines: list[str]) -> None:
    """Against the eager layer on this GPU, all rows of all variants the same bits, alone as in the
    batch.
    """
    for pages, rows, group in ((False, 9, 1), (True, 9, 1), (True, 65, 4)):
        case = Case(rows, 8192, pages=pages, heads=2, group=group)
        twin = case.cache.clone()
        eager, layer = EagerLayer(case.step), case.layer()
        query, ids, bias = (x.clone() for x in prepared(case, layer)())
        wanted_query, _ = eager.store(*case.inputs, twin, case.head_cls)
        wanted = eager.select(layer.index_query, case.cache, case.head_cls, 60.0, 1e-4)
        off = (case.cache.float() - twin.float()).abs().max()
        text = wrong_rows(case, (ids, bias), wanted)
        lines.append(
            f"check pages={pages} rows={rows} G={group}: {text}, cache off by {float(off):.1e}, "
            f"query {float((query.float() - wanted_query.float()).abs().max()):.1e}"
        )
        exact = oracle(case, query, ids, bias)
        worst = 0.0
        for row in ATTENDS:
            out = torch.full_like(query, torch.nan)
            runner = case.runner(row)
            for _ in range(3):
                runner.run(query, case.cache, ids, bias, out)
            error = (out.double() - exact).norm() / exact.norm()
            worst = max(worst, float(error))
        lines.append(f"      attention, all {len(ATTENDS)} rows: relative error {worst:.1e}")
        bad = []
        for row in CHECKED:
            again = case.layer(row)
            for one in (selected(case, again), prepared(case, again)):
                one()
                found = one()[-2:]
                if not (torch.equal(found[0], ids) and torch.equal(found[1], bias)):
                    bad.append(str(row))
        alone = replace(
            case.step,
            **{
                k: getattr(case.step, k)[4:5] for k in ("slots", "roles", "seq_lens", "block_table")
            },
            row_seq=case.step.row_seq[:1],
            row_pos=case.step.row_pos[4:5],
            query_start=case.step.query_start[:2],
        )
        launch.SELECT = dict(TABLES[0])
        own = TritonLayer(alone)
        parts = own.prepare(*[x[4:5] for x in case.inputs], case.cache, case.head_cls, 60.0, 1e-4)
        same = torch.equal(parts[1][0], ids[4]) and torch.equal(parts[2][0], bias[4])
        lines.append(
            f"      selection: alone {'same bits' if same else 'OTHER BITS'}, "
            f"launch rows with other bits: {bad or 'none'}"
        )


def oracle(case: Case, query: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
    """Attention in float64 on the given selection, row by row."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=DEVICE)
    within = torch.arange(BS, device=DEVICE)
    for n in range(case.rows):
        p = int(case.step.row_pos[n])
        lo = max(p + 1 - CONFIG.local, 0)
        far = ids[n][:, None] * BS + within
        ok = (ids[n][:, None] >= 0) & (far < lo)
        near = torch.arange(lo, p + 1, device=DEVICE)
        token = torch.cat([far[ok], near])
        prior = torch.cat([bias[n][:, None].expand(-1, BS)[ok], torch.zeros_like(near)]).double()
        block = case.table[n, token // P].long()
        both = case.cache[block, :-1, token % P].double()  # [T, H, 2 D]
        grouped = query[n].double().unflatten(0, (case.step.kv_heads, case.step.group))
        logit = torch.einsum("hgd,thd->hgt", grouped, both[..., :D]) / D**0.5 + prior
        out[n] = torch.einsum("hgt,thd->hgd", logit.softmax(-1), both[..., D:]).flatten(0, 1)
    return out


def cases(context: int, pages: bool) -> Iterator[Case]:
    for rows in (1, 8, 64, 256):
        yield Case(rows, context, pages=pages, heads=2 if context > 1 << 16 else 10)
        torch.cuda.empty_cache()


def short(row: launch.SelectRow) -> str:
    merged = "" if row.ticket else " two launches"
    return f"tile {row.tile} programs {row.programs} warps {row.warps}{merged}"


def tune_select(lines: list[str], *, pages: bool) -> None:
    for case in cases(1 << 17, pages):
        times = {}
        for row in SELECTS:
            call = selected(case, case.layer(row))
            call()
            times[row] = cold_us(call)
        best = sorted(times, key=times.__getitem__)[:4]
        text = "; ".join(f"{times[row]:.1f} ({short(row)})" for row in best)
        lines.append(
            f"select 128K pages={pages} N={case.rows}: {text}; "
            f"two launches {times[SELECTS[-1]]:.1f}"
        )


def tune_attend(lines: list[str]) -> None:
    for case in cases(1 << 15, False):
        launch.SELECT = dict(TABLES[0])
        layer, times = case.layer(), {}
        for row in ATTENDS:
            call = attended(case, layer, case.runner(row))
            call()
            times[row] = cold_us(call)
        best = sorted(times, key=times.__getitem__)[:4]
        text = "; ".join(
            f"{times[r]:.1f} (split {r.split} warps {r.warps} ticket {r.ticket})" for r in best
        )
        lines.append(f"attend 32K N={case.rows}: {text}")


def tune_layer(lines: list[str]) -> None:
    """Store and select as one launch under every row, then the whole layer with the table's own
    rows.
    """
    for case in cases(1 << 15, False):
        times = {}
        for row in SELECTS:
            call = prepared(case, case.layer(row))
            call()
            times[row] = cold_us(call)
        best = sorted(times, key=times.__getitem__)[:3]
        text = "; ".join(f"{times[row]:.1f} ({short(row)})" for row in best)
        lines.append(f"store+select 32K N={case.rows}: {text}")
        launch.SELECT, launch.ATTEND = dict(TABLES[0]), dict(TABLES[1])
        layer, runner = case.layer(), case.runner()
        call = whole(case, layer, runner)
        call()
        store = lambda c=case, y=layer: y.store(*c.inputs, c.cache, c.head_cls)  # noqa: E731
        store()
        parts = {
            "layer": call,
            "store": store,
            "select": selected(case, layer),
            "store+select": prepared(case, layer),
            "attend": attended(case, layer, runner),
        }
        text = ", ".join(f"{name} {cold_us(part):.1f}" for name, part in parts.items())
        lines.append(
            f"LAYER 32K N={case.rows} (rows of launch.py): {text}, "
            f"layer warm {median_us(call, 20):.1f}"
        )


def host(lines: list[str]) -> None:
    """Time of the host alone for one layer, without a graph; the GPU's queue is kept short."""
    case = Case(1, 1 << 12, pages=False)
    launch.SELECT, launch.ATTEND = dict(TABLES[0]), dict(TABLES[1])
    call = whole(case, case.layer(), case.runner())
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    times.sort()
    lines.append(
        f"host time of one layer: median {times[100] * 1e6:.0f} us, best {times[0] * 1e6:.0f} us"
    )


TABLES = (dict(launch.SELECT), dict(launch.ATTEND))
PARTS: dict[str, Callable[[list[str]], None]] = {
    "check": check,
    "host": host,
    "layer": tune_layer,
    "attend": tune_attend,
    "select": lambda lines: tune_select(lines, pages=False),
    "pages": lambda lines: tune_select(lines, pages=True),
}


def warm(index: int, of: int) -> None:
    """Compile this process's share of the variants, on four rows of a short context."""
    work: list[Callable[[], object]] = []
    for row, rows in itertools.product(SELECTS, (1, 8, 64, 256)):
        work.append(lambda r=row, n=rows: _compile(n, 1 << 15, 10, 1, r, selected_too=False))
        work.append(lambda r=row, n=rows: _compile(n, 1 << 17, 2, 1, r, selected_too=True))
    for row, (rows, group) in itertools.product(CHECKED, ((9, 1), (65, 4))):
        work.append(lambda r=row, n=rows, g=group: _compile(n, 8192, 2, g, r, selected_too=True))
        work.append(lambda r=row, n=rows, g=group: _compile(n, 8192, 2, g, r, selected_too=False))
    for job in work[index::of]:
        job()


def _compile(
    rows: int, context: int, heads: int, group: int, row: launch.SelectRow, *, selected_too: bool
) -> None:
    """One row of SELECT as it is specialised for a case: selection alone, or with the store."""
    small = Case(4, 4096, pages=False, heads=heads, group=group)
    split = launch.split_of(row, rows, context // BS)
    small.step = replace(small.step, max_seq_len=context)
    layer = small.layer(row._replace(programs=4 * split))
    (selected if selected_too else prepared)(small, layer)()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        warm(*map(int, args.warm.split("/")))
        return
    begin = time.perf_counter()
    children = [
        subprocess.Popen([sys.executable, __file__, "--warm", f"{i}/{args.jobs}"])
        for i in range(args.jobs)
    ]
    failed = [child.args for child in children if child.wait()]
    print(
        f"compiled in {time.perf_counter() - begin:.0f} s by {args.jobs} processes, "
        f"{len(failed)} failed"
    )
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    ]
    for name in args.parts or PARTS:
        begin = time.perf_counter()
        PARTS[name](lines)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", *lines[1:], sep="\n", flush=True)
        del lines[1:]


if __name__ == "__main__":
    main()
