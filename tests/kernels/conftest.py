"""Kernels compiled on a GPU, or on the CPU: Triton's interpreter, repaired, in a process of its
own. NaN in every blank.

What a test makes lies on the device by default, random numbers too.
"""

import os

import pytest
import torch

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: nothing is compiled then

from tests.device import COMPILED, DEVICE, INTERPRETED

if INTERPRETED:
    from tests.kernels import interp_shim

    interp_shim.install()

POISON = 0x7FFFFFFF


def default_device() -> torch.device:
    """Where tensors are made. Torch 2.8's own word for it fails once a default was taken back."""
    return torch.zeros(()).device


class Generator(torch.Generator):
    """Of the default device. A type: annotations of what torch imports late name it."""

    def __new__(cls, device: torch.device | None = None) -> "Generator":
        return super().__new__(cls, device or default_device())


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch):
    if COMPILED:
        monkeypatch.setattr(torch, "Generator", Generator)
        torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def poisoned(on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` gives is NaN, or an integer that no index may be."""

    def filled(make, **default):
        def poison(*args, **options):
            # Torch gives its default device to the functions it knows, and what is put in their
            # place is none of them.
            for name, value in default.items():
                if options.get(name) is None:
                    options[name] = value()
            tensor = make(*args, **options)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)

        return poison

    monkeypatch.setattr(torch, "empty", filled(torch.empty, device=default_device))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
