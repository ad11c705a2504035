"""Whole steps by the Triton layer and runner: store, select, attend, beside the eager layer and
oracle.
"""

import pytest
import torch

from dash_portable.backends.eager import Runner as EagerRunner
from dash_portable.backends.triton import Runner
from dash_portable.kernels import launch_prefill
from dash_portable.platform.detect import current_platform
from dash_portable.step import Trust
from dash_portable.triton_layer import TritonLayer
from tests.kernels.world import Text, World, assert_same_cache, assert_same_selection, both, feed

DOCUMENT = Text(prompt=([2] + [1] * 120) * 4 + [0] * 60, answer=[0, 2] + [0] * 30)
PLAIN = Text(prompt=[0] * 420, answer=[0] * 20)


def check(world, step):
    """One layer of a step; the eager layer selects from the same cache, the oracle attends on our
    selection.
    """
    ours, theirs, rows, twin = both(world, step)
    runner = Runner(step)
    query, ids, bias = ours.prepare(*rows, world.cache, world.head_cls, 60.0, 1e-4)
    out = torch.empty_like(rows[0])
    runner.run(query, world.cache, ids, bias, out)
    theirs.store(*rows, twin, world.head_cls)
    assert_same_cache(world, world.cache, twin)
    live = step.row_pos >= 0
    wanted = theirs.select(ours.index_query, world.cache, world.head_cls, 60.0, 1e-4)
    assert_same_selection((ids[live], bias[live]), (wanted[0][live], wanted[1][live]))
    exact = torch.zeros(out.shape)
    EagerRunner(step).run(query, world.cache, ids, bias, exact)
    eps = torch.finfo(world.dtype).eps
    assert (out[~live] == 0).all()
    assert (out.float() - exact)[live].abs().max() <= 4 * eps * exact[live].abs().max() + 1e-5
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompt_chunks_and_mixed_rows(dtype):
    world = World([DOCUMENT, PLAIN], dtype=dtype, kv_heads=2, group=2, block_size=16)
    check(world, world.step([(0, 0, 300), (1, 0, 200)]))
    end = len(DOCUMENT.prompt)
    check(world, world.step([(0, 300, end), None, (1, 200, 420)], padding=2))
    check(world, world.step([(0, end, end + 9), None, (1, 420, 421)], given=False))
    check(world, world.step([(0, end + 9, end + 10), None, (1, 421, 422)], given=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wide_heads_have_launch_rows_of_their_own(dtype):
    """Padded to 256 columns: what narrower heads take would not fit every card's memory."""
    world = World([PLAIN], dtype=dtype, width=144)
    prompt = world.step([(0, 0, 420)])
    check(world, prompt)
    arch, itemsize = current_platform(prompt.device).arch, dtype.itemsize
    row = launch_prefill.prefill_row(arch, itemsize, width=144)
    assert row != launch_prefill.prefill_row(arch, itemsize, width=128)
    assert Runner(prompt)._runner._row == TritonLayer(prompt)._tiles._prefill == row
    check(world, world.step([(0, 420, 421)]))


def test_prompt_with_a_page_table():
    world = World([DOCUMENT, PLAIN])
    check(world, world.step([(0, 0, 544), (1, 0, 100)], tables=True))


def test_out_of_any_strides():
    world = World([PLAIN], kv_heads=2)
    feed(world, (0, 0, 420))
    step = world.step([(0, 420, 421)])
    layer = TritonLayer(step)
    query, ids, bias = layer.prepare(*world.rows(step), world.cache, world.head_cls, 60.0, 1e-4)
    dense, wide = torch.empty(1, 2, 64), torch.empty(1, 2, 100)
    Runner(step).run(query, world.cache, ids, bias, dense)
    Runner(step).run(query, world.cache, ids, bias, wide[..., :64])
    assert torch.equal(dense, wide[..., :64])
    assert wide[..., 64:].isnan().all()


@pytest.mark.parametrize("trust", [Trust.CACHED, Trust.NONE], ids=str)
def test_a_summary_query_of_any_stride(trust):
    world = World([PLAIN], block_size=16)
    world.head_cls = torch.stack([world.head_cls, torch.full_like(world.head_cls, 7)], -1)[:, 0]
    assert not world.head_cls.is_contiguous()
    check(world, world.step([(0, 0, 420)], trust=trust))
    check(world, world.step([(0, 420, 421)], given=False, trust=trust))


def test_empty_step():
    world = World([PLAIN])
    feed(world, (0, 0, 300))
    step = world.step([(0, 300, 300)])
    before = world.cache.clone()
    layer = TritonLayer(step)
    query, ids, bias = layer.prepare(*world.rows(step), world.cache, world.head_cls, 60.0, 1e-4)
    Runner(step).run(query, world.cache, ids, bias, torch.empty(0, 1, 64))
    torch.testing.assert_close(world.cache, before, rtol=0, atol=0, equal_nan=True)
