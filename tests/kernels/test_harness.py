"""What the other tests stand on: what they make lies on the default device, NaN where blank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

MAKERS = {
    "arange": lambda: torch.arange(3),
    "empty": lambda: torch.empty(3),
    "empty of shape": lambda: torch.empty((3, 2), dtype=torch.int32),
    "empty_like": lambda: torch.empty_like(torch.zeros(3)),
    "full": lambda: torch.full((3,), 1.0),
    "ones": lambda: torch.ones(3),
    "rand": lambda: torch.rand(3),
    "randint": lambda: torch.randint(0, 9, (3,)),
    "randn": lambda: torch.randn(3),
    "randperm": lambda: torch.randperm(3),
    "tensor": lambda: torch.tensor([1, 2]),
    "zeros": lambda: torch.zeros(3),
}


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_are_made_on_the_default_device(name: str) -> None:
    """Also by the functions that the harness put in the place of torch's."""
    with torch.device("meta"):
        assert MAKERS[name]().device.type == "meta"
        assert torch.empty(1, device="cpu").device.type == "cpu"


def test_blanks_are_poison() -> None:
    blanks: list[Tensor] = [torch.empty(3), torch.empty_like(torch.zeros(3))]
    assert all(x.isnan().all() for x in blanks)
    assert (torch.empty(3, dtype=torch.int32) > 2**30).all()
