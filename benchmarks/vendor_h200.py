"""The real libraries on one NVIDIA GPU: is the whole attend right, and what does each way cost?

    python benchmarks/vendor_h200.py --peer .peer                 FA2, FA3 from vLLM's bare modules
    PYTHONPATH=.site python benchmarks/vendor_h200.py flashinfer  only these libraries
    python benchmarks/vendor_h200.py --gather                     only the gather, row by row

Checks: decode and prefill, groups 1, 2 and 4, cache blocks of 16 to 128, head widths 64 and 128, a
strided cache; NaN wherever nothing may be read. Then graph replay after the inputs changed in
place. Times: medians of CUDA-graph replays in us, L2 warm, bf16, 10 heads of 128, cache blocks of
32, 12 blocks and the window a row; "call" is the library alone, without gather and merge. Prefill:
one prompt, every row chooses at random, as many passes as the way takes; the median of 5 runs.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import tune_gather, vllm_shim
from dash_portable.backends.flash_attn import Copy3
from dash_portable.cache import CacheShape
from dash_portable.config import DashConfig
from dash_portable.self_test import Case, make_case
from dash_portable.step import Step

# library -> rows of it: a name and the runner
LIBRARIES: dict[str, dict[str, str]] = {
    "fa3": {
        "vllm_flash_attn3_gather": "flash_attn:VllmGathered3",
        "vllm_flash_attn3_segments": "flash_attn:VllmSegmented3",
        "vllm_flash_attn3_in_place": "flash_attn:VllmPaged3",
    },
    "fa2": {
        "vllm_flash_attn2_gather": "flash_attn:VllmGathered2",
        "vllm_flash_attn2_segments": "flash_attn:VllmSegmented2",
        "vllm_flash_attn2_in_place": "flash_attn:VllmPaged2",
    },
    "fa4": {
        "flash_attn4_gather": "flash_attn:Gathered4",
        "flash_attn4_segments": "flash_attn:Segmented4",
    },
    "flashinfer": {
        "flashinfer_gather": "flashinfer:Gathered",
        "flashinfer_in_place": "flashinfer:Paged",
        "flashinfer_gather_192": "Narrow",  # keys of 192 and values of 128
    },
    "torch": {
        "torch_varlen_gather": "torch_varlen:Gathered",
        "torch_varlen_segments": "torch_varlen:Segmented",
    },
    "own": {"triton": "triton:Runner", "sdpa": "sdpa:Runner"},
}
SHAPES = ((1, 32768), (8, 32768), (64, 32768), (256, 8192))  # rows, tokens of each sequence
HEADS, WIDTH, PAGE = 10, 128, 32
PROMPT = 8192
DEVICE = torch.device("cuda")


def narrow() -> Any:
    """flashinfer's kernels for keys of 192 and values of 128, instead of 256 and 256."""
    flashinfer = importlib.import_module("dash_portable.backends.flashinfer")

    class Ragged(flashinfer.Ragged):
        widths = (192,)

        @classmethod
        def value_width_for(cls, width: int, head_dim: int) -> int:
            return 128

    class Narrow(flashinfer.Gathered):
        library = Ragged

    return Narrow


def runner_of(path: str) -> Any:
    if path == "Narrow":
        return narrow()
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"dash_portable.backends.{module}"), name)


def checks(name: str, few: bool) -> Iterator[dict[str, Any]]:
    """Cases that a row has to get right; some libraries compile long for each width and dtype."""
    if few or name.startswith(("flashinfer", "flash_attn4")):
        yield from (
            {"phase": phase, "group": group, "block_size": size, "head_dim": 128}
            for (phase, size), group in itertools.product((("decode", 32), ("prefill", 64)), (1, 4))
        )
        return
    dtypes = (torch.bfloat16, torch.float16)
    for number, (phase, group, size, width) in enumerate(
        itertools.product(("decode", "prefill"), (1, 2, 4), (16, 32, 64, 128), (64, 128))
    ):
        yield {
            "phase": phase,
            "group": group,
            "block_size": size,
            "head_dim": width,
            "dtype": dtypes[number % 2],
            "strided": number % 5 == 0,
            "seed": number,
        }


