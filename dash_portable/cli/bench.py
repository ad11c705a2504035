"""`bench`: every way to attend that is usable here, side by side, beside dense attention."""

from __future__ import annotations

import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dash_portable.cli.explain import dtype_named
from dash_portable.errors import unknown_word

if TYPE_CHECKING:
    from rich.console import Console

    from dash_portable.platform.facts import Platform
    from dash_portable.trial.bench import Result, Workload
    from dash_portable.trial.clock import Limits


def bench(
    size: Annotated[
        str | None,
        typer.Option(help="small (a CPU's default), medium or large (a GPU's default)."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only workloads with this in their name, of any size. May be repeated."),
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this backend. May be repeated.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 10,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; as many as heads.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    block_size: Annotated[int, typer.Option(help="Tokens of a cache block.")] = 64,
    budget: Annotated[
        float, typer.Option(min=0, help="Seconds spent on each figure, about.")
    ] = 1.0,
    listing: Annotated[bool, typer.Option("--list", help="Only name the workloads.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the order found here for the dispatcher.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of bench.json and bench.png.")] = Path(
        "bench-out"
    ),
) -> None:
    """Measure each usable backend on whole layers (store, select, attend) beside dense attention.

    On a GPU times are of captured graphs, with warm and with emptied caches. Status 1 when a
    backend disagrees with the oracle.
    """
    import torch

    from dash_portable import env
    from dash_portable.cli.terminal import console, folder
    from dash_portable.dispatch import platform_for, policy_of, table
    from dash_portable.document import model_config
    from dash_portable.trial import bench as trial
    from dash_portable.trial.clock import limits as measured_limits

    screen, platform = console(), platform_for(None, table())
    device, kind = torch.device(platform.device_type), dtype_named(dtype)
    if size is not None and size not in trial.SIZES:
        raise unknown_word("size", size, trial.SIZES)
    chosen = trial.chosen(size or ("small" if device.type == "cpu" else "large"), only or ())
    if only and not chosen:
        raise unknown_word("only", " ".join(only), [one.name for one in trial.WORKLOADS])
    if listing:
        for one in trial.WORKLOADS:
            screen.print(f"{one.size:7s} {one.name}", markup=False)
        return
    for name in backend or ():
        policy_of("decode", env.read(), table(), backend=name)  # refuses a name that nobody has
    folder(out)
    names = backend or trial.usable(
        device,
        dtype=kind,
        head_dim=model_config().index_dim,
        group_size=heads // (kv_heads or heads),
        block_size=block_size,
    )
    limits = measured_limits(device, getattr(torch, kind))
    screen.print(f"on {platform}, {kind}, {heads} heads of 128", markup=False)
    screen.print(
        f"measured: {limits.bandwidth / 1e9:.4g} GB/s, {2 * limits.products / 1e12:.3g} TFLOP/s"
    )
    shape: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads or heads,
        "dtype": getattr(torch, kind),
        "device": device,
        "block_size": block_size,
    }
    results = _measured(chosen, names, shape, limits, budget)
    _show(screen, results)
    _write(out, platform, results, limits, {**shape, "device": str(device), "dtype": kind})
    screen.print(f"\nwritten  {out / 'bench.json'}", markup=False)
    if record:
        for (phase, name), figure in trial.record(results, platform).items():
            screen.print(f"recorded {name} {phase} {figure:.4g} us on {platform.arch}")
    if any(one.wrong for one in results):
        raise typer.Exit(1)


def _measured(
    workloads: list[Workload],
    names: list[str],
    shape: dict[str, Any],
    limits: Limits,
    budget: float,
) -> list[Result]:
    import torch

    from dash_portable.cli.terminal import progress
    from dash_portable.trial.bench import PEERS, Bench, Result, peers

    results, ways = list[Result](), (*names, *peers(shape["device"]))
    with progress() as bar:
        task = bar.add_task("prepare", total=len(workloads) * len(ways))

        def failed(workload: Workload, way: str, error: Exception) -> Result:
            note = "out of memory" if "memory" in str(error) else str(error).splitlines()[0]
            return Result(workload=workload.name, phase=workload.phase, way=way, note=note)

        for workload in workloads:
            bar.update(task, description=f"prepare {workload.name}")
            try:
                ready = Bench(workload, **shape)
            except torch.OutOfMemoryError as error:
                results.append(failed(workload, "all", error))
                bar.update(task, advance=len(ways))
                continue
            for name in ways:
                bar.update(task, description=f"{workload.name}: {name}")
                try:
                    one = (
                        ready.dense(name, budget)
                        if name in PEERS
                        else ready.way(name, limits, budget)[0]
                    )
                except torch.OutOfMemoryError as error:
                    one = failed(workload, name, error)
                results.append(one)
                bar.update(task, advance=1)
            del ready
    return results


def _show(screen: Console, results: list[Result]) -> None:
    from dash_portable.cli.terminal import table, time_of
    from dash_portable.trial.bench import PEERS

    dense: dict[str, float] = {}  # the fastest
    for one in results:
        if one.way in PEERS and one.times:
            best = dense.get(one.workload, one.times.figure)
            dense[one.workload] = min(best, one.times.figure)
    headings = ("workload", "way", "warm", "cold", "floor", "store", "select", "attend", "dense /")
    made = table(*headings, "check", numbers=range(2, 9))
    previous = ""
    for one in results:
        name, previous = (one.workload if one.workload != previous else ""), one.workload
        if one.times is None:
            made.add_row(name, one.way, "-", "", "", "", "", "", "", one.note, style="dim")
            continue
        stages = one.stages or {}
        checked = "" if one.error is None else "WRONG" if one.wrong else f"ok {one.error:.1e}"
        ratio = dense.get(one.workload, 0.0) / one.times.figure if one.way not in PEERS else 0.0
        made.add_row(
            name,
            one.way,
            time_of(one.times.warm),
            "" if one.times.cold is None else time_of(one.times.cold),
            "" if one.floor is None else time_of(one.floor),
            *(time_of(stages[s]) if s in stages else "" for s in ("store", "select", "attend")),
            f"{ratio:.3g}x" if ratio else "",
            checked,
            style="bold red" if one.wrong else "cyan" if one.way in PEERS else None,
        )
    screen.print(made)


def _write(
    out: Path,
    platform: Platform,
    results: list[Result],
    limits: Limits,
    shape: dict[str, Any],
) -> None:
    import json

    data = {
        "date": date.today().isoformat(),
        "finished": time.strftime("%H:%M:%S"),
        "platform": platform.to_dict(),
        "shape": shape,
        "bandwidth": limits.bandwidth,
        "products": limits.products,
        "results": [one.to_dict() for one in results],
    }
    (out / "bench.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    try:
        from dash_portable.picture import bars
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "numpy"):
            raise
        return
    groups: dict[str, dict[str, float]] = {}
    for one in results:
        if one.times is not None:
            groups.setdefault(one.workload, {})[one.way] = one.times.figure * 1e3
    if groups:
        bars(out / "bench.png", f"one layer of DASH on {platform}", groups, "milliseconds")
