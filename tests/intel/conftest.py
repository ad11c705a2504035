"""The Intel lane's tests: started by ci/intel/run.sh in an environment that has OpenCL and no
torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.intel.opencl import Cpu


@pytest.fixture(scope="session")
def cpu() -> Iterator[Cpu]:
    device = Cpu(Path(os.environ["DASH_INTEL_BINARIES"]))
    yield device
    # For docs/kernels-intel.md: which kernels were really executed.
    record = Path(os.environ["DASH_INTEL_MODULES"]).parent / "executed.json"
    record.write_text(json.dumps(sorted(device.executed)))
