"""Decode on this GPU: is it right, how long does every stage and every candidate launch row take?

    python benchmarks/tune_decode.py                        everything, compiled by 15 processes
    first; some minutes
    python benchmarks/tune_decode.py check layer --jobs 4   only these parts: check host layer
    select pages

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
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from dash_portable.plan import DashStep
from dash_portable.step import Step, row_positions
from dash_portable.triton_layer import TritonLayer

D, BS, P = 128, 32, 64
PAGE = 274  # a marker and 273 image tokens
CONFIG = DashConfig(index_dim=D, scale=(60.0,), floor=(1e-4,))
DEVICE = torch.device("cuda", 0)
# Tile, splits of a row and warps of one program: at 32K with the store, at 128K alone.
AHEAD: dict[str, Any] = {"ahead": True}
JOINT: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((64, 16, 8), {}), ((64, 16, 8), AHEAD), ((128, 8, 8), {}), ((64, 8, 4), {}),
    ((64, 8, 4), AHEAD), ((64, 16, 4), {}), ((128, 8, 4), {}), ((32, 16, 2), {}), ((64, 4, 4), {}),
    ((128, 4, 8), {}), ((256, 4, 8), {}),
]  # fmt: skip
ALONE: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((64, 64, 8), {}), ((64, 64, 8), AHEAD), ((32, 64, 4), {}), ((64, 8, 4), {}),
    ((64, 16, 4), {}), ((128, 8, 8), {}), ((64, 2, 4), {}), ((64, 2, 4), AHEAD), ((64, 4, 4), {}),
    ((128, 4, 8), {}), ((32, 4, 4), {}), ((64, 8, 4), {"ticket": False}),
]  # fmt: skip
CHECKED = [((32, 8, 2), AHEAD), ((64, 4, 4), {"ticket": False})]


def select_rows(of: list[Any], rows: int) -> list[launch.SelectRow]:
    """Rows of the table that give these numbers of splits for a number of rows."""
    usual = {"ticket": True, "dependent": True}
    return [
        launch.SelectRow(tile=tile, programs=split * rows, warps=warps, **(usual | other))
        for (tile, split, warps), other in of
    ]


ATTENDS = [
    launch.AttendRow(split=split, warps=warps, ticket=ticket)
    for split, warps, ticket in [
        *itertools.product((1, 2, 4, 8, 16), (1,), (True,)),
        (8, 2, True),
        (16, 2, True),
        (4, 1, False),
    ]
] + [
    launch.AttendRow(split=split, warps=warps, stages=stages, ticket=True, dot=True)
    for split, warps, stages in [
        (16, 2, 2), (16, 4, 2), (8, 4, 3), (8, 2, 2), (4, 4, 3), (4, 2, 3), (2, 4, 3), (2, 2, 3),
        (1, 4, 3),
    ]
]  # fmt: skip
FEW = [ATTENDS[2], ATTENDS[7], ATTENDS[10]]
_flush: list[Tensor] = []


class Lines(list[str]):
    """What was found, printed as soon as it is: a limit of time may end the search."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def append(self, line: str) -> None:
        super().append(line)
        print(f"{time.perf_counter() - self._begin:5.0f} s  {line}", flush=True)


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

    def runner(self, row: launch.AttendRow | None = None, *, dependent: bool = True) -> Runner:
        if row is not None:
            launch.ATTEND = {"*": (row,)}
        kept = launch.SELECT
        launch.SELECT = {"*": (launch.SelectRow(dependent=dependent),)}
        made = Runner(self.step)
        launch.SELECT = kept
        return made


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


def begun(call: Callable[[], object]) -> Callable[[], object]:
    """Its first call made: compiled or read from the disk, and loaded."""
    begin = time.perf_counter()
    call()
    LOADED[0] += time.perf_counter() - begin
    return call


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
    for pages, rows, group in ((True, 9, 1), (False, 17, 4)):
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
        for row in FEW:
            out = torch.full_like(query, torch.nan)
            runner = case.runner(row)
            for _ in range(3):
                runner.run(query, case.cache, ids, bias, out)
            error = (out.double() - exact).norm() / exact.norm()
            worst = max(worst, float(error))
        lines.append(f"      attention, {len(FEW)} rows: relative error {worst:.1e}")
        bad = []
        for row in select_rows(CHECKED, rows):
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


