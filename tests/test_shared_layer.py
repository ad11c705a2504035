"""The self-test of a layer that stores and selects: it passes the right one and sees a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_portable import self_test
from dash_portable.backends import SHARED
from dash_portable.backends.spec import Backend, Capability
from dash_portable.eager import EagerLayer
from dash_portable.trial.shared import check_layer
from tests.machines import MACHINES

CPU = torch.device("cpu")
EAGER = next(row for row in SHARED if row.name == "eager")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_eager_layer_passes(dtype: torch.dtype) -> None:
    checks = check_layer(EagerLayer, CPU, dtype)
    assert {check.name for check in checks} == {"stored", "rotation", "selection", "bias"}
    assert not [check for check in checks if not check.ok]


Fault = Callable[..., Any]


def _wrong_state(layer: EagerLayer, cache: Tensor, *_: Any) -> None:
    """A page number that is off by one."""
    row = layer.step.slots[-1]
    size = layer.step.block_size
    at = layer.step.head_dim + 6
    cache[row // size, -1, row % size, at] += 1


def _wrong_summary(layer: EagerLayer, cache: Tensor, *_: Any) -> None:
    row = layer.step.slots[0]
    size = layer.step.block_size
    half = layer.step.head_dim * 3 // 2
    cache[row // size, -1, row % size, half:] *= 1.05


def _touched_blank(layer: EagerLayer, cache: Tensor, *_: Any) -> None:
    cache[cache.isnan()] = 0


@pytest.mark.parametrize("fault", [_wrong_state, _wrong_summary, _touched_blank])
def test_what_is_stored_wrong_is_seen(fault: Fault) -> None:
    class Faulty(EagerLayer):
        def store(self, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            out = super().store(q, *rest)
            fault(self, rest[4])
            return out

    bad = [check.name for check in check_layer(Faulty, CPU, torch.bfloat16) if not check.ok]
    assert "stored" in bad


def _last_block(ids: Tensor, bias: Tensor) -> None:
    """One row has a block that is not among the best."""
    ids[400, 0] = (ids[400, 0] + 1) % 8


def _no_mean(ids: Tensor, bias: Tensor) -> None:
    bias += 0.05 * (ids >= 0)


@pytest.mark.parametrize(("fault", "name"), [(_last_block, "selection"), (_no_mean, "bias")])
def test_what_is_selected_wrong_is_seen(fault: Fault, name: str) -> None:
    class Faulty(EagerLayer):
        def select(self, *given: Any) -> Any:
            found = super().select(*given)
            if len(found.ids) > 400:
                fault(*found)
            return found

    bad = {check.name for check in check_layer(Faulty, CPU, torch.bfloat16) if not check.ok}
    assert bad == {name}


def test_the_verdict_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_test.run(EAGER, MACHINES["cpu"]) == ""
    row = Backend(name="x", entry="tests.test_shared_layer:Broken", capability=Capability())
    assert self_test.run(row, MACHINES["cpu"]) == (
        "store and select of bfloat16: KeyError: 'no such arch'"
    )


class Broken(EagerLayer):
    def store(self, *given: Any) -> tuple[Tensor, Tensor]:
        raise KeyError("no such arch")
