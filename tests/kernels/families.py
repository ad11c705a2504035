"""Families of cases: all combinations where kernels are interpreted, fewer where compiled."""

from __future__ import annotations

import itertools

import pytest

from tests.device import COMPILED


def varied(*axes: list[object]) -> list[object]:
    """Cases of one value from every axis: all of them; on a GPU, where each takes seconds to
    compile, as many as the longest axis has values, so that every value of every axis has one.
    """
    if not COMPILED:
        chosen = list(itertools.product(*axes))
    else:
        most = max(map(len, axes))
        chosen = [tuple(axis[i % len(axis)] for axis in axes) for i in range(most)]
    return [pytest.param(*values, id="-".join(map(str, values))) for values in chosen]