def short(row: launch.SelectRow | launch.AttendRow, rows: int = 1) -> str:
    end = "" if row.ticket else " 2 launches"
    if isinstance(row, launch.AttendRow):
        dot = f" dot stages {row.stages}" if row.dot else ""
        return f"split {row.split} warps {row.warps}{dot}{end}"
    more = " ahead" if row.ahead else ""
    return f"tile {row.tile} split {row.programs // rows} warps {row.warps}{more}{end}"


def ranked(times: dict[Any, float], rows: int, many: int) -> str:
    best = sorted(times, key=times.__getitem__)[:many]
    return "; ".join(f"{times[row]:.1f} ({short(row, rows)})" for row in best)


def tune_select(lines: list[str], *, pages: bool) -> None:
    for case in cases(1 << 17, pages):
        times = {}
        for row in select_rows(ALONE, case.rows):
            call = begun(selected(case, case.layer(row)))
            times[row] = cold_us(call)
        launch.SELECT = dict(TABLES[0])
        shipped = selected(case, case.layer())
        shipped()
        last = next(time for row, time in times.items() if not row.ticket)
        TABLE.append(
            f"select 128K pages={pages!s:5} N={case.rows:<3} shipped {cold_us(shipped):.1f}, "
            f"best {ranked(times, case.rows, 3)}"
        )
        lines.append(
            f"select 128K pages={pages} N={case.rows}: {ranked(times, case.rows, 8)}; "
            f"two launches {last:.1f}"
        )


def tune_layer(lines: list[str]) -> None:
    """At 32K: parts, the whole layer as shipped, every variant of the two launches, and the best
    two of each together, with and without programmatic dependent launch.
    """
    for case in cases(1 << 15, False):
        launch.SELECT, launch.ATTEND = dict(TABLES[0]), dict(TABLES[1])
        layer, runner = case.layer(), case.runner()
        call = begun(whole(case, layer, runner))
        store = lambda c=case, y=layer: y.store(*c.inputs, c.cache, c.head_cls)  # noqa: E731
        store()
        parts = {
            "store": store,
            "select": selected(case, layer),
            "store+select": prepared(case, layer),
            "attend": attended(case, layer, runner),
        }
        text = ", ".join(f"{name} {cold_us(part):.1f}" for name, part in parts.items())
        shipped = f"{cold_us(call):.1f}"
        plain = whole(case, layer, case.runner(dependent=False))
        plain()
        text = f"layer {shipped}, without PDL {cold_us(plain):.1f}, {text}"
        text += f", warm {median_us(call, 20):.1f}"
        TABLE.append(f"shipped 32K N={case.rows:<3} {text}")
        lines.append(TABLE[-1])
        joint = {}
        for row in select_rows(JOINT, case.rows):
            part = begun(prepared(case, case.layer(row)))
            joint[row] = cold_us(part)
        lines.append(f"store+select 32K N={case.rows}: {ranked(joint, case.rows, 26)}")
        TABLE.append(f"store+select 32K N={case.rows:<3} {ranked(joint, case.rows, 3)}")
        alone = {}
        launch.SELECT = dict(TABLES[0])
        layer = case.layer()
        for row in ATTENDS:
            part = begun(attended(case, layer, case.runner(row)))
            alone[row] = cold_us(part)
        lines.append(f"attend 32K N={case.rows}: {ranked(alone, 1, 12)}")
        TABLE.append(f"attend 32K N={case.rows:<3} {ranked(alone, 1, 3)}")
        pairs = [
            (first, second)
            for first in sorted(joint, key=joint.__getitem__)[:2]
            for second in sorted(alone, key=alone.__getitem__)[:2]
        ]
        both = {}
        for first, second in pairs:
            for dependent in (True, False) if first == pairs[0][0] else (True,):
                runner = case.runner(second, dependent=dependent)
                call = begun(whole(case, case.layer(first), runner))
                name = f"{short(first, case.rows)} + {short(second)}"
                both[name + (" PDL" if dependent else " plain")] = cold_us(call)
        best = sorted(both, key=both.__getitem__)
        lines.append(f"layer 32K N={case.rows}: " + "; ".join(f"{both[n]:.1f} ({n})" for n in best))
        TABLE.append(
            f"layer 32K N={case.rows:<3} " + "; ".join(f"{both[n]:.1f} ({n})" for n in best[:3])
        )