def attended(path: str, case: Case) -> torch.Tensor:
    out = torch.full_like(case.query, float("nan"))
    runner_of(path)(case.step).run(case.query, case.cache, case.ids, case.bias, out)
    torch.cuda.synchronize()
    return out


def check(name: str, path: str, few: bool) -> str:
    """`n right`, or what the first wrong one was."""
    worst, count = 0.0, 0
    for options in checks(name, few):
        case = make_case(**options, device="cuda")
        error, allowed = case.error(attended(path, case)), case.allowed()
        if not error <= allowed:
            return f"WRONG {error:.2g} > {allowed:.2g} at {options}"
        worst, count = max(worst, error / allowed), count + 1
    return f"{count} right, worst {worst:.2f} of what is allowed"


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay(path: str) -> str:
    """Capture one layer, change everything in place, replay."""
    first = make_case(device="cuda", head_dim=128, graph=True, seed=1)
    other = make_case(device="cuda", head_dim=128, graph=True, seed=2)
    out = torch.full_like(first.query, float("nan"))
    runner = runner_of(path)(first.step)
    inputs = (first.query, first.cache, first.ids, first.bias)
    graph = captured(lambda: runner.run(*inputs, out))
    pairs = ((first.query, other.query), (first.cache, other.cache), (first.ids, other.ids))
    tables = (first.step.block_table, other.step.block_table)
    for old, new in (*pairs, (first.bias, other.bias), tables):
        old.copy_(new)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    error, allowed = other.error(out), other.allowed()
    return "replayed" if error <= allowed else f"WRONG after replay: {error:.2g} > {allowed:.2g}"


