"""The process that compiles: `python -m dash_portable.audit.worker`, started by `engine.run_audit`
and by nothing else.

One JSON request on standard input, one JSON object a line on standard output. It forks once per
compile, so that a time limit can end a compiler and a compiler that aborts ends nothing else. No
torch is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from .case import Case, Launch
from .compiler import compile_launch
from .ir import matrix_instructions, narrow_addresses, narrow_arithmetic
from .targets import ALL_TARGETS
from .usage import excess, not_claimed, too_many_threads, usage_of

CLOCK = 10  # times the limit of processor time, by the clock


class Work(NamedTuple):
    name: str
    case: Case
    target: str
    launch: Launch
    number: int  # of the launch row among those of this target

    @property
    def stem(self) -> str:
        return f"{self.name}.{self.target}" + (f".{self.number}" if self.number else "")

    @property
    def consts(self) -> dict[str, Any]:
        return {**self.case.consts, **self.launch.consts}

    @property
    def arguments(self) -> dict[str, str]:
        """The run-time arguments in the kernel's order, with their type texts."""
        types, names = self.case.types, self.case.kernel.arg_names
        return {name: types[name] for name in names if name not in self.consts}


def load_cases(table: str) -> Mapping[str, Case]:
    """`module:NAME` -> the table of cases it names."""
    module, _, name = table.partition(":")
    cases: Mapping[str, Case] = getattr(importlib.import_module(module), name)
    return cases


def _facts(work: Work, kernel: Any) -> dict[str, Any]:
    """What a launcher without Triton must know of the module it loads."""
    return {
        "kernel": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "threads": getattr(kernel.metadata, "threads_per_warp", kernel.metadata.target.warp_size),
        "consts": work.consts,
        "args": work.arguments,
    }


def _dump(work: Work, kernel: Any, folder: str) -> None:
    for kind, body in kernel.asm.items():
        data = body if isinstance(body, bytes) else str(body).encode()
        Path(folder, f"{work.stem}.{kind}").write_bytes(data)
    Path(folder, f"{work.stem}.json").write_text(
        json.dumps(_facts(work, kernel), indent=1, default=str)
    )


def _examine(work: Work, dump: str | None, kept: Path | None) -> dict[str, Any]:
    """Compile one row and hold it against its target."""
    target = ALL_TARGETS[work.target]
    threads = too_many_threads(work.launch.warps, target)
    if threads:
        return {"problems": [threads]}
    kernel = compile_launch(work.case, work.launch, target)
    if dump:
        _dump(work, kernel, dump)
    usage = usage_of(kernel, target, kept)
    reason = work.case.may_spill.get(work.target, "") or not_claimed()
    problems = [*excess(usage, target, bool(reason))]
    ttir = str(kernel.asm["ttir"])
    problems += [*narrow_arithmetic(ttir), *narrow_addresses(ttir, list(work.arguments))]
    matrix = matrix_instructions(kernel, target) if work.case.matrix else []
    if work.case.matrix and target.matrix and not matrix:
        problems.append("matrix: the case claims matrix instructions, none are in the binary")
    if work.case.wide and target.wide and not any(target.wide in name for name in matrix):
        used = " ".join(sorted(set(matrix)))
        problems.append(f"matrix: the case claims {target.wide}, the binary has {used}")
    note = reason if usage.spill else ""
    return {"usage": usage, "matrix": len(matrix), "problems": problems, "note": note}


def _child(work: Work, dump: str | None, kept: Path | None, pipe: Connection) -> None:
    os.setsid()  # so that the limit also ends a running ptxas
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 1)  # compilers write to both; the answer goes through the pipe
        os.dup2(log.fileno(), 2)
        try:
            answer = _examine(work, dump, kept)
        except BaseException as error:  # whatever ends a compile is this row's finding
            while error.__cause__ is not None:  # the last cause names the line and the reason
                error = error.__cause__
            log.seek(max(log.tell() - 300, 0))
            said = (
                log.read().decode(errors="replace").strip()
                if isinstance(error, RuntimeError)
                else ""
            )
            text = f"{type(error).__name__}: {str(error).strip()[-300:]} {said}"
            answer = {"problems": [f"compile: {' '.join(text.split())}"]}
        pipe.send(answer)
        pipe.close()


