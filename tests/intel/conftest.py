"""The Intel lane's tests: started by ci/intel/run.sh in an environment that has OpenCL and no
torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.intel.opencl import Cpu


@pytest.fixture(scope="session")
def cpu() -> Cpu:
    return Cpu(Path(os.environ["DASH_INTEL_BINARIES"]))
