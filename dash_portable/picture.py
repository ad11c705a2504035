"""Pictures: which blocks each row of a document read, and how backends compare (matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter
from torch import Tensor

from dash_portable.config import DashConfig
from dash_portable.document import IMAGE, MARKER, Document
from dash_portable.trial.reading import Reading

_WHITE, _AHEAD = (1.0, 1.0, 1.0), (0.91, 0.91, 0.92)
_PAGES = ((0.985, 0.965, 0.915), (0.925, 0.955, 0.985))  # past and not read, by turns of page
_LOCAL, _OWN, _ANY = (0.13, 0.31, 0.58), (0.0, 0.55, 0.40), (0.86, 0.33, 0.10)
_INK, _DENSE = "#222222", "#c9c9ce"
_LABELS = 16  # at most so many names along an axis
_ROWS, _COLUMNS = 1600, 1400  # at most so many dots of one panel


def _runs(document: Document) -> list[tuple[str, int, int]]:
    """Stretches of the prompt: its pages and what is around them, as (name, first, last + 1)."""
    prompt = document.prompt
    end = max((i for i, role in enumerate(prompt) if role == IMAGE), default=-1) + 1
    if not end:
        return [("text", 0, len(prompt))]
    starts = [i for i, role in enumerate(prompt[:end]) if role == MARKER]
    edges = [*starts, end]
    runs = [("", 0, edges[0])] if edges[0] else []
    runs += [(f"page {i + 1}", a, b) for i, (a, b) in enumerate(pairwise(edges))]
    return [*runs, ("instruction", end, len(prompt))] if end < len(prompt) else runs


def _dots(reading: Reading, document: Document, config: DashConfig, rows: Tensor) -> Tensor:
    """Colours `[len(rows), B, 3]` of rows against blocks."""
    size, tokens = config.block, len(document)
    blocks = -(-tokens // size)
    block, position = torch.arange(blocks), rows[:, None]
    turn = torch.zeros(blocks, dtype=torch.int64)
    for i, (_, first, last) in enumerate(_runs(document)):
        turn[first // size : -(-last // size)] = i % 2
    dots = torch.tensor(_PAGES)[turn].expand(len(rows), blocks, 3).clone()
    ids, own = reading.ids[rows].long(), reading.own[rows]
    for slot in reversed(range(ids.shape[1])):  # the best last, so that nothing hides it
        there = ids[:, slot] >= 0
        strength = 1 - 0.6 * slot / ids.shape[1]
        hue = torch.where(own[:, None], torch.tensor(_OWN), torch.tensor(_ANY))
        dots[there.nonzero().flatten(), ids[there, slot]] = (
            strength * hue + (1 - strength) * torch.ones(3)
        )[there]
    first_local = (position - config.local + 1).clamp_min(0)
    local = (block * size + size > first_local) & (block * size <= position)
    dots[local] = torch.tensor(_LOCAL)
    dots[block * size > position] = torch.tensor(_AHEAD)
    return dots


def _pooled(dots: Tensor) -> Tensor:
    """At most so many columns; a column of several blocks shows the darkest of them."""
    wide = -(-dots.shape[1] // _COLUMNS)
    if wide == 1:
        return dots
    pad = wide * -(-dots.shape[1] // wide) - dots.shape[1]
    full: Tensor = torch.nn.functional.pad(dots, (0, 0, 0, pad), value=1.0)
    full = full.view(len(full), -1, wide, 3)
    darkest = full.sum(-1).argmin(2)
    at = darkest[..., None, None].expand(*darkest.shape, 1, 3)
    return torch.gather(full, 2, at)[:, :, 0]


def _sample(first: int, last: int) -> Tensor:
    count = min(last - first, _ROWS)
    return torch.linspace(first, last - 1, count).round().long()


def _panel(
    axes: Any, reading: Reading, document: Document, config: DashConfig, first: int, last: int
) -> None:
    rows = _sample(first, last)
    dots = _pooled(_dots(reading, document, config, rows))
    wide = -(-len(document) // config.block) * config.block
    axes.imshow(dots.numpy(), aspect="auto", interpolation="nearest", extent=(0, wide, last, first))
    axes.set_xlim(0, len(document))
    axes.set_ylim(last, first)
    axes.tick_params(length=2, labelsize=8)


def _keys(axes: Any, reading: Reading, first: int, last: int) -> None:
    """Keys of each row: what dense attention reads behind what was read."""
    rows = _sample(first, last)
    edges = [*rows.tolist(), last]
    for keys, colour in ((rows + 1, _DENSE), (reading.read[rows], _INK)):
        axes.stairs(keys.numpy(), edges, orientation="horizontal", fill=True, color=colour)
    axes.set_ylim(last, first)
    axes.set_xlim(0, len(reading.read) * 1.02)
    axes.tick_params(labelleft=False, length=2, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def selection(
    path: Path, reading: Reading, document: Document, config: DashConfig, subtitle: str = ""
) -> None:
    """Draw rows against blocks: what each row of the first layer read, beside how much that is."""
    prompt, tokens = len(document.prompt), len(document)
    answer = tokens > prompt
    runs = _runs(document)
    figure = Figure(figsize=(12, 11 if answer else 8.5), dpi=130, layout="constrained")
    heights = (7, 2.6) if answer else (1,)
    grid = figure.subplots(
        len(heights), 2, squeeze=False, height_ratios=heights, width_ratios=(5, 1), sharex="col"
    )
    spans = [("prompt", 0, prompt), ("answer", prompt, tokens)][: len(heights)]
    for (name, first, last), (left, right) in zip(spans, grid, strict=True):
        _panel(left, reading, document, config, first, last)
        _keys(right, reading, first, last)
        left.set_ylabel(f"rows of the {name} (query tokens)", fontsize=9)
        thin = 0.5 if len(runs) < 20 else 0.15
        for _, begin, end in runs:
            left.axvline(begin, color="#888888", linewidth=thin)
            left.axvline(end, color="#888888", linewidth=thin)
            if name == "prompt":
                left.axhline(begin, color="#888888", linewidth=thin)
    top, bottom = grid[0][0], grid[-1][0]
    _label_runs(top, runs, tokens)
    if answer:
        _label_answer(bottom, document)
        bottom.axvline(prompt, color="#888888", linewidth=0.5)
    bottom.set_xlabel(f"keys: tokens of the document, in blocks of {config.block}", fontsize=9)
    grid[-1][1].set_xlabel("keys read by a row", fontsize=9)
    share = float(reading.read.sum()) / (tokens * (tokens + 1) / 2)
    grid[0][1].set_title(
        f"black: read, {share:.0%} of dense\ngrey: dense attention", fontsize=8, loc="left"
    )
    figure.legend(
        handles=[
            Patch(color=_OWN, label="selected on its own page (stronger: chosen earlier)"),
            Patch(color=_ANY, label="selected anywhere: no block of its page is far enough behind"),
            Patch(color=_LOCAL, label=f"local window, the last {config.local} tokens"),
            Patch(facecolor=_PAGES[0], edgecolor="#bbbbbb", label="past, not read"),
            Patch(facecolor=_AHEAD, edgecolor="#bbbbbb", label="still to come"),
        ],
        loc="outside lower center",
        ncols=5,
        fontsize=8,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.4,
    )
    title = f"What each row read: {document.name}, {prompt} prompt tokens"
    title += f" and {tokens - prompt} answer tokens" if answer else ""
    figure.suptitle(f"{title}\n{subtitle}" if subtitle else title, fontsize=11)
    figure.savefig(path)


def _label_runs(axes: Any, runs: Sequence[tuple[str, int, int]], tokens: int) -> None:
    """Names of pages above the first panel; of many pages only some."""
    above = axes.secondary_xaxis("top")
    shown = [run for run in runs if run[0] and run[2] - run[1] > tokens * 0.012]
    shown = shown[:: max(1, -(-len(shown) // _LABELS))]
    above.set_xticks([(a + b) / 2 for _, a, b in shown], [name for name, _, _ in shown])
    crowded = len(shown) > 9
    above.tick_params(length=0, labelsize=8, rotation=30 if crowded else 0)


def _label_answer(axes: Any, document: Document) -> None:
    """Where the answer turns to the next page."""
    prompt = len(document.prompt)
    if IMAGE not in document.prompt:
        return
    turns = [prompt + i for i, role in enumerate(document.answer) if role == MARKER]
    thin = 0.5 if len(turns) <= _LABELS else 0.15
    every = -(-len(turns) // _LABELS) if turns else 1
    for i, turn in enumerate(turns):
        axes.axhline(turn, color="#888888", linewidth=thin)
        if i % every == 0:
            axes.annotate(
                f"reads page {i + 1}",
                (1, turn),
                xycoords=("axes fraction", "data"),
                xytext=(-3, -2),
                textcoords="offset points",
                fontsize=7,
                ha="right",
                va="top",
                color=_INK,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
            )


def bars(path: Path, title: str, groups: Mapping[str, Mapping[str, float]], unit: str) -> None:
    """Draw one group of bars for each workload, a bar for each way to attend; shorter is better."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    tall = 0.9 + sum(0.24 * len(group) + 0.35 for group in groups.values())
    figure = Figure(figsize=(10, tall), dpi=130, layout="constrained")
    axes = figure.subplots()
    at, ticks = 0.0, []
    for workload, group in groups.items():
        begin = at
        for name, value in group.items():
            colour = f"C{names.index(name) % 10}"
            axes.barh(at, value, height=0.85, color=colour, label=name)
            axes.text(value, at, f" {value:.3g}", va="center", fontsize=7)
            at += 1
        ticks.append(((begin + at - 1) / 2, workload))
        at += 1.2
    axes.set_yticks([tick for tick, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.invert_yaxis()
    shortest = min(value for group in groups.values() for value in group.values())
    axes.set_xscale("log")
    axes.set_xlim(left=shortest / 3)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"{unit}, logarithmic; shorter is better", fontsize=9)
    axes.set_title(title, fontsize=10)
    handles = {name: Patch(color=f"C{i % 10}", label=name) for i, name in enumerate(names)}
    axes.legend(handles=list(handles.values()), fontsize=7, loc="lower right")
    figure.savefig(path)
