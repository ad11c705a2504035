"""Dependent launches begin before the launch they follow has ended. They may change no result: so
nothing that it stores is read, and nothing is stored, before they have waited for it.
"""

from types import SimpleNamespace

import pytest
import torch
import triton

from dash_portable import current_platform
from dash_portable.backends.triton import Runner
from dash_portable.kernels import attend_decode, launch, launch_prefill, primitives, select_decode
from dash_portable.triton_layer import TritonLayer
from tests.device import DEVICE, INTERPRETED
from tests.kernels.world import Text, World, feed

LENGTHS = [700, 33, 160, 1, 401]
# Splits, ticket, products. Without a ticket the splits are merged by a third launch, which waits as
# every other does.
ATTENDS = [(1, False, False), (2, True, True), (4, False, False), (16, True, True)]


def world_of(**options):
    texts = [Text(prompt=[2] + [1] * (length - 1), answer=[0]) for length in LENGTHS]
    world = World(texts, kv_heads=3, **options)
    feed(world, *[(i, 0, length) for i, length in enumerate(LENGTHS)])
    return world, world.step([None, *[(i, n, n + 1) for i, n in enumerate(LENGTHS)], None])


def rows_of(monkeypatch, attend, dependent):
    """These rows for every arch."""
    split, ticket, dot = attend
    selecting = launch.SelectRow(tile=16, ticket=True, dependent=dependent)
    attending = launch.AttendRow(split=split, ticket=ticket, dot=dot)
    monkeypatch.setattr(launch, "SELECT", {"*": (selecting,)})
    monkeypatch.setattr(launch, "ATTEND", {"*": (attending,)})


def outputs(world, step, times=1):
    """Of the layer run again and again, each launch right behind the other."""
    layer, runner, rows = TritonLayer(step), Runner(step), world.rows(step)
    outs = [torch.full_like(layer.query, torch.nan) for _ in range(times)]
    for out in outs:
        query, ids, bias = layer.prepare(*rows, world.cache, world.head_cls, 60.0, 1e-4)
        runner.run(query, world.cache, ids, bias, out)
    return [*outs, query, ids, bias]


@pytest.mark.skipif(not INTERPRETED, reason="addresses are seen by the interpreter")
@pytest.mark.parametrize("attend", [a for a in ATTENDS if a[0] == 1 or a[1]], ids=str)
def test_nothing_of_the_launch_before_is_touched_early(attend, monkeypatch):
    from tests.kernels.bounds import addresses_seen

    world, step = world_of()
    rows_of(monkeypatch, attend, False)
    wanted = outputs(world, step)
    monkeypatch.setattr(primitives, "PDL_OFFERED", True)  # what waits here is the test's own
    rows_of(monkeypatch, attend, True)
    seen = SimpleNamespace(waits=0, before=None)

    def wait():
        seen.waits += 1
        seen.before.clear()  # what remains at the end of a program came behind

    monkeypatch.setattr(attend_decode, "gdc_wait", wait)
    monkeypatch.setattr(select_decode, "gdc_launch_dependents", lambda: None)
    fixed = (step.row_pos, step.row_seq, step.block_table)

    def early(what, tensors):
        """Called by the interpreter before a load or store of attention's, at these addresses."""
        if not seen.before:
            return
        assert what == "load"
        allowed = [(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in fixed]
        assert all(any(a <= at < b for a, b in allowed) for at in tensors)

    layer, runner, rows = TritonLayer(step), Runner(step), world.rows(step)
    query, ids, bias = layer.prepare(*rows, world.cache, world.head_cls, 60.0, 1e-4)
    out = torch.full_like(query, torch.nan)
    with addresses_seen(early) as seen.before:
        runner.run(query, world.cache, ids, bias, out)
    assert seen.waits
    for one, other in zip([out, query, ids, bias], wanted, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.nvidia
@pytest.mark.parametrize("attend", ATTENDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_same_bits(attend, dtype, monkeypatch):
    arch = current_platform(DEVICE).arch
    if int(arch.removeprefix("sm")) < 90 or not primitives.PDL_OFFERED:
        pytest.skip(f"no dependent launches: {arch}, Triton {triton.__version__}")
    world, step = world_of(dtype=dtype)
    found = []
    for dependent in (False, True):
        rows_of(monkeypatch, attend, dependent)
        found.append(outputs(world, step, times=200))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.nvidia
@pytest.mark.parametrize("limit", [0, 8, 96])
def test_prompts_have_the_same_bits(limit, monkeypatch):
    """All by block, some by tile, all by tile."""
    arch = current_platform(DEVICE).arch
    if int(arch.removeprefix("sm")) < 90 or not primitives.PDL_OFFERED:
        pytest.skip(f"no dependent launches: {arch}, Triton {triton.__version__}")
    world, _ = world_of(dtype=torch.bfloat16)
    step = world.step([None, *[(i, 0, n) for i, n in enumerate(LENGTHS)], None])
    row = launch_prefill.prefill_row(arch)._replace(union_limit=limit, union_all=limit // 96 * 96)
    found = []
    for dependent in (False, True):
        rows = {"*": row._replace(dependent=dependent)}
        monkeypatch.setattr(launch_prefill, "PREFILL", rows)
        found.append(outputs(world, step, times=50))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
