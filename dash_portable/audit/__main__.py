"""`python -m dash_portable.audit`: the audit with the standard library's argument parser, for bare
environments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import CASES, QUICK, TARGETS, Row, line, listing, render, run_audit, to_json


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dash_portable.audit", description=__doc__)
    parser.add_argument(
        "--targets", type=_names, help="comma list, `all`, or `quick`: " + ",".join(QUICK)
    )
    parser.add_argument("--only", type=_names, help="comma list of cases")
    parser.add_argument("--jobs", type=int, default=1, help="compiles at a time")
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds of processor time for one"
    )
    parser.add_argument("--cache", help="folder of Triton's cache to use and keep")
    parser.add_argument("--cases", default=CASES, help="module:NAME of the table of cases")
    parser.add_argument("--warps", type=int, help="instead of each launch row's own")
    parser.add_argument("--dump", help="folder for what each compile made")
    parser.add_argument("--json", help="file for all rows")
    parser.add_argument(
        "--list", action="store_true", help="the targets and their limits; compiles nothing"
    )
    args = parser.parse_args(argv)
    if args.list:
        sys.stdout.write(listing() + "\n")
        return 0

    def show(row: Row, done: int, total: int) -> None:
        sys.stdout.write(f"[{done}/{total}] {line(row)}\n")
        sys.stdout.flush()

    named = {"quick": list(QUICK), "all": list(TARGETS)}
    targets = named.get(",".join(args.targets or ["all"]), args.targets)
    rows = run_audit(
        targets,
        args.only,
        args.jobs,
        args.limit,
        args.cache,
        cases=args.cases,
        dump=args.dump,
        warps=args.warps,
        progress=show,
    )
    if args.json:
        Path(args.json).write_text(to_json(rows))
    sys.stdout.write(render(rows).rpartition("\nwrong:")[2].rpartition("\n")[2] + "\n")
    return int(any(not row.ok for row in rows))


if __name__ == "__main__":
    sys.exit(main())
