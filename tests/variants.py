"""Which variants of which kernels a step asks Triton for, told without compiling or running one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from dash_portable import dispatch, serve, triton_layer
from dash_portable.backends import triton as triton_backend
from dash_portable.platform.facts import Platform, Vendor
from dash_portable.step import Step

Variant = tuple[str, str, str]


@contextmanager
def variants(arch: str) -> Iterator[set[Variant]]:
    """The (kernel, specialisation, options) that are launched on `arch` while this is open.

    Everything runs on the CPU up to the launch, which Triton's own binder classifies: the host
    reads nothing back, so that no launch depends on what the one before it would have computed.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import jit

    seen: set[Variant] = set()
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders: dict[Any, Any] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bind = binders.get(kernel)
        if bind is None:
            bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
            binders[kernel] = bind
        _, specialization, rest = bind(*args, **options)
        seen.add((kernel.fn.__name__, str(specialization), str(sorted(rest.items()))))

    platform = Platform(vendor=Vendor.CPU, device_type="cpu", arch=arch)
    choice = SimpleNamespace(required=lambda: SimpleNamespace(name="triton"))

    def plan(step: Step, request: object, **_: object) -> tuple[object, triton_backend.Runner]:
        return choice, triton_backend.Runner(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.JITFunction, "run", run)
        for module in (triton_layer, triton_backend):
            patch.setattr(module, "current_platform", lambda device: platform)
        patch.setattr(dispatch, "plan", plan)
        patch.setattr(serve, "_layer", lambda choice, step: triton_layer.TritonLayer(step))
        yield seen


def apart(values: Tensor) -> Tensor:
    """The same values in a tensor that begins where no vector load may."""
    wide = values.new_empty((values.numel() + 1,))
    part = wide[1:].view(values.shape)
    assert part.data_ptr() % 16
    return part.copy_(values)
