"""The terminal: one console, a progress bar, and choices as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dash_portable.backends.spec import Backend, Rejection
from dash_portable.choice import Choice
from dash_portable.errors import found_needed

_WIDTH = 110  # where there is no terminal to ask


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or of a fixed width in a file or pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _WIDTH)


def progress() -> Progress:
    """A progress bar on stderr, so that stdout stays clean; nothing where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def folder(path: Path) -> Path:
    """The folder, made if it was not there; ArgumentError where nothing can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        needed = f"a folder that can be written to ({error.strerror})"
        raise found_needed("out", str(path), needed) from error
    return path


def write_json(data: Any) -> None:
    """JSON on stdout, and nothing else there."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def table(*headings: str, title: str = "", numbers: Iterable[int] = ()) -> Table:
    """An empty table; the columns in `numbers` are set to the right."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    right = set(numbers)
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="right" if i in right else "left", overflow="fold")
    return made


def time_of(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def facts(rows: Mapping[str, object]) -> Table:
    """Names and values, a line each."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, value in rows.items():
        made.add_row(name, escape(str(value)))
    return made


def choice_table(choice: Choice, title: str = "", *, brief: bool = False) -> Table:
    """Every backend's answer: the forced ones where they cannot serve, those that can in the order
    they are asked, then the others, together where they decline for the same reason.

    brief   of those that decline only the family's name
    """
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    made.add_column("answer")
    for heading in ("backend", "why"):
        made.add_column(heading, overflow="fold", ratio=1)

    def decline(groups: list[tuple[tuple[Rejection, ...], list[Backend]]], style: str) -> None:
        for reasons, rows in groups:
            names = [row.families[-1] if brief and row.families else row.name for row in rows]
            why = "\n".join(map(str, reasons))
            made.add_row("rejected", ", ".join(dict.fromkeys(names)), escape(why), style=style)

    own, others = choice.rejected()
    decline(own, "bold red")
    for one in choice.decisions:
        if not one.ok:
            continue
        chosen = one.backend is choice.backend
        first = [choice.chosen_by] if chosen else []
        made.add_row(
            "chosen" if chosen else "ok",
            one.backend.name,
            escape("\n".join([*first, *one.remarks])),
            style="bold green" if chosen else "green",
        )
    decline(others, "dim")
    return made


def stage_lines(choice: Choice) -> list[str]:
    """Who runs each stage of the shared layer."""
    lines = []
    for stage in choice.stages:
        runs = stage.backend.name if stage.backend else "nobody"
        why = "; ".join(
            f"not {one.backend.name}: {reason}"
            for one in stage.decisions
            for reason in one.rejections
        )
        lines.append(f"{stage.name}: {runs}" + (f" ({why})" if why else ""))
    return lines
