"""Why kernels widen bfloat16 right after the load: the interpreter adds raw bits and says
nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import json, sys
import torch
from tests.audit_samples import kernels

x = torch.linspace(1, 2, 256).bfloat16()
gaps = {}
for name, factor in (("scale", 3.0), ("narrow_add", 6.0)):
    y = torch.zeros(256)
    kernels.CASES[name].kernel[(2,)](x, y, 128, 3.0, TILE=128)
    gaps[name] = float((y - factor * x.float()).abs().nan_to_num(1e30).max())
print(json.dumps(gaps))
"""


@pytest.fixture(scope="module")
def gaps() -> dict[str, float]:
    """Largest errors of both sample kernels in the interpreter as it comes, in a process of its
    own.
    """
    done = subprocess.run(
        ["env", "TRITON_INTERPRET=1", sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_widened_arithmetic_is_exact(gaps: dict[str, float]):
    assert gaps["scale"] == 0


def test_bare_bfloat16_is_silently_wrong(gaps: dict[str, float]):
    """When this fails, the interpreter has been repaired: the audit's rule may then be
    reconsidered.
    """
    assert gaps["narrow_add"] > 1
