"""What a step of several rows may meet: lengths and counts of nothing, sizes at their ends, and
neighbours that must not matter.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from dash_portable.backends.triton import Runner
from dash_portable.kernels.launch_prefill import PrefillRow
from dash_portable.step import Step, Trust
from dash_portable.triton_layer import TritonLayer
from tests.kernels import prefill_batch
from tests.kernels.prefill_batch import Batch, Part
from tests.kernels.test_attend_prefill import check, choose
from tests.kernels.world import Text, World, feed

PLAIN = Text(prompt=[0] * 300, answer=[0] * 20)


def sized(monkeypatch: pytest.MonkeyPatch, **keys: object) -> None:
    """Batches of another configuration."""
    made = prefill_batch.config
    monkeypatch.setattr(prefill_batch, "config", lambda **more: made(**{**keys, **more}))


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
    sized(monkeypatch, local_blocks=1)
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


SIZES = [  # sparse block, cache block, local blocks, union blocks and local keys of one step
    (8, 4, 1, 2, 32),
    (8, 24, 5, 4, 64),
    (16, 16, 1, 1, 32),
    (16, 32, 3, 2, 64),
    (64, 32, 1, 2, 64),
    (128, 64, 1, 1, 128),
    (128, 256, 2, 2, 128),
]


@pytest.mark.parametrize("by_block", [False, True], ids=["by-tile", "by-block"])
@pytest.mark.parametrize(("block", "held", "local", "blocks", "step"), SIZES)
def test_blocks_of_every_size(
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    held: int,
    local: int,
    blocks: int,
    step: int,
    by_block: bool,
) -> None:
    """Rows around the first remote block, in the middle of blocks, and far behind."""
    sized(monkeypatch, block=block, local_blocks=local)
    window = block * local
    parts = [
        Part((), window + block + 1, 10, padding=3),
        Part(((2, block + 3), (1, block)), window + 5 * block + 7, 21),
        Part((), block - 1, 1),
    ]
    launch = PrefillRow(
        tile=16,
        select_groups=16,
        union_limit=0 if by_block else 64,
        union_all=0,
        tile_blocks=blocks,
        tile_step=step,
        pair_tile=16,
    )
    batch = Batch(parts, heads=1, cache_block=held)
    groups = batch.grouped(launch)
    ids, bias = choose(batch, alike=0.5)
    check(batch, batch.attend(launch, groups, ids, bias)[0], ids, bias)


@pytest.mark.parametrize(("block", "local", "step"), [(8, 1, 32), (32, 4, 32)])
def test_a_row_by_block_has_its_bits_in_any_batch(
    monkeypatch: pytest.MonkeyPatch, block: int, local: int, step: int
) -> None:
    sized(monkeypatch, block=block, local_blocks=local)
    launch = PrefillRow(
        tile=16, union_limit=0, union_all=0, tile_blocks=2, tile_step=step, pair_tile=16
    )
    whole = Part(((1, 70), (2, 30)), 6 * block + 150, 50)
    first = Batch([whole], heads=1, dtype=torch.bfloat16)
    ids, bias = choose(first, alike=0.3)
    wanted, _ = first.attend(launch, first.grouped(launch), ids, bias)
    token = torch.arange(whole.length)
    for rows in (1, 27):
        cut = Batch([Part((), 40, 3, padding=2), whole._replace(rows=rows)], heads=1,
                    dtype=torch.bfloat16)  # fmt: skip
        cut.cache[cut.table[1, token // 32].long(), :, token % 32] = first.cache[
            first.table[0, token // 32].long(), :, token % 32
        ]
        cut.query[-rows:] = first.query[-rows:]
        own_ids = torch.full((cut.num_rows, 12), -1, dtype=torch.int32)
        own_bias = torch.zeros(cut.num_rows, 12)
        own_ids[-rows:], own_bias[-rows:] = ids[-rows:], bias[-rows:]
        found, _ = cut.attend(launch, cut.grouped(launch), own_ids, own_bias, budget=1)
        assert torch.equal(found[-rows:], wanted[-rows:])


def served(world: World, step: Step, layer: TritonLayer, runner: Runner) -> list[torch.Tensor]:
    query, ids, bias = layer.prepare(*world.rows(step), world.cache, world.head_cls, 60.0, 1e-4)
    out = torch.full_like(query, torch.nan)
    runner.run(query, world.cache, ids, bias, out)
    return [ids.clone(), bias.clone(), out]


LONG = Text(prompt=([2] + [1] * 100) * 2 + [0] * 60, answer=[0, 2] + [0] * 10)


@pytest.mark.parametrize("trust", Trust)
def test_a_refilled_step_is_the_new_one(trust: Trust) -> None:
    """The tensors change in place, sequences change places: nothing of the step before is left."""
    world = World([LONG, PLAIN])
    ends = [len(LONG.prompt), len(PLAIN.prompt)]
    feed(world, (0, 0, ends[0]), (1, 0, ends[1]))

    def made(*seqs: int, at: int, graph: bool) -> Step:
        parts = [(i, ends[i] + at, ends[i] + at + 3) for i in seqs]
        prefix_lens = [64, 64] if trust is Trust.PREFIX else None
        return world.step(parts, given=False, trust=trust, prefix_lens=prefix_lens, graph=graph)

    step = made(0, 1, at=0, graph=True)
    layer, runner = TritonLayer(step), Runner(step)
    served(world, step, layer, runner)
    other = made(1, 0, at=3, graph=False)
    for name in ("seq_lens", "block_table", "slots", "roles", "row_pos"):
        getattr(step, name).copy_(getattr(other, name))
    layer.refresh()
    runner.refresh()
    found = served(world, step, layer, runner)
    for ours, wanted in zip(
        found, served(world, other, TritonLayer(other), Runner(other)), strict=True
    ):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("deterministic", [False, True])
def test_layers_leave_nothing_to_one_another(deterministic: bool) -> None:
    """Two layers through one step, and the second one alone."""
    worlds = [World([LONG, PLAIN], seed=seed) for seed in (0, 1)]
    worlds[1].blocks = worlds[0].blocks
    for world in worlds:
        feed(world, (0, 0, 200), (1, 0, 285))
    parts = [(0, 200, 212), None, (1, 285, 290)]
    step = worlds[0].step(parts, padding=2, deterministic=deterministic)
    layer, runner = TritonLayer(step), Runner(step)
    before = worlds[1].cache.clone()
    second = [served(world, step, layer, runner) for world in worlds][1]
    worlds[1].cache.copy_(before)
    alone = served(worlds[1], step, TritonLayer(step), Runner(step))
    for ours, wanted in zip(second, alone, strict=True):
        assert torch.equal(ours, wanted)


def test_two_plans_of_one_step_keep_their_own_rows() -> None:
    """One of them is refreshed when padding becomes a live row; the other's order is old."""
    world = World([PLAIN])
    feed(world, (0, 0, 300))
    step = world.step([(0, 300, 303)], given=False, graph=True)
    slots, row_pos = step.slots.clone(), step.row_pos.clone()
    step.slots[0], step.row_pos[0] = -1, -1
    step.slots[1:], step.row_pos[1:] = slots[:2], row_pos[:2]
    step.seq_lens[0] = 302
    plans = [(TritonLayer(step), Runner(step)) for _ in range(2)]
    for plan in plans:
        served(world, step, *plan)
    step.slots.copy_(slots)
    step.row_pos.copy_(row_pos)
    step.seq_lens[0] = 303
    for one in plans[0]:
        one.refresh()
    assert served(world, step, *plans[0])[2].isfinite().all()
