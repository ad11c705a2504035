"""The rows of an audit as text, JSON and the table of docs/kernels.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from .engine import Row
from .targets import ALL_TARGETS, TARGETS


def listing() -> str:
    """The cards that can be compiled for and their limits, a line each."""
    lines = []
    for name, target in ALL_TARGETS.items():
        limits = f"shared {target.shared:6d}  registers {target.regs:3d}"
        where = "" if name in TARGETS else "  (Intel lane: ci/intel)"
        lines.append(f"{name:8s} {target.vendor:7s} {limits}  {target.cards}{where}")
    return "\n".join(lines)


def line(row: Row) -> str:
    """One row, readable alone: `ok    sm90     decode_bf16  shared=12804 regs=63 spill=0 ...`."""
    state = "none " if row.absent else "ok   " if row.ok else "WRONG"
    text = f"{state} {row.target:8s} {row.case:28s} {row.label:10s}"
    if row.usage:
        used = row.usage
        text += f" shared={used.shared} regs={used.regs} spill={used.spill} warps={row.warps}"
        text += f" matrix={row.matrix}" if row.matrix else ""
        text += f" {row.seconds:.1f} s"
    return "  ".join([text, *row.problems, *([row.note] if row.note else [])]).rstrip()


def render(rows: Sequence[Row]) -> str:
    """All rows, the wrong ones again at the end, and one closing line that counts them."""
    wrong = [row for row in rows if not row.ok]
    text = [line(row) for row in rows]
    if wrong:
        text += [
            "",
            "wrong:",
            *(f"  {row.target} {row.case} {row.label}: {p}" for row in wrong for p in row.problems),
        ]
    seconds = sum(row.seconds for row in rows)
    versions = " ".join(sorted({row.triton for row in rows}))
    count = len(rows) - sum(row.absent for row in rows)
    text.append(
        f"triton {versions}: {count} compiles, {len(wrong)} wrong, {seconds:.0f} s of compiling"
    )
    return "\n".join(text)


def to_json(rows: Iterable[Row]) -> str:
    return json.dumps([row.to_json() for row in rows], indent=1)


def cells(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """(case, target) -> what the table says of it: shared bytes / registers / spills, the largest
    of its launch rows; `-` where the target does not have the kernel.
    """
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.case, row.target), []).append(row)
    return {place: _cell(of) for place, of in found.items()}


def markdown(rows: Sequence[Row]) -> str:
    """The cells as a table: a case a line, a target a column."""
    places = [name for name in ALL_TARGETS if any(row.target == name for row in rows)]
    lines = ["| kernel | " + " | ".join(places) + " |", "|---|" + "---|" * len(places)]
    table = cells(rows)
    for case in sorted({row.case for row in rows}):
        line = [table.get((case, name), "-") for name in places]
        lines.append(f"| `{case}` | " + " | ".join(line) + " |")
    return "\n".join(lines)


def read_markdown(page: str) -> dict[tuple[str, str], str]:
    """The cells of a page that holds such a table; empty when it holds none."""
    found: dict[tuple[str, str], str] = {}
    places: list[str] = []
    for text in page.splitlines():
        parts = [part.strip() for part in text.strip("|").split("|")]
        if parts[0] == "kernel":
            places = parts[1:]
        elif text.startswith("| `") and len(parts) == len(places) + 1:
            found |= {
                (parts[0].strip("`"), name): part
                for name, part in zip(places, parts[1:], strict=True)
            }
    return found


def _cell(rows: Sequence[Row]) -> str:
    if any(not row.ok for row in rows):
        return "**fails**"
    used = [row.usage for row in rows if row.usage]
    if not used:
        return "-"
    shared, regs, spill = (max(values) for values in list(zip(*used, strict=True))[:3])
    return f"{shared}/{regs}/{spill}"
