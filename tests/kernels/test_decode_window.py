"""The launch that stores and selects attends to the local window as well; attention goes on from
there.
"""

from dataclasses import replace

import pytest
import torch

from dash_portable.backends.triton import Runner
from dash_portable.kernels import launch
from dash_portable.triton_layer import TritonLayer
from dash_portable.triton_window import window_of
from tests.kernels.world import Text, World, feed

LENGTHS = [700, 33, 160, 1, 401]


@pytest.fixture(params=[(1, False), (4, False), (16, True)], ids=lambda p: f"split-{p[0]}")
def rows(request, monkeypatch):
    """Rows of the table that attend to the window while selecting, and how attention is split."""
    split, ticket = request.param
    monkeypatch.setattr(launch, "SELECT", {"*": (launch.SelectRow(tile=16, near=32, ticket=True),)})
    monkeypatch.setattr(launch, "ATTEND", {"*": (launch.AttendRow(split=split, ticket=ticket),)})


def world_of(**options):
    texts = [Text(prompt=[2] + [1] * (length - 1), answer=[0]) for length in LENGTHS]
    world = World(texts, kv_heads=3, **options)
    feed(world, *[(i, 0, length) for i, length in enumerate(LENGTHS)])
    return world, world.step([None, *[(i, n, n + 1) for i, n in enumerate(LENGTHS)], None])


def check(world, step):
    """Twice the same layer: attention after the window, and attention over everything."""
    runner = Runner(step)
    layer, rows = TritonLayer(step), world.rows(step)
    window = window_of(step)
    outs = []
    for kept in (True, False):
        query, ids, bias = layer.prepare(*rows, world.cache, world.head_cls, 60.0, 1e-4)
        assert window.filled
        window.filled = kept
        outs.append(torch.full_like(query, torch.nan))
        runner.run(query, world.cache, ids, bias, outs[-1])
        assert not window.filled
    eps = torch.finfo(world.dtype).eps
    live = step.row_pos >= 0
    assert all((out[~live] == 0).all() for out in outs)
    gap = (outs[0].float() - outs[1].float())[live].abs().max()
    assert gap <= 2 * eps * outs[1][live].float().abs().max() + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_window_then_the_rest(rows, dtype):
    check(*world_of(dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"block": 8, "block_size": 8, "local_blocks": 3},
        {"block": 16, "block_size": 64, "strided": True},
        {"width": 96, "block_size": 16},
        {"local_blocks": 1},
    ],
    ids=["block-8", "strided", "width-96", "one-local-block"],
)
def test_shapes(rows, options):
    check(*world_of(**options))


def test_store_and_select_apart_leave_no_window(rows):
    world, step = world_of()
    runner, layer = Runner(step), TritonLayer(step)
    _, index_query = layer.store(*world.rows(step), world.cache, world.head_cls)
    layer.select(index_query, world.cache, world.head_cls, 60.0, 1e-4)
    assert not window_of(step).filled
    assert runner is not None


@pytest.mark.parametrize("change", [{"heads": 6}, {"deterministic": True}], ids=["group", "fixed"])
def test_who_has_no_window(rows, change):
    """Groups go by matrix products; splits that may not depend on the batch stay as they are."""
    _, step = world_of()
    step = replace(step, **change)
    runner = Runner(step)
    assert window_of(step) is None
    assert runner is not None
