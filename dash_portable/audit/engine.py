"""run_audit: every kernel, every shipped launch row, every target, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dash_portable.errors import BackendError, found_needed, unknown_word

from .targets import ALL_TARGETS, TARGETS
from .usage import Usage

CASES = "dash_portable.kernels.cases:CASES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one launch row of one case needs on one target, and everything that is wrong with it."""

    case: str
    target: str
    label: str = "0"
    triton: str = ""
    warps: int = 0
    seconds: float = 0.0
    usage: Usage | None = None
    matrix: int = 0  # matrix instructions in the binary, counted for cases that claim them
    problems: tuple[str, ...] = ()
    absent: bool = False  # the target cannot have this kernel; `note` says why
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["problems"] = list(self.problems)
        return fields | {"ok": self.ok, "usage": self.usage._asdict() if self.usage else None}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Row:
        known = {key: value for key, value in fields.items() if key in cls.__dataclass_fields__}
        usage = fields.get("usage")
        problems = tuple(fields.get("problems", ()))
        return cls(**known | {"usage": Usage(**usage) if usage else None, "problems": problems})


def _known(what: str, names: Iterable[str], table: Iterable[str]) -> None:
    valid = list(table)
    for name in names:
        if name not in valid:
            raise unknown_word(what, name, valid)


def _command(environment: Mapping[str, str]) -> list[str]:
    # env(1) sets the child's variables: ours are neither read nor changed. TRITON_INTERPRET is read
    # when Triton is imported, so a process that interprets can still start one that compiles.
    changed = [f"{name}={value}" for name, value in environment.items()]
    worker = [sys.executable, "-m", "dash_portable.audit.worker"]
    return ["env", "-u", "TRITON_INTERPRET", *changed, *worker]


def run_audit(
    targets: Iterable[str] | None = None,
    only: Iterable[str] | None = None,
    jobs: int = 1,
    limit: float = 120.0,
    cache: str | Path | None = None,
    *,
    cases: str = CASES,
    dump: str | Path | None = None,
    warps: int | None = None,
    progress: Callable[[Row, int, int], None] | None = None,
) -> list[Row]:
    """Compile the cases for the targets and say what each needs; one Row per case, target and
    launch row.

    targets   names of `ALL_TARGETS`; None is every NVIDIA and AMD one. Intel's need its own build
              of Triton (ci/intel)
    only      names of cases; None is all of them
    jobs      compiles at a time
    limit     seconds of processor time one compile may take (and ten times as long by the clock); a
              slower one is ended, and that is a problem of its row
    cache     folder of Triton's cache to use and keep; None is Triton's own place
    cases     `module:NAME` of the table
    dump      folder for what each compile made (ptx, cubin, amdgcn, hsaco, spv, ...), and a JSON
              for launchers
    warps     instead of each row's own
    progress  called with each row as it comes, the number done and the total

    Raises ArgumentError for a name that is not in its table, BackendError when the compiling
    process itself fails.
    """
    places = list(TARGETS if targets is None else targets)
    _known("targets", places, ALL_TARGETS)
    wanted = None if only is None else list(only)
    if jobs < 1:
        raise found_needed("jobs", jobs, "1 or more")
    if dump is not None:
        Path(dump).mkdir(parents=True, exist_ok=True)
    environment = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # line records hold this machine's paths
    if cache is not None:
        cache = str(Path(cache).absolute())
        environment["TRITON_CACHE_DIR"] = cache
    request = {
        "targets": places,
        "only": wanted,
        "jobs": jobs,
        "limit": limit,
        "cases": cases,
        "cache": cache,
        "dump": None if dump is None else str(dump),
        "warps": warps,
    }
    rows, total, version = list[Row](), 0, ""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            _command(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.close()
        for line in child.stdout:
            said = json.loads(line)
            if "unknown" in said:
                _known("only", said["unknown"], said["known"])
            elif "total" in said:
                total, version = said["total"], said["triton"]
            else:
                rows.append(Row.from_json(said["row"] | {"triton": version}))
                if progress is not None:
                    progress(rows[-1], len(rows), total)
        code = child.wait()
        log.seek(0)
        words = log.read().strip()
    if code or len(rows) != total:
        raise BackendError(f"the compiling process ended with status {code}: {words[-2000:]}")
    place = {name: i for i, name in enumerate(ALL_TARGETS)}
    return sorted(rows, key=lambda row: (place[row.target], row.case, row.label))
