"""Check and time the prefill kernels on a GPU, kernel by kernel and variant by variant.

    python benchmarks/tune_prefill.py                       everything; the table comes last
    python benchmarks/tune_prefill.py --only random-32768,pages-131072 --no-tune
    python benchmarks/tune_prefill.py --json out.json
    python benchmarks/tune_prefill.py --check               the interpreter's tests, compiled

Every variant is compiled first, in parallel processes. Times are medians of CUDA-graph replays (L2
warm); a kernel's time is what its stage takes with it less what the stage takes up to it. "layer"
is store, select and attend through TritonLayer and Runner, as a step runs them in every layer but
the first. bf16, 10 heads of 128, cache blocks of 64, shuffled.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.correlated import index_queries, summaries
from dash_portable.backends.triton import Runner
from dash_portable.cache import CacheShape
from dash_portable.config import DashConfig
from dash_portable.kernels import group_rows as grouping
from dash_portable.kernels import prefill
from dash_portable.kernels.launch_prefill import PrefillRow, prefill_row
from dash_portable.pages import prompt_positions
from dash_portable.step import Step
from dash_portable.streams import Beside, InOrder
from dash_portable.triton_layer import TritonLayer

BLOCK, LOCAL_BLOCKS, TOPK, WINDOW, HEADS, WIDTH, CACHE_BLOCK = 32, 4, 12, 16, 10, 128, 64
SCALE, FLOOR, SIGMA = 20.0, 1e-6, 2.0
DEVICE = "cuda"
# The launches of a stage in their order, by their names in its plan.
LAUNCHES = {
    "select": ("first", "few", "redo"),
    "attend": ("union", "sum", "offset", "place", "pair", "tile", "merge"),
}


def prompt(pages: list[int], tail: int = 0) -> list[tuple[int, int]]:
    """(text, image) tokens of each page, a marker first; `tail` tokens of text behind them."""
    return [(1, images) for images in pages] + ([(tail, 0)] if tail else [])


# name -> (sequences as lists of pages or a length without pages, correlation of neighbours)
WORKLOADS: dict[str, tuple[list[list[tuple[int, int]] | int], float]] = {
    **{f"random-{n}": ([n], 0.0) for n in (8192, 32768, 131072)},
    **{f"pages-{n}": ([prompt([273] * (n // 274))], 0.0) for n in (8192, 32768, 131072)},
    **{f"alike-{n}": ([prompt([273] * (n // 274))], 0.99) for n in (32768, 131072)},
    **{f"text-c0.9-{n}": ([n], 0.9) for n in (32768, 131072)},
    **{f"{n}-pages": ([prompt([273] * n)], 0.95) for n in (1, 8, 30)},
    "16-tiled": ([prompt([1899]) for _ in range(16)], 0.9),
    "16-tiled-random": ([prompt([1899]) for _ in range(16)], 0.0),
    "32-mixed": ([prompt([273] * (1 + n % 7)) for n in range(32)], 0.9),
}
QUICK = ("random-8192",)
MAXNREG_128, MAXNREG_168 = {"maxnreg": 128}, {"maxnreg": 168}
SELECT_VARIANTS = [
    {"select_groups": g, "select_warps": w, "select_stages": s, "select_options": o}
    for g, w, s, o in ((64, 4, 3, {}), (64, 4, 2, {}))
]
FEW_VARIANTS = [
    {"few_programs": p, "few_warps": w, "few_tile": t}
    for p, w, t in ((4224, 4, 0), (2112, 1, 16), (4224, 1, 16), (8448, 1, 16))
]
TILE_VARIANTS = [
    {
        "tile_blocks": b,
        "tile_step": k,
        "tile_warps": w,
        "tile_stages": s,
        "local_stages": n,
        "tile_options": o,
    }
    for b, k, w, s, n, o in (
        (1, 32, 4, 2, 2, MAXNREG_128),
        (1, 32, 4, 2, 1, MAXNREG_128),
        (1, 64, 4, 2, 1, MAXNREG_128),
        (2, 64, 4, 1, 1, MAXNREG_128),
        (1, 32, 4, 2, 2, MAXNREG_168),
        (1, 64, 4, 2, 1, MAXNREG_168),
        (2, 64, 4, 2, 2, MAXNREG_168),
        (1, 32, 4, 3, 2, {}),
    )
]
PAIR_VARIANTS = [
    {"pair_tile": m, "pair_warps": w, "pair_stages": s}
    for m, w, s in ((64, 4, 3), (64, 4, 2), (128, 4, 2), (128, 4, 3), (128, 8, 3))
]
MERGE_VARIANTS = [
    {"merge_rows": r, "merge_warps": w, "merge_programs": p}
    for r, w, p in ((2, 1, 4224), (2, 1, 8448))
]
UNION_VARIANTS = [{"union_warps": w} for w in (1, 2, 4)]
STAGES = {
    "first": SELECT_VARIANTS,
    "few": FEW_VARIANTS,
    "union": UNION_VARIANTS,
    "tile": TILE_VARIANTS,
    "pair": PAIR_VARIANTS,
    "merge": MERGE_VARIANTS,
}
LIMITS = (0, 48, 64, 80, 96)
BUDGETS = {  # MiB for the partial results of one chunk
    "random-8192": (128, 256),
    "random-131072": (1024, 2048, 4096),
}


class Work:
    """One workload on the GPU."""

    def __init__(self, name: str, budget: int | None = None) -> None:
        parts, self.correlation = WORKLOADS[name]
        self.name, self.budget = name, budget or prefill_row("sm90").budget
        pages = [p if isinstance(p, list) else [] for p in parts]
        self.layouts = [p if isinstance(p, list) else [(p, 0)] for p in parts]
        self.lengths = [sum(a + b for a, b in p) if isinstance(p, list) else p for p in parts]
        self.rows, self.seqs = sum(self.lengths), len(parts)
        self.max_blocks = -(-max(self.lengths) // BLOCK)
        start = torch.tensor([0, *self.lengths]).cumsum(0)
        seq = torch.repeat_interleave(torch.arange(self.seqs), torch.tensor(self.lengths))
        pos = torch.arange(self.rows) - start[seq]
        page = torch.zeros(self.rows, dtype=torch.int64)
        image = torch.zeros(self.rows, dtype=torch.bool)
        starts = torch.zeros(self.seqs, max(map(len, pages)) + 1, 2, dtype=torch.int64)
        for r, layout in enumerate(pages):
            at = 0
            for g, (text, images) in enumerate(layout, 1):
                page[start[r] + at : start[r] + at + text + images] = g
                image[start[r] + at + text : start[r] + at + text + images] = True
                starts[r, g] = torch.tensor([at, text + images])
                at += text + images
        ranges = torch.zeros(self.seqs, self.max_blocks, 2, dtype=torch.int64)
        shown = torch.where(image, page, 0)
        at = seq * self.max_blocks + pos // BLOCK
        high = ranges[..., 1].flatten().scatter_reduce(0, at, shown, "amax")
        low = torch.full_like(high, 1 << 30).scatter_reduce(0, at[image], shown[image], "amin")
        ranges = torch.stack([torch.where(high > 0, low, 0), high], -1).view(self.seqs, -1, 2)
        count = torch.tensor([len(p) for p in pages])
        self.row = {
            "seq": seq,
            "pos": pos,
            "query_page": page - 1,
            "num_pages": count[seq],
        }
        self.row = {k: v.int().to(DEVICE) for k, v in self.row.items()}
        self.query_start = start.int().to(DEVICE)
        self.starts, self.ranges = starts.int().to(DEVICE), ranges.int().contiguous().to(DEVICE)
        draw = torch.Generator(DEVICE).manual_seed(0)
        per = [-(-n // CACHE_BLOCK) for n in self.lengths]
        blocks = sum(per)
        shape = (blocks, HEADS + 1, CACHE_BLOCK, 2 * WIDTH)
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        for b in range(0, blocks, 512):
            self.cache[b : b + 512].normal_(generator=draw)
        place = torch.randperm(blocks, generator=draw, device=DEVICE).int()
        self.table = torch.zeros(self.seqs, max(per), dtype=torch.int32, device=DEVICE)
        used = 0
        for r, n in enumerate(per):
            self.table[r, :n] = place[used : used + n]
            used += n
        queries = index_queries(self.rows, WIDTH, self.correlation)
        keys = summaries(self.seqs * self.max_blocks, WIDTH)
        self.index_query = torch.from_numpy(queries).to(DEVICE, torch.bfloat16)
        self.summaries = (
            torch.from_numpy(keys).to(DEVICE, torch.bfloat16).view(self.seqs, -1, WIDTH)
        )
        self.query = torch.empty(
            self.rows, HEADS, WIDTH, dtype=torch.bfloat16, device=DEVICE
        ).normal_(generator=draw)
        self.out = torch.full_like(self.query, torch.nan)
        self.ids = torch.full((self.rows, TOPK), -7, dtype=torch.int32, device=DEVICE)
        self.bias = torch.full((self.rows, TOPK), torch.nan, device=DEVICE)
        self.use(prefill_row("sm90"))

    def use(self, launch: PrefillRow, budget: int | None = None) -> None:
        """Scratch for a row of launches."""
        self.launch, self.scratch = launch, {}
        self.budget = self.budget if budget is None else budget
        shapes = grouping.group_shapes(self.rows, self.seqs, launch.tile)
        self.groups = {k: self._ints(s) for k, s in shapes.items()}
        self.lists = {
            k: self._ints(s) for k, s in prefill.select_shapes(self.rows, self.seqs).items()
        }
        kinds = {
            "int32": torch.int32,
            "float32": torch.float32,
            "query": torch.bfloat16,
        }
        wanted = prefill.attend_shapes(
            self.rows,
            self.seqs,
            self.groups.get("wide", self.groups["tiles"]).shape[0],
            self.max_blocks,
            HEADS,
            WIDTH,
            2,
            TOPK,
            budget=self.budget,
            launch=launch,
        )
        self.scratch = {
            k: torch.zeros(s, dtype=kinds[t], device=DEVICE) for k, (t, s) in wanted.items()
        }
        row_pos = self.row["pos"]
        selection = prefill.SelectPrefill(
            self.summaries,
            self.ranges,
            row_pos,
            self.groups,
            self.lists,
            self.ids,
            self.bias,
            sigma=SIGMA,
            block=BLOCK,
            window=WINDOW,
            launch=launch,
        )
        attention = prefill.AttendPrefill(
            self.table,
            row_pos,
            self.groups,
            self.scratch,
            heads=HEADS,
            width=WIDTH,
            kv_heads=HEADS,
            cache_block=CACHE_BLOCK,
            block=BLOCK,
            local=LOCAL_BLOCKS * BLOCK,
            max_blocks=self.max_blocks,
            launch=launch,
            beside=Beside(self.query.device) if launch.beside else InOrder(),
        )
        self.plans: dict[str, Any] = {"select": selection, "attend": attention}

    def _ints(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=DEVICE)

    def group(self) -> None:
        row = self.row
        grouping.group_rows(
            row["seq"],
            row["pos"],
            row["query_page"],
            row["num_pages"],
            self.query_start,
            self.starts,
            self.ranges,
            self.cache,
            self.table,
            self.groups,
            block=BLOCK,
            local_blocks=LOCAL_BLOCKS,
            tile=self.launch.tile,
        )

    def one_stream(self) -> None:
        """Until the next `use`: a launch has a time of its own only when nothing runs beside it."""
        self.plans["attend"]._beside = InOrder()

    def select(self) -> None:
        self.plans["select"](self.index_query, SCALE, FLOOR)

    def attend(self) -> None:
        self.plans["attend"](self.query, self.cache, self.ids, self.bias, self.out)

    def whole(self) -> None:
        self.group()
        self.select()
        self.attend()

    # ------------------------------------------------------------------ is it right?
    def check(self, rows: int = 400) -> str:
        """Sampled rows against torch: blocks by their scores in float64, attention in float32."""
        self.ids.fill_(-7)
        self.bias.fill_(torch.nan)
        self.out.fill_(torch.nan)
        self.whole()
        torch.cuda.synchronize()
        draw = torch.Generator(DEVICE).manual_seed(9)
        few = min(rows, self.rows)
        ends = torch.arange(self.rows - min(40, self.rows), self.rows, device=DEVICE)
        at = torch.cat([torch.randint(0, self.rows, (few,), generator=draw, device=DEVICE), ends])
        at = at.sort().values
        wrong, worst, error = 0, 0.0, 0.0
        for r in range(self.seqs):
            mine = at[self.row["seq"][at] == r]
            if not len(mine):
                continue
            pos, page = self.row["pos"][mine].long(), self.row["query_page"][mine] + 1
            block = torch.arange(self.max_blocks, device=DEVICE)
            remote = block[None] <= (pos // BLOCK - LOCAL_BLOCKS)[:, None]
            low, high = self.ranges[r, :, 0][None], self.ranges[r, :, 1][None]
            own = remote & (low <= page[:, None]) & (page[:, None] <= high) & (page > 0)[:, None]
            allowed = torch.where(own.any(1, keepdim=True), own, remote)
            raw = self.index_query[mine].double() @ self.summaries[r].double().T
            score = torch.where(allowed, raw / WIDTH * SCALE, -torch.inf)
            if score.shape[1] < WINDOW:
                score = F.pad(score, (0, WINDOW - score.shape[1]), value=-torch.inf)
            best = score.sort(dim=1, descending=True, stable=True)
            value = best.values[:, :TOPK]
            got = self.ids[mine].long()
            mine_value = torch.where(got >= 0, score.gather(1, got.clamp_min(0)), -torch.inf)
            twice = (got.sort(1).values.diff(dim=1) == 0) & (got.sort(1).values[:, 1:] >= 0)
            near = ((mine_value - value).abs() < 1e-4) | (mine_value == value)
            wrong += int((~near.all(1) | twice.any(1)).sum())
            worst = max(worst, float((mine_value - value).abs().nan_to_num(0, 0, 0).max()))
            error = max(error, self._attention_error(r, mine[:: max(1, len(mine) // 60)]))
        assert not self.out.isnan().any()
        assert not self.bias.isnan().any()
        counts = self.lists["redo_count"]
        few, redone = int(counts[0]) / self.rows, int(counts[1:].sum()) / self.rows
        tiles = self.groups.get("wide", self.groups["tiles"])[:, 0] >= 0
        counts = self.scratch["count"][tiles, 0]
        by_block = float((counts < 0).float().mean())
        union = float(counts[counts >= 0].float().mean()) if bool((counts >= 0).any()) else 0.0
        verdict = "ok" if wrong == 0 and error < 2e-2 else "WRONG"
        return (
            f"{verdict}: {wrong} of {len(at)} rows wrong, scores off {worst:.0e}, "
            f"attention {error:.0e}; "
            f"doubtful {few:.1%}, redone {redone:.1%}, tiles by block {by_block:.0%}, "
            f"union {union:.0f}"
        )

    def _attention_error(self, r: int, rows: torch.Tensor) -> float:
        pos = self.row["pos"][rows].long()
        begin = (pos + 1 - LOCAL_BLOCKS * BLOCK).clamp_min(0)
        ids, bias = self.ids[rows].long(), self.bias[rows]
        token = ids[..., None] * BLOCK + torch.arange(BLOCK, device=DEVICE)
        ok = (ids[..., None] >= 0) & (token < begin[:, None, None])
        near = begin[:, None] + torch.arange(LOCAL_BLOCKS * BLOCK, device=DEVICE)
        token = torch.cat([token.flatten(1), near], 1)
        ok = torch.cat([ok.flatten(1), near <= pos[:, None]], 1)
        token = torch.where(ok, token, 0)
        added = torch.cat(
            [bias.repeat_interleave(BLOCK, 1), torch.zeros_like(near, dtype=torch.float)], 1
        )
        held = self.cache[
            self.table[r].long()[token // CACHE_BLOCK], :HEADS, token % CACHE_BLOCK
        ].float()
        logit = (
            torch.einsum("nhd,nthd->nht", self.query[rows].float(), held[..., :WIDTH]) * WIDTH**-0.5
        )
        logit = (logit + added[:, None]).masked_fill(~ok[:, None], -torch.inf)
        exact = torch.einsum("nht,nthd->nhd", logit.softmax(-1), held[..., WIDTH:])
        return float(((exact - self.out[rows].float()).norm(dim=-1) / exact.norm(dim=-1)).max())

    def same_bits(self) -> str:
        """Selections with other groups and of a last chunk alone; outputs by block in other budgets
        and of that chunk; both with dependent launches.
        """
        launch, budget = self.launch, self.budget
        self.use(launch._replace(union_limit=0), 64 << 20)
        self.whole()
        cut = self.out.clone()
        self.use(launch._replace(union_limit=0), budget)
        self.whole()
        ids, bias, out = self.ids.clone(), self.bias.clone(), self.out.clone()
        found = {"outputs by block, other budget": torch.equal(out, cut)}
        if self.seqs == 1:
            few = copy.copy(self)
            few.rows = 1000
            few.row = {k: v[-1000:] for k, v in self.row.items()}
            few.query_start = torch.tensor([0, 1000], dtype=torch.int32, device=DEVICE)
            few.index_query, few.query = self.index_query[-1000:], self.query[-1000:].contiguous()
            few.out, few.ids = torch.empty_like(few.query), self.ids[-1000:].clone()
            few.bias = self.bias[-1000:].clone()
            few.use(launch._replace(union_limit=0), budget)
            few.whole()
            same = torch.equal(few.ids, ids[-1000:]) and torch.equal(few.bias, bias[-1000:])
            found["selection of a last chunk"] = same
            found["outputs of a last chunk"] = torch.equal(few.out, out[-1000:])
        for change in ({"select_groups": 32}, {"few_tile": 16, "few_warps": 1}):
            self.use(launch._replace(**change), budget)
            self.whole()
            off = (bias - self.bias).abs().max()
            found[f"selection, {change}"] = torch.equal(ids, self.ids), f"biases off {off:.0e}"
        outs = []
        for dependent in (False, True):
            self.use(launch._replace(dependent=dependent), budget)
            self.whole()
            outs.append((self.ids.clone(), self.bias.clone(), self.out.clone()))
        found["dependent launches"] = all(map(torch.equal, *outs))
        self.use(launch, budget)
        return f"same bits: {found}"


def median_us(run: Any, budget_ms: float = 120.0) -> float:
    """Median of graph replays of one call."""
    run()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    once = max(begin.elapsed_time(end), 0.02)
    calls = max(1, min(10, int(1.0 / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    times = []
    for _ in range(max(5, min(30, int(budget_ms / (once * calls))))):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return sorted(times)[len(times) // 2]


def nothing(*args: object) -> None:
    """Stands in for a launch that is left out."""


def in_place(work: Work, launch: str) -> float:
    """Time of one launch: its stage up to it, less its stage up to the launch before it, one after
    another on one stream.
    """
    work.one_stream()
    stage = next(s for s, names in LAUNCHES.items() if launch in names)
    plan, names = work.plans[stage], LAUNCHES[stage]
    kept, times = {n: getattr(plan, n) for n in names}, []
    at = names.index(launch)
    for end in (at, at + 1):
        for n, found in kept.items():
            if found is not None:
                setattr(plan, n, found if n in names[:end] else nothing)
        times.append(median_us(getattr(work, stage)))
    for n, found in kept.items():
        setattr(plan, n, found)
    return times[1] - times[0]


def stages_in_place(work: Work) -> dict[str, float]:
    """Time of every launch by the growing part of its stage, on one stream."""
    found = {}
    work.one_stream()
    for stage, names in LAUNCHES.items():
        plan, before = work.plans[stage], 0.0
        kept = {n: getattr(plan, n) for n in names if getattr(plan, n) is not None}
        for n in kept:
            setattr(plan, n, nothing)
        for n in names:
            if n in kept:
                setattr(plan, n, kept[n])
                now = median_us(getattr(work, stage), 60.0)
                found[n], before = now - before, now
    return found


class Layer:
    """The same workload through the package's own layer and runner."""

    def __init__(self, work: Work) -> None:
        rule = DashConfig(
            index_dim=WIDTH,
            scale=(SCALE,),
            floor=(FLOOR,),
            sigma=SIGMA,
            block=BLOCK,
            local_blocks=LOCAL_BLOCKS,
            topk=TOPK,
            window=WINDOW,
        )
        seq, token = work.row["seq"].long(), work.row["pos"].long()
        slots = work.table.long()[seq, token // CACHE_BLOCK] * CACHE_BLOCK + token % CACHE_BLOCK
        roles = torch.cat(
            [
                torch.tensor([r for t, i in layout for r in [2 if i else 0] * t + [1] * i])
                for layout in work.layouts
            ]
        ).int()
        positions = torch.cat([prompt_positions(part) for part in roles.split(work.lengths)], 1)
        lengths = torch.tensor(work.lengths, dtype=torch.int32, device=DEVICE)
        self.work = work
        self.cache = torch.full_like(work.cache, torch.nan)
        self.step = Step(
            config=rule,
            cache_shape=CacheShape.of(self.cache, rule),
            heads=HEADS,
            dtype=torch.bfloat16,
            device=self.cache.device,
            row_seq=work.row["seq"],
            row_pos=work.row["pos"],
            slots=slots,
            roles=roles.to(DEVICE),
            positions=positions.to(DEVICE),
            query_start=work.query_start,
            seq_lens=lengths,
            block_table=work.table,
            max_query_len=max(work.lengths),
            max_seq_len=max(work.lengths),
            query_lens=tuple(work.lengths),
        )
        rows = work.rows
        like = [(rows, HEADS, WIDTH)] * 3 + [(rows, WIDTH)] * 2
        self.inputs = [torch.randn(of, device=DEVICE, dtype=torch.bfloat16) for of in like]
        self.head_cls = torch.randn(WIDTH, device=DEVICE, dtype=torch.bfloat16)
        self.layer, self.runner = TritonLayer(self.step), Runner(self.step)

    def store(self) -> None:
        self.layer.store(*self.inputs, self.cache, self.head_cls)

    def select(self) -> None:
        """Of the workload's own index queries, so that neighbours choose as it says."""
        self.layer.select(self.work.index_query, self.cache, self.head_cls, SCALE, FLOOR)

    def attend(self) -> None:
        layer, work = self.layer, self.work
        self.runner.run(layer.query, self.cache, layer.ids, layer.bias, work.out)

    def whole(self) -> None:
        self.store()
        self.select()
        self.attend()

    def chosen(self) -> None:
        self.store()
        self.select()

    def measure(self) -> dict[str, float]:
        self.whole()
        store, chosen = median_us(self.store), median_us(self.chosen)
        whole = median_us(self.whole)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            self.whole()
        host = (time.perf_counter() - begin) / 5 * 1e6
        torch.cuda.synchronize()
        assert not self.work.out.isnan().any()
        return {
            "layer": whole,
            "store": store,
            "side+select": chosen - store,
            "attend": whole - chosen,
            "host": host,
        }


def compile_all(share: int, of: int) -> None:
    """Every variant once, on a small workload: fills Triton's cache."""
    work = Work("random-8192")
    jobs: list[PrefillRow] = [prefill_row("sm90")]
    jobs += [prefill_row("sm90")._replace(**v) for variants in STAGES.values() for v in variants]
    jobs += [prefill_row("sm90")._replace(union_limit=n) for n in LIMITS]
    if share == 0:
        try:
            Layer(work).whole()
        except Exception as error:
            print(f"compile layer: {str(error)[:200]}", flush=True)
    for number, launch in enumerate(jobs):
        if number % of == share:
            try:
                work.use(launch)
                work.whole()
                torch.cuda.synchronize()
            except (
                Exception
            ) as error:  # a variant that cannot run is reported again, by name, where it is timed
                print(f"compile {launch}: {str(error)[:200]}", flush=True)


def checks() -> list[tuple[str, Any, tuple[Any, ...]]]:
    """The cases of tests/kernels/test_*_prefill.py that need nothing of pytest."""
    if importlib.util.find_spec("pytest") is None:  # its decorators say nothing that is used here
        kept = types.SimpleNamespace()
        kept.parametrize = kept.filterwarnings = lambda *args, **options: lambda test: test
        sys.modules["pytest"] = types.SimpleNamespace(mark=kept)
    from tests.kernels import test_attend_prefill as attending
    from tests.kernels import test_select_prefill as selecting

    found: list[tuple[str, Any, tuple[Any, ...]]] = []
    for dtype in selecting.DTYPES:
        found += [(f"select {n}", selecting.test_select, (n, dtype)) for n in selecting.BATCHES]
        found += [(f"attend {f}", attending.test_attend, (f, dtype)) for f in attending.FORMS]
    for kind in ("equal", "falling", "rising", "two", "stripes", "zeros"):
        found.append((f"order {kind}", selecting.test_ties_and_orders, (kind,)))
    for scale in (20.0, 0.0, -3.0, 1e-3):
        found.append((f"no numbers {scale}", selecting.test_scores_that_are_no_numbers, (scale,)))
    for form in ("by-block", "by-tile", "by-tile-two"):
        for size in (8, 16, 48, 64, 128):
            found.append((f"cache blocks {form} {size}", attending.test_cache_blocks, (form, size)))
        for shape in ((1, 4, 64), (3, 2, 128), (1, 1, 80)):
            found.append((f"heads {form} {shape}", attending.test_heads_and_widths, (form, *shape)))
    for test in (
        selecting.test_many_blocks_take_both_passes,
        selecting.test_a_row_is_the_same_in_any_batch,
        selecting.test_a_page_table_holds_before_its_row_is_stored,
        selecting.test_no_rows_with_a_page,
        attending.test_unions_and_lists,
        attending.test_chunks_reuse_one_buffer,
        attending.test_the_nearest_block_stops_at_the_local_window,
        attending.test_what_lies_beside_a_sequence_does_not_count,
    ):
        found.append((test.__name__, test, ()))
    return found


def run_checks(share: int, of: int) -> int:
    """This process's part of the checks; the number that failed."""
    failed = 0
    for number, (name, test, args) in enumerate(checks()):
        if number % of == share:
            try:
                test(*args)
            except Exception as error:  # each is reported; the exit code counts them
                failed += 1
                print(
                    f"FAILED {name} {args}: {type(error).__name__} {str(error)[:300]}", flush=True
                )
    return failed


def in_parallel(flag: str) -> list[int]:
    """This script with `flag i/n` in n processes; their exit codes."""
    many = min(16, os.cpu_count() or 1)
    command = [sys.executable, __file__, flag]
    children = [subprocess.Popen([*command, f"{n}/{many}"]) for n in range(many)]
    return [child.wait() for child in children]


def tune(work: Work, kernels: list[str]) -> tuple[PrefillRow, dict[str, Any]]:
    """The fastest variant of each kernel, one kernel after another."""
    launch, found = work.launch, {}
    for kernel in kernels:
        times: dict[str, float] = {}
        best = (float("inf"), launch)
        for change in STAGES[kernel]:
            variant = launch._replace(**change)
            try:
                work.use(variant)
                work.whole()
                torch.cuda.synchronize()
                took = median_us(work.select) if kernel == "first" else in_place(work, kernel)
            except Exception as error:
                print(f"   {kernel} {change}: {str(error)[:160]}", flush=True)
                continue
            times[",".join(str(v) for v in change.values())] = round(took, 1)
            if took < best[0]:
                best = (took, variant)
        launch = best[1]
        found[kernel] = times
        print(f"   {work.name} {kernel}: {times}", flush=True)
    work.use(launch)
    return launch, found


def dense_us(work: Work) -> dict[str, float]:
    """Dense causal attention of the same sequences, one call each length group, by torch's
    backends.
    """
    length, many = max(work.lengths), work.seqs
    if min(work.lengths) != length:
        return {}
    q, k, v = (
        torch.randn(many, HEADS, length, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(3)
    )
    found = {}
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        try:
            with sdpa_kernel(backend):
                call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
                found[name] = (
                    triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median") * 1e3
                )
        except RuntimeError as error:
            print(f"   dense {name}: {str(error)[:120]}")
    return found


def measure(work: Work, dense: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "workload": work.name,
        "rows": work.rows,
        "launch": work.launch._asdict(),
    }
    result["check"] = work.check()
    for stage in ("group", *LAUNCHES):
        result[stage] = median_us(getattr(work, stage))
    result |= stages_in_place(work)
    try:
        result["layer"] = Layer(work).measure()
    except Exception as error:  # the kernels' own figures are worth printing without it
        print(f"   layer: {type(error).__name__} {str(error)[:300]}", flush=True)
        result["layer"] = {"layer": float("nan")}
    if dense:
        result["dense"] = dense_us(work)
    return result


def line(result: dict[str, Any]) -> str:
    names = [n for several in LAUNCHES.values() for n in several if n in result]
    parts = " ".join(f"{n} {result[n]:.0f}" for n in names)
    dense = " ".join(f"{k} {v:.0f}" for k, v in result.get("dense", {}).items())
    layer = " ".join(f"{k} {v:.0f}" for k, v in result["layer"].items())
    return (
        f"{result['workload']:17s}{layer} | group {result['group']:.0f} select "
        f"{result['select']:.0f} attend {result['attend']:.0f} | {parts} | {dense or '-'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="comma list of workloads")
    parser.add_argument("--no-tune", action="store_true", help="the shipped launch rows only")
    parser.add_argument("--no-dense", action="store_true")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--check", nargs="?", const="all", help="run the kernels' tests compiled")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_all(*map(int, args.compile.split("/")))
        return
    if args.check == "all":
        codes = in_parallel("--check")
        print(f"{len(checks())} checks, failed: {sum(codes)}")
        sys.exit(int(any(codes)))
    if args.check:
        sys.exit(run_checks(*map(int, args.check.split("/"))))
    begin = time.time()
    if not args.no_tune:
        codes = sorted(set(in_parallel("--compile")))
        print(f"compiled, exit codes {codes}, {time.time() - begin:.0f} s")
    print(torch.__version__, triton.__version__, torch.cuda.get_device_name(0), flush=True)
    names = args.only.split(",") if args.only else list(WORKLOADS)
    results, launches = [], {}
    if not args.no_tune:
        for name, kernels in (
            ("random-131072", list(STAGES)),
            ("random-32768", ["pair"]),
            ("random-8192", ["first", "union", "pair"]),
            ("alike-131072", ["union", "tile"]),
            ("16-tiled", ["union", "tile"]),
            ("8-pages", ["union", "tile"]),
        ):
            if args.only and name not in names:
                continue
            work = Work(name)
            work.whole()
            launch, found = tune(work, kernels)
            launches[name] = launch
            results.append({"workload": name, "tuned": found, "launch": launch._asdict()})
            for budget in BUDGETS.get(name, ()):
                work.use(launch, budget << 20)
                work.whole()
                print(f"   {name} budget {budget} MiB: {median_us(work.attend):.0f} us", flush=True)
            del work
            torch.cuda.empty_cache()
        for name in ("text-c0.9-131072", "16-tiled"):
            if args.only and name not in names:
                continue
            work = Work(name)
            for limit in LIMITS:
                work.use(work.launch._replace(union_limit=limit))
                work.whole()
                print(
                    f"   {name} union limit {limit}: attend {median_us(work.attend):.0f} us",
                    flush=True,
                )
            del work
            torch.cuda.empty_cache()
    lines = []
    for name in names:
        work = Work(name)
        if name in ("random-32768", "pages-8192", "32-mixed"):
            print(f"   {name}: {work.same_bits()}", flush=True)
        result = measure(work, not args.no_dense)
        print(f"   {name}: {result['check']}", flush=True)
        results.append(result)
        lines.append(line(result))
        del work
        torch.cuda.empty_cache()
    for name, launch in launches.items():
        base = prefill_row("sm90")
        changed = {k: v for k, v in launch._asdict().items() if v != getattr(base, k)}
        print(f"best of {name}: {changed}")
    print(f"shipped rows, us, {time.time() - begin:.0f} s in all:")
    print("\n".join(lines))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main()
