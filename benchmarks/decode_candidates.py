"""Launch rows of decode that may beat the shipped ones: checked against them, timed beside them.

    python benchmarks/decode_candidates.py            compiled by 15 processes first
    python benchmarks/decode_candidates.py layer --jobs 4     only these parts: layer select sweep

`sweep` times whole layers of 32 to 256 rows, where programs by matrix products fit the card at once
or do not.

Medians of three, in us: with L2 emptied before every call (the emptying subtracted), and warm.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from statistics import median

import torch
import triton
import tune_decode as tune
from torch import Tensor

from dash_portable.kernels import launch

Split = tuple[int, int, int]  # tile, splits of a row, warps
AHEAD = {"ahead": True}
# Rows, then candidates of selection alone at 128K.
ALONE: list[tuple[int, Split, dict[str, object]]] = [
    (1, (64, 64, 8), AHEAD),
    (1, (64, 64, 8), {}),
    (8, (64, 32, 8), AHEAD),
    (8, (64, 64, 8), {}),
    (8, (128, 8, 8), {}),
    (64, (64, 8, 4), {}),
    (64, (64, 4, 4), {}),
    (64, (128, 4, 8), {}),
    (256, (64, 2, 4), {}),
    (256, (64, 4, 4), {}),
    (256, (128, 1, 8), {}),
]
# The same with the store, at 32K.
JOINT: list[tuple[int, Split, dict[str, object]]] = [
    (1, (64, 16, 8), AHEAD),
    (1, (64, 16, 4), {}),
    (8, (64, 16, 8), AHEAD),
    (8, (64, 16, 4), {}),
    (64, (64, 8, 4), {}),
    (64, (64, 4, 4), {}),
    (64, (128, 4, 8), {}),
    (256, (64, 2, 4), {}),
    (256, (64, 4, 4), {}),
]


def plain(split: int, warps: int, *, ticket: bool = True) -> launch.AttendRow:
    return launch.AttendRow(split=split, warps=warps, ticket=ticket)


def dot(split: int, warps: int, stages: int) -> launch.AttendRow:
    return launch.AttendRow(split=split, warps=warps, stages=stages, ticket=True, dot=True)


ATTEND = {
    1: [plain(16, 2), dot(16, 2, 2)],
    8: [plain(16, 2), plain(8, 1), dot(8, 4, 3), dot(8, 2, 2), dot(8, 2, 3), dot(8, 4, 4)],
    64: [plain(2, 1), dot(1, 4, 3), dot(1, 2, 3), dot(1, 2, 4)],
    256: [plain(4, 1, ticket=False), plain(4, 1), dot(1, 4, 3), dot(1, 2, 3)],
}
SWEPT = (32, 64, 96, 128, 192, 256)
SWEEP = [dot(1, 4, 3), plain(2, 1, ticket=False), plain(4, 1), plain(4, 1, ticket=False)]
TABLES = (dict(launch.SELECT), dict(launch.ATTEND))
TABLE: list[str] = []


def row_of(split: Split, options: dict[str, object], rows: int) -> launch.SelectRow:
    return tune.select_rows([(split, options)], rows)[0]


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Median of three, L2 emptied and warm."""
    call()
    return median(tune.cold_us(call) for _ in range(3)), median(
        tune.median_us(call, 20) for _ in range(3)
    )


def shipped() -> None:
    launch.SELECT, launch.ATTEND = dict(TABLES[0]), dict(TABLES[1])


def report(kind: str, case: tune.Case, found: dict[str, tuple[float, float, str]]) -> list[str]:
    best = sorted(found, key=lambda name: found[name][0])
    pages = " pages" if case.paged else ""
    head = f"{kind} {case.context >> 10}K{pages} N={case.rows}"
    for name in best:
        cold, warm, note = found[name]
        TABLE.append(f"{head:24} {cold:6.1f} cold {warm:6.1f} warm  {name}  {note}")
    print(*TABLE[-len(best) :], sep="\n", flush=True)
    return best


