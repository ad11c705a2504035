"""What a step of several rows may meet: lengths and counts of nothing, sizes at their ends, and
neighbours that must not matter.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from dash_portable.kernels.launch_prefill import PrefillRow
from dash_portable.step import Trust
from dash_portable.triton_layer import TritonLayer
from tests.kernels import prefill_batch
from tests.kernels.prefill_batch import Batch, Part
from tests.kernels.world import Text, World, feed

PLAIN = Text(prompt=[0] * 300, answer=[0] * 20)


@pytest.mark.parametrize("end", [301, 303], ids=["one row", "rows"])
@pytest.mark.parametrize("trust", Trust)
def test_a_sequence_of_padding_has_any_length(trust: Trust, end: int) -> None:
    """Its table points outside."""
    world = World([PLAIN])
    feed(world, (0, 0, 300))
    prefix_lens = [64, 64] if trust is Trust.PREFIX else None
    step = world.step([(0, 300, end), None], given=False, trust=trust, prefix_lens=prefix_lens)
    step.seq_lens[1] = 200
    layer = TritonLayer(step)
    _, ids, _ = layer.prepare(*world.rows(step), world.cache, world.head_cls, 60.0, 1e-4)
    assert ids[:-1, :6].ge(0).all()
    assert ids[-1].eq(-1).all()
    step.seq_lens[1] = 2**31 - 1
    layer.refresh()
    _, ids, _ = layer.prepare(*world.rows(step), world.cache, world.head_cls, 60.0, 1e-4)
    assert ids[-1].eq(-1).all()


def test_counts_that_do_not_fit_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page said to begin at the end of the last remote block and to go on behind the row."""
    made = prefill_batch.config
    monkeypatch.setattr(prefill_batch, "config", lambda **keys: made(local_blocks=1, **keys))
    batch = Batch([Part(((1, 20), (1, 20), (1, 6)), 65, 1)], cache_block=16, page_of=1)
    batch.ranges[0, 1] = torch.tensor([1, 3])
    batch.starts[0, 2] = torch.tensor([63, 60])
    groups = batch.grouped(PrefillRow(tile=16))
    assert groups["last"].tolist() == [1]


@pytest.mark.parametrize("end", [1, 100], ids=["one row", "rows"])
def test_a_dropped_layer_gives_its_memory_back(end: int) -> None:
    world = World([PLAIN])
    gc.disable()
    try:
        layer = TritonLayer(world.step([(0, 0, end)]))
        query = weakref.ref(layer.query)
        del layer
        assert query() is None
    finally:
        gc.enable()
