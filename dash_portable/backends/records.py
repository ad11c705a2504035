"""What this machine remembers between processes: self-test verdicts and its own figures.

One JSON file in the user's cache folder, replaced as a whole. A file that cannot be read counts as
empty, one that cannot be written leaves the memory to this process; both are logged.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dash_portable import env
from dash_portable.backends.spec import Measured

_LOG = logging.getLogger("dash_portable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """verdicts: identity -> "" or what was wrong;  measured: backend -> figures."""

    verdicts: dict[str, str] = field(default_factory=dict)
    measured: dict[str, tuple[Measured, ...]] = field(default_factory=dict)


_kept: dict[Path, tuple[float, Records]] = {}


def path() -> Path:
    """Where the records are; the file may not exist."""
    return env.cache_folder() / "records.json"


def _parsed(text: str) -> Records:
    data = json.loads(text)
    return Records(
        verdicts={str(key): str(value) for key, value in data["verdicts"].items()},
        measured={
            str(name): tuple(Measured(**row) for row in rows)
            for name, rows in data["measured"].items()
        },
    )


def read() -> Records:
    """The records of this machine; read again when the file has changed."""
    file = path()
    try:
        changed = file.stat().st_mtime
        if file not in _kept or changed > _kept[file][0]:
            _kept[file] = (changed, _parsed(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning("%s: not read (%s: %s)", file, type(error).__name__, error)
    return _kept[file][1] if file in _kept else Records()


def write(records: Records) -> None:
    """Replace this machine's records."""
    file = path()
    data = {
        "verdicts": records.verdicts,
        "measured": {
            name: [asdict(row) for row in rows] for name, rows in records.measured.items()
        },
    }
    written = float("inf")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, suffix=".json", delete=False, encoding="utf-8"
        ) as draft:
            json.dump(data, draft, indent=1)
        os.replace(draft.name, file)
        written = file.stat().st_mtime
    except OSError as error:
        _LOG.warning("%s: not written (%s: %s)", file, type(error).__name__, error)
    _kept[file] = (written, records)


def record_verdict(identity: tuple[str, ...], text: str) -> None:
    """Remember a self-test: "" passed, else what was wrong."""
    known = read()
    write(Records(verdicts={**known.verdicts, " ".join(identity): text}, measured=known.measured))


def record_measured(backend: str, row: Measured) -> None:
    """Remember a figure of this machine; it replaces an earlier one of the same arch and phase."""
    known = read()
    kept = tuple(
        one
        for one in known.measured.get(backend, ())
        if (one.arch, one.phase) != (row.arch, row.phase)
    )
    write(Records(verdicts=known.verdicts, measured={**known.measured, backend: (*kept, row)}))


def verdict(identity: tuple[str, ...]) -> str | None:
    """The remembered self-test of an identity, or None."""
    return read().verdicts.get(" ".join(identity))