def chosen(case: tune.Case, parts: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> str:
    other = int((parts[0] != wanted[0]).any(1).sum())
    gap = float((parts[1] - wanted[1]).abs().max())
    return "same bits" if not other and not gap else f"{other} ROWS DIFFER, bias {gap:.1e}"


def select(case: tune.Case) -> None:
    shipped()
    base = tune.selected(case, case.layer())
    base()
    wanted = tuple(x.clone() for x in base())
    found = {"SHIPPED": (*timed(base), "")}
    for rows, split, options in ALONE:
        if case.rows == rows:
            row = row_of(split, options, case.rows)
            call = tune.selected(case, case.layer(row))
            call()
            note = chosen(case, call(), wanted)
            found[tune.short(row, case.rows)] = (*timed(call), note)
    report("select", case, found)


def attend(case: tune.Case) -> list[launch.AttendRow]:
    shipped()
    layer = case.layer()
    base = case.runner()
    query, ids, bias = (x.clone() for x in tune.prepared(case, layer)())
    exact = tune.oracle(case, query, ids, bias) if case.rows <= 64 else None
    wanted = torch.empty_like(query)
    base.run(query, case.cache, ids, bias, wanted)
    found, kept = (
        {"SHIPPED": (*timed(lambda: base.run(query, case.cache, ids, bias, wanted)), "")},
        {},
    )
    for row in ATTEND[case.rows]:
        runner, out = case.runner(row), torch.full_like(query, torch.nan)
        call = lambda r=runner, o=out: r.run(query, case.cache, ids, bias, o)  # noqa: E731
        call()
        call()
        true = wanted.double() if exact is None else exact
        error = float((out.double() - true).norm() / true.norm())
        kept[tune.short(row)] = row
        found[tune.short(row)] = (*timed(call), f"error {error:.1e}")
    return [kept[name] for name in report("attend", case, found) if name in kept]


def joint(case: tune.Case) -> list[launch.SelectRow]:
    shipped()
    base = tune.prepared(case, case.layer())
    base()
    wanted = tuple(x.clone() for x in base()[1:])
    found, kept = {"SHIPPED": (*timed(base), "")}, {}
    for rows, split, options in JOINT:
        if case.rows == rows:
            row = row_of(split, options, case.rows)
            call = tune.prepared(case, case.layer(row))
            call()
            note = chosen(case, call()[1:], wanted)
            kept[tune.short(row, case.rows)] = row
            found[tune.short(row, case.rows)] = (*timed(call), note)
    return [kept[name] for name in report("store+select", case, found) if name in kept]


def layers() -> None:
    """At 32K: both launches, then the best two of each together, with and without PDL."""
    for case in tune.cases(1 << 15, False):
        seconds, firsts = attend(case), joint(case)
        shipped()
        own = launch.select_row("sm90", case.rows, case.context // tune.BS)
        runner = case.runner(dependent=own.dependent)
        found = {"SHIPPED": (*timed(tune.whole(case, case.layer(), runner)), "")}
        split = launch.split_of(own, case.rows, case.context // tune.BS)
        own = own._replace(rows=None, blocks=None, programs=split * case.rows)
        for first, second in itertools.product([own, *firsts[:2]], seconds[:2]):
            for dependent in (True, False):
                runner = case.runner(second, dependent=dependent)
                call = tune.whole(case, case.layer(first._replace(dependent=True)), runner)
                name = f"{tune.short(first, case.rows)} + {tune.short(second)}"
                found[name + (" PDL" if dependent else " plain")] = (*timed(call), "")
        report("layer", case, found)


def selects() -> None:
    for case in tune.cases(1 << 17, False):
        select(case)


def sweep() -> None:
    for rows in SWEPT:
        case, found = tune.Case(rows, 1 << 15, pages=False), {}
        shipped()
        own = shipped_row(rows, 1024, rows)._replace(dependent=True)
        for dependent, row in itertools.product((True, False), SWEEP):
            runner = case.runner(row, dependent=dependent)
            call = tune.whole(case, case.layer(own), runner)
            call()
            found[tune.short(row) + (" PDL" if dependent else " plain")] = (*timed(call), "")
        report("layer", case, found)
        del case
        torch.cuda.empty_cache()


PARTS = {"layer": layers, "select": selects, "sweep": sweep}


def shipped_row(rows: int, blocks: int, of: int = 4) -> launch.SelectRow:
    """The table's row as one for `of` rows with as many splits."""
    row = launch.select_row("sm90", rows, blocks)
    programs = of * launch.split_of(row, rows, blocks)
    return row._replace(rows=None, blocks=None, programs=programs)


def work() -> Iterator[tuple[object, ...]]:
    joint = [shipped_row(rows, 1024) for rows in (1, 8, *SWEPT)]
    joint += [row_of(split, options, 4) for _, split, options in JOINT]
    for row in joint:
        yield "joint", row._replace(dependent=True), 1 << 15, 10, 1
    alone = [shipped_row(rows, 4096) for rows in (1, 8, 64, 256)]
    for row in alone + [row_of(split, options, 4) for _, split, options in ALONE]:
        yield "alone", row, 1 << 17, 2, 1
    for row in itertools.chain(*ATTEND.values(), SWEEP):
        for dependent in (True, False):
            yield "attend", row._replace(programs=None), dependent


def compiled(kind: str, row: object, *rest: object) -> None:
    if kind != "attend":
        tune._compile(kind, row, *rest)
        return
    small = tune.Case(4, 4096, pages=False)
    ids = torch.full((4, tune.CONFIG.topk), -1, dtype=torch.int32, device=tune.DEVICE)
    runner, query = small.runner(row, dependent=rest[0]), small.inputs[0]
    runner.run(query, small.cache, ids, ids.float(), torch.empty_like(query))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        index, of = map(int, args.warm.split("/"))
        for job in list(dict.fromkeys(work()))[index::of]:
            try:
                compiled(*job)
            except Exception:  # the others are worth having
                traceback.print_exc()
        return
    children = [
        subprocess.Popen([sys.executable, __file__, "--warm", f"{i}/{args.jobs}"])
        for i in range(args.jobs)
    ]
    failed = [child.args for child in children if child.wait()]
    print(torch.cuda.get_device_name(), triton.__version__, f"{len(failed)} failed", flush=True)
    for name in args.parts or PARTS:
        try:
            PARTS[name]()
        except Exception:  # the other parts are worth having
            traceback.print_exc()
    print("", *TABLE, sep="\n", flush=True)


if __name__ == "__main__":
    main()
