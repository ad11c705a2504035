"""Triton's interpreter as a backend of the CPU: whole calls go through the kernels there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dash_portable import dispatch
from dash_portable.backends.spec import Backend
from dash_portable.platform.facts import Vendor
from tests.device import INTERPRETED


def _on_cpu(row: Backend) -> Backend:
    if row.name != "triton":
        return row
    offer = row.capability
    return replace(row, capability=replace(offer, vendors=offer.vendors | {Vendor.CPU}))


@contextmanager
def kernels_serve() -> Iterator[None]:
    """While this is open, and TRITON_INTERPRET=1, dispatch lets the kernels serve a CPU."""
    if not INTERPRETED:
        yield
        return
    from tests.kernels import interp_shim

    interp_shim.install()
    backends = tuple(map(_on_cpu, dispatch.BACKENDS))
    shared = tuple(map(_on_cpu, dispatch.SHARED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "BACKENDS", backends)
        patch.setitem(dispatch.choose.__kwdefaults__, "shared", shared)
        dispatch.forget()
        yield
    dispatch.forget()