def host(lines: list[str]) -> None:
    """Time of the host alone for one layer, without a graph; the GPU's queue is kept short."""
    case = Case(1, 1 << 12, pages=False)
    launch.SELECT, launch.ATTEND = dict(TABLES[0]), dict(TABLES[1])
    layer, runner = case.layer(), case.runner()
    step = DashStep.of(case.step, None)
    out = torch.empty_like(case.inputs[0])
    parts = {
        "step.run": lambda: step.run(*case.inputs, case.cache, case.head_cls, 0, out),
        "prepare + attend": whole(case, layer, runner),
        "prepare": prepared(case, layer),
        "attend": attended(case, layer, runner),
    }
    text = []
    for name, call in parts.items():
        call()
        times = []
        for _ in range(300):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        times.sort()
        text.append(f"{name} {times[150] * 1e6:.0f} (best {times[0] * 1e6:.0f})")
    TABLE.append("host us of one layer: " + ", ".join(text))
    lines.append(TABLE[-1])


TABLE: list[str] = []
LOADED = [0.0]
TABLES = (dict(launch.SELECT), dict(launch.ATTEND))
PARTS: dict[str, Callable[[list[str]], None]] = {
    "check": check,
    "layer": tune_layer,
    "select": lambda lines: tune_select(lines, pages=False),
    "pages": lambda lines: tune_select(lines, pages=True),
    "host": host,
}


def warm(index: int, of: int) -> None:
    """Compile this process's share of the variants, on four rows of a short context."""
    four = 4
    work: list[tuple[Any, ...]] = [
        ("joint", row, 1 << 15, 10, 1) for row in select_rows(JOINT, four)
    ]
    work += [("alone", row, 1 << 17, 2, 1) for row in select_rows(ALONE, four)]
    for group in (1, 4):
        work += [("joint", row, 1 << 13, 2, group) for row in select_rows(CHECKED, four)]
        work += [("alone", row, 1 << 13, 2, group) for row in select_rows(CHECKED, four)]
        work += [("attend", row, 1 << 13, 2, group) for row in FEW]
    work += [("attend", row, 1 << 15, 10, 1) for row in ATTENDS]
    for rows in (1, 8, 64, 256):
        row = launch.select_row("sm90", rows, 1024)
        row = row._replace(rows=None, blocks=None, programs=four * launch.split_of(row, rows, 1024))
        work += [(kind, row, 1 << 15, 10, 1) for kind in ("joint", "alone")]
        row = launch.select_row("sm90", rows, 4096)
        row = row._replace(rows=None, blocks=None, programs=four * launch.split_of(row, rows, 4096))
        work.append(("alone", row, 1 << 17, 2, 1))
    for job in list(dict.fromkeys(work))[index::of]:
        _compile(*job)


def _compile(kind: str, row: Any, context: int, heads: int, group: int) -> None:
    """One row as it is specialised for a context: selection alone, with the store, or attention."""
    small = Case(4, 4096, pages=False, heads=heads, group=group)
    if kind == "attend":
        ids = torch.full((4, CONFIG.topk), -1, dtype=torch.int32, device=DEVICE)
        runner, query = small.runner(row), small.inputs[0]
        runner.run(query, small.cache, ids, ids.float(), torch.empty_like(query))
        return
    small.step = replace(small.step, max_seq_len=context)
    (prepared if kind == "joint" else selected)(small, small.layer(row))()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        warm(*map(int, args.warm.split("/")))
        return
    lines = Lines()
    children = [
        subprocess.Popen([sys.executable, __file__, "--warm", f"{i}/{args.jobs}"])
        for i in range(args.jobs)
    ]
    failed = [child.args for child in children if child.wait()]
    lines.append(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"compiled by {args.jobs} processes, {len(failed)} failed"
    )
    for name in args.parts or PARTS:
        LOADED[0] = 0.0
        try:
            PARTS[name](lines)
        except Exception:  # the other parts are worth having
            traceback.print_exc()
        lines.append(f"{name} done, {LOADED[0]:.0f} s of it first calls")
    print("", lines[0], *TABLE, sep="\n", flush=True)


if __name__ == "__main__":
    main()
