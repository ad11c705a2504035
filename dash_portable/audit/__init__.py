"""Compile every kernel for GPUs that are not here, and hold what each needs against what the card
has.

    rows = run_audit(targets=["sm90", "gfx942"], jobs=2)
    print(render(rows))
    failed = any(not row.ok for row in rows)

Needs triton and no torch, no GPU and no toolkit. `python -m dash_portable.audit` is the same
without the extras of the command line. Kernels are described in `dash_portable.kernels.cases`,
cards in `targets`.
"""

from .engine import CASES, Row, run_audit
from .report import cells, line, listing, markdown, read_markdown, render, to_json
from .targets import ALL_TARGETS, INTEL_TARGETS, QUICK, TARGETS

__all__ = [
    "ALL_TARGETS",
    "CASES",
    "INTEL_TARGETS",
    "QUICK",
    "TARGETS",
    "Row",
    "cells",
    "line",
    "listing",
    "markdown",
    "read_markdown",
    "render",
    "run_audit",
    "to_json",
]
