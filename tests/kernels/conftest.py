"""Kernels on the CPU: Triton's interpreter, repaired, in a process of its own; NaN in every
blank.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: this process compiles nothing

import pytest
import torch

from tests.kernels import interp_shim

interp_shim.install()

POISON = 0x7FFFFFFF


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` gives is NaN, or an integer that no index may be."""

    def filled(make):
        def poison(*args, **options):
            tensor = make(*args, **options)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)

        return poison

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
