"""Caches of more than 2**31 elements, of which only the touched pages take memory: 32-bit offsets
would miss them.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_portable.backends import eager, triton
from dash_portable.eager import EagerLayer
from dash_portable.triton_layer import TritonLayer
from tests.device import COMPILED
from tests.kernels.world import Text, World, assert_same_cache, assert_same_selection, feed

FAR = 2**30  # elements; twice that and more passes 2**31
# On a GPU tests/gpu/test_far_cache.py has such a cache for its own.
pytestmark = pytest.mark.skipif(COMPILED, reason="memory of the host")
TEXT = Text(prompt=[0] * 3 + ([2] + [1] * 60) * 3 + [0] * 40, answer=[0, 2, 0])


def far_view(cache: Tensor, axis: int) -> Tensor:
    """The same numbers in a view whose stride along one axis is FAR, backed by untouched memory."""
    strides = list(cache.contiguous().stride())
    strides[axis] = FAR
    reach = sum((size - 1) * stride for size, stride in zip(cache.shape, strides, strict=True))
    assert reach > 2**31
    region = mmap.mmap(-1, (reach + 1) * cache.element_size())
    flat = torch.from_numpy(np.frombuffer(region, np.uint8)).view(cache.dtype)
    view = flat.as_strided(cache.shape, strides)
    view.copy_(cache)
    return view


@pytest.mark.parametrize("axis", [0, 1], ids=["cache-block", "head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_store_select_attend(axis: int, dtype: torch.dtype):
    world = World([TEXT], dtype=dtype, kv_heads=2, group=2, block_size=64)
    prompt = len(TEXT.prompt)
    feed(world, (0, 0, prompt - 5))
    twin = world.cache.clone()
    world.cache = far_view(world.cache, axis)
    for part in ((0, prompt - 5, prompt), (0, prompt, prompt + 1)):  # a chunk, then a decoded row
        step = world.step([part])
        ours, theirs, rows = TritonLayer(step), EagerLayer(step), world.rows(step)
        query, index_query = ours.store(*rows, world.cache, world.head_cls)
        theirs.store(*rows, twin, world.head_cls)
        assert_same_cache(world, world.cache.clone(), twin)
        found = ours.select(index_query, world.cache, world.head_cls, 60.0, 1e-4)
        wanted = theirs.select(index_query, twin, world.head_cls, 60.0, 1e-4)
        assert_same_selection(found, wanted)
        out, exact = torch.empty_like(query), torch.empty_like(query)
        triton.Runner(step).run(query, world.cache, *wanted, out)
        eager.Runner(step).run(query, twin, *wanted, exact)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(
            out, exact, rtol=0, atol=(4 * eps + 2**-19) * float(exact.abs().max())
        )