def processor_seconds(session: int) -> float:
    """What the living processes of a session and the children they waited for have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _overdue(process: int, seconds: float, limit: float) -> str:
    """Why a compile that has taken so many seconds is to be ended; empty when it is not.

    The limit is of processor time, so that other work on the machine fails no kernel; CLOCK times
    as long by the clock ends one that waits for something.
    """
    if seconds > limit and processor_seconds(process) > limit:
        return f"time: not compiled within {limit:g} s of processor time"
    return f"time: not compiled within {CLOCK * limit:g} s" if seconds > CLOCK * limit else ""


class _Running(NamedTuple):
    work: Work
    process: Any
    pipe: Connection
    begin: float


def compile_all(
    work: list[Work], jobs: int, limit: float, dump: str | None, kept: Path | None
) -> Iterator[tuple[Work, dict[str, Any]]]:
    """(work, finding) as they come; a compile that passes `limit` seconds of processor time is
    ended and becomes a finding.
    """
    fork = multiprocessing.get_context("fork")
    waiting, running = work[::-1], list[_Running]()
    while waiting or running:
        while waiting and len(running) < jobs:
            item = waiting.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(item, dump, kept, theirs))
            process.start()
            theirs.close()
            running.append(_Running(item, process, ours, time.monotonic()))
        multiprocessing.connection.wait([entry.pipe for entry in running], timeout=0.5)
        for entry in list(running):
            seconds = time.monotonic() - entry.begin
            if entry.pipe.poll():  # also true when a dead child closed its end
                try:
                    answer = entry.pipe.recv()
                except EOFError:
                    answer = {"problems": ["compile: the compiler process died"]}
            elif late := _overdue(entry.process.pid, seconds, limit):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(entry.process.pid, signal.SIGKILL)
                answer = {"problems": [late]}
            else:
                continue
            entry.process.join()
            running.remove(entry)
            yield entry.work, answer | {"seconds": round(seconds, 2)}


def plan(
    cases: Mapping[str, Case], targets: list[str], warps: int | None
) -> tuple[list[Work], list[dict[str, Any]]]:
    """What to compile, and the rows of cases that a target cannot have."""
    work, absent = [], []
    for place in targets:
        for name, case in cases.items():
            reason = case.absent.get(place) or case.absent.get(ALL_TARGETS[place].vendor)
            if reason:
                absent.append({"case": name, "target": place, "absent": True, "note": reason})
                continue
            rows = [row._replace(warps=warps or row.warps) for row in case.rows(place)]
            work += [Work(name, case, place, row, i) for i, row in enumerate(rows)]
    return work, absent


def main() -> None:
    request = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w", buffering=1)

    def say(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    cases = load_cases(request["cases"])
    unknown = [name for name in request["only"] or () if name not in cases]
    if unknown:
        say(unknown=unknown, known=list(cases))
        return
    import triton

    with contextlib.suppress(ImportError):  # Intel's 3.3 hashes elsewhere
        from triton.runtime.cache import triton_key

        triton_key()  # hashes the whole package, 0.4 s: done here once, every fork inherits it
    chosen = {name: case for name, case in cases.items() if name in (request["only"] or cases)}
    work, absent = plan(chosen, request["targets"], request["warps"])
    say(total=len(work) + len(absent), triton=triton.__version__)
    for row in absent:
        say(row=row)
    jobs, limit, dump = request["jobs"], request["limit"], request["dump"]
    kept = request["cache"] and Path(request["cache"], "usage")
    for item, answer in compile_all(work, jobs, limit, dump, kept):
        usage = answer.pop("usage", None)
        row = {
            "case": item.name,
            "target": item.target,
            "label": item.launch.label or str(item.number),
        }
        say(row=row | answer | {"usage": usage and usage._asdict(), "warps": item.launch.warps})


if __name__ == "__main__":
    main()
