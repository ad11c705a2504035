"""Skipped without a GPU; with TRITON_INTERPRET=1 rehearsed on the CPU, in small sizes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels import interp_shim

    interp_shim.install()


if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # a CPU without Triton


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)