def microseconds(run: Callable[[], object], repeats: int = 30, calls: int = 10) -> float:
    """Median of graph replays, per call."""

    def many() -> None:
        for _ in range(calls):
            run()

    graph, times = captured(many), []
    for _ in range(repeats):
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1000 / calls)
    return sorted(times)[len(times) // 2]


def random_step(
    rows: int, tokens: int, position: torch.Tensor, *, graph: bool
) -> tuple[Step, tuple[torch.Tensor, ...]]:
    """Rows at `position` [N] of `rows` sequences of `tokens` each: 12 random blocks of those that a
    row may choose, the nearest one with them."""
    device, config = DEVICE, DashConfig(index_dim=WIDTH, scale=(1.0,), floor=(1e-4,))
    maker = torch.Generator(device=device).manual_seed(0)
    per, count = tokens // PAGE, len(position)
    cache = torch.randn(
        rows * per, HEADS + 1, PAGE, 2 * WIDTH, device=device, generator=maker
    ).bfloat16()
    table = torch.randperm(rows * per, device=device, generator=maker).int().view(rows, per)
    remote = (position // config.block - config.local_blocks)[:, None]
    order = torch.rand(count, per, device=device, generator=maker)
    order = order.masked_fill(torch.arange(per, device=device) >= remote, 2.0).argsort(1)
    ids = torch.cat((remote, order[:, : config.topk - 1]), 1)
    taken = torch.arange(config.topk, device=device) < remote + 1
    ids = torch.where(taken, ids, -1)
    bias = torch.randn(count, config.topk, device=device, generator=maker).where(taken, 0.0)
    query = torch.randn(count, HEADS, WIDTH, device=device, generator=maker).bfloat16()
    new = count // rows
    every = torch.arange(count, device=device)
    step = Step(
        config=config,
        cache_shape=CacheShape.of(cache, config),
        heads=HEADS,
        dtype=torch.bfloat16,
        device=device,
        row_seq=(every // new).int(),
        row_pos=position.int(),
        slots=every,
        roles=torch.zeros(count, dtype=torch.int32, device=device),
        positions=None,
        query_start=torch.arange(0, count + 1, new, device=device).int(),
        seq_lens=(position.view(rows, new)[:, -1] + 1).int(),
        block_table=table,
        max_query_len=new,
        max_seq_len=tokens,
        query_lens=(new,) * rows,
        graph=graph,
    )
    return step, (query, cache, ids.int(), bias, torch.empty_like(query))


def decode_step(rows: int, tokens: int) -> tuple[Step, tuple[torch.Tensor, ...]]:
    """One new row for each of `rows` sequences of `tokens`."""
    position = torch.full((rows,), tokens - 7, device=DEVICE)
    return random_step(rows, tokens, position, graph=True)


def prefilled(path: str) -> float:
    """Milliseconds of the whole attend of one prompt."""
    position = torch.arange(PROMPT, device=DEVICE)
    step, inputs = random_step(1, PROMPT, position, graph=False)
    runner, times = runner_of(path)(step), []
    for _ in range(6):  # the first one compiles
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        runner.run(*inputs)
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    return sorted(times[1:])[2]


def timed(path: str, rows: int, tokens: int) -> tuple[float, float | None]:
    """The whole attend, and the library's call alone where there is one."""
    step, inputs = decode_step(rows, tokens)
    runner = runner_of(path)(step)
    whole = microseconds(lambda: runner.run(*inputs))
    call = getattr(runner, "call", None)
    if call is None or "Paged" in path or len(runner.passes) > 1 or runner.folded:
        return whole, None
    room, keys = runner.room, rows * runner.slots
    key, value = room.key[:keys], room.value[:keys]
    if call.table is not None:
        key, value = (x.view(-1, call.page, *x.shape[1:]) for x in (key, value))
    query, planned = room.query, runner.planned
    return whole, microseconds(lambda: planned.attend(query, key, value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "libraries", nargs="*", help=f"of {' '.join(LIBRARIES)}, or rows; default: all"
    )
    parser.add_argument("--peer", type=Path, default=Path(".peer"), help="folder of the modules")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--few", action="store_true", help="4 cases a row instead of 48")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--gather", action="store_true", help="only the gather's launch rows")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    generations = vllm_shim.install(options.peer) if options.peer.is_dir() else []
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {datetime.date.today()}, FA {generations}")
    print("command:", " ".join(sys.argv))
    if options.gather:
        third = Copy3 if 3 in generations else None
        # Where it matters first: what a time limit cuts off is the least.
        tune_gather.tune((*SHAPES[2:], *SHAPES[:2]), decode_step, microseconds, third)
        return
    every = {name: path for rows in LIBRARIES.values() for name, path in rows.items()}
    rows: dict[str, str] = {}
    for name in options.libraries or LIBRARIES:
        rows |= LIBRARIES.get(name) or {name: every[name]}
    figures: dict[str, dict[str, object]] = {}
    for name, path in rows.items():
        figure = figures[name] = {}
        try:
            if not options.no_checks:
                figure["checks"] = check(name, path, options.few)
                if name != "sdpa":
                    figure["graph"] = replay(path)
            if not options.no_times and name != "sdpa":
                for count, tokens in SHAPES:
                    whole, call = timed(path, count, tokens)
                    figure[f"{count}x{tokens}"] = [round(whole, 1), call and round(call, 1)]
                    torch.cuda.empty_cache()
                figure["prefill"] = round(prefilled(path), 3)
                torch.cuda.empty_cache()
        except Exception as error:  # one library's failure is a line of the table
            figure["failed"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(name, json.dumps(figure), flush=True)
    if options.json:
        text = json.dumps({"device": device, "torch": torch.__version__, "rows": figures}, indent=1)
        options.json.write_text(text, encoding="utf-8")
    print_table(figures)


def print_table(figures: dict[str, dict[str, object]]) -> None:
    columns = [f"{count}x{tokens}" for count, tokens in SHAPES]
    print("\n| way | " + " | ".join(columns) + f" | prefill {PROMPT}, ms | checks | graph |")
    print("|---" * (len(columns) + 4) + "|")
    for name, figure in figures.items():
        cells = []
        for column in columns:
            value = figure.get(column)
            whole, call = value if isinstance(value, list) else (None, None)
            cells.append("-" if whole is None else f"{whole}" + (f" ({call})" if call else ""))
        cells.append(str(figure.get("prefill", "-")))
        told = [str(figure.get(key, figure.get("failed", "-"))) for key in ("checks", "graph")]
        print(f"| {name} | " + " | ".join([*cells, *told]) + " |")


if __name__ == "__main__":
    main()
