"""Store: coordinates, rotation and everything that is written, beside the eager layer."""

import pytest
import torch

from dash_portable.step import Trust
from dash_portable.triton_layer import TritonLayer
from tests.kernels.families import varied
from tests.kernels.world import Text, World, assert_same_cache, both, feed

PAGES = Text(
    prompt=[0] * 3 + ([2] + [1] * 41) * 3 + [2, 0, 0, 1, 1] + [2] * 2 + [1] * 20 + [0] * 9,
    answer=[0, 2, 0, 0, 1, 2, 2, 0] + [0] * 30,
)
MARKERS = Text(prompt=[2] * 70 + [1] * 4 + [0] * 3, answer=[2, 0])
PLAIN = Text(prompt=[0, 2, 0, 2] * 20, answer=[2, 0, 2] + [0] * 20)
NO_MARKER = Text(prompt=[1] * 50 + [0] * 4, answer=[0, 2, 0, 2, 0])
ENDS_IN_IMAGE = Text(prompt=[2] + [1] * 34, answer=[0, 2, 1] + [0] * 40)
ONE = Text(prompt=[2], answer=[0])
TEXTS = [PAGES, MARKERS, PLAIN, NO_MARKER, ENDS_IN_IMAGE, ONE]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(world, step, **options):
    ours, theirs, rows, twin = both(world, step)
    query, index_query = ours.store(*rows, world.cache, world.head_cls, **options)
    wanted, wanted_index = theirs.store(*rows, twin, world.head_cls, **options)
    assert_same_cache(world, world.cache, twin)
    live = step.row_pos >= 0
    eps = torch.finfo(world.dtype).eps
    for found, exact in ((query, wanted), (index_query, wanted_index)):
        torch.testing.assert_close(found[live], exact[live], rtol=0, atol=8 * eps + 2e-6)
    assert torch.equal(ours.coordinates[live], theirs.coordinates[live])
    return ours


@pytest.mark.parametrize(
    "text", TEXTS, ids=["pages", "markers", "plain", "no-marker", "image-end", "one"]
)
@pytest.mark.parametrize("tables", [False, True], ids=["rows", "table"])
def test_prompt_in_chunks_then_rows(text, tables):
    world = World([text])
    prompt, total = len(text.prompt), len(text.roles)
    for first, end in ((0, min(5, prompt)), (min(5, prompt), prompt)):
        if end > first:
            check(world, world.step([(0, first, end)], tables=tables))
    for at in range(prompt, min(total, prompt + 10)):
        check(world, world.step([(0, at, at + 1)], given=at % 2 == 0, tables=tables))


@pytest.mark.parametrize(("dtype", "block_size"), varied(DTYPES, [8, 16, 64, 128]))
def test_block_sizes_and_types(dtype, block_size):
    world = World(
        [PAGES], dtype=dtype, block_size=block_size, kv_heads=2, group=2, strided=True, width=80
    )
    check(world, world.step([(0, 0, 61)]))
    check(world, world.step([(0, 61, len(PAGES.prompt) + 3)], padding=2))


@pytest.mark.parametrize(("dtype", "block_size"), varied(DTYPES, [1, 16, 128]))
def test_rows_close_their_block(dtype, block_size):
    world = World(
        [PAGES, ENDS_IN_IMAGE], dtype=dtype, block_size=block_size, kv_heads=2, group=4, width=96
    )
    feed(world, (0, 0, 159), (1, 0, 63))
    check(world, world.step([None, (0, 159, 160), (1, 63, 64), None]))
    check(world, world.step([(1, 64, 65), None, (0, 160, 161)]))


def test_mixed_step():
    world = World(TEXTS[:5])
    feed(world, (0, 0, 100), (1, 0, 30), (2, 0, 83), (3, 0, 54))
    parts = [(0, 100, 190), (1, 30, 79), (2, 83, 84), None, (3, 54, 57), (4, 0, 36)]
    check(world, world.step(parts))
    check(world, world.step([(0, 190, 191), (2, 84, 85), None, (4, 36, 37)], tables=True))


def test_many_decoded_rows_at_once():
    text = Text(prompt=PAGES.prompt, answer=[0, 2, 0, 1] * 80)
    world = World([text])
    feed(world, (0, 0, len(text.prompt)))
    check(world, world.step([(0, len(text.prompt), len(text.prompt) + 300)], given=False))


def test_many_pages_carry_their_start():
    text = Text(prompt=[2, 1] * 150 + [0] * 5, answer=[2, 0])
    world = World([text])
    for first, end in ((0, 70), (70, 71), (71, 305)):
        check(world, world.step([(0, first, end)]))
    check(world, world.step([(0, 305, 306)], given=False))


def test_recomputed_rows_write_no_counts():
    world = World([PAGES])
    feed(world, (0, 0, len(PAGES.prompt) + 8))
    first = len(PAGES.prompt) - 3
    step = world.step([(0, first, first + 10)], recomputed=True)
    positions = step.positions
    positions[:3, 3:] = torch.tensor([[7], [2], [6]])
    check(world, step)


def test_without_head_cls_no_summary_is_written():
    world = World([PAGES])
    step = world.step([(0, 0, 170)])
    ours, theirs, rows, twin = both(world, step)
    ours.store(*rows, world.cache, None)
    theirs.store(*rows, twin, None)
    assert_same_cache(world, world.cache, twin)
    assert world.cache[:, -1, :, 96:].isnan().all()


def test_padding_writes_nothing():
    world = World([PAGES])
    for step in (world.step([None]), world.step([None, (0, 0, 2)], padding=3)):
        before = world.cache.clone()
        ours = TritonLayer(step)
        ours.store(*world.rows(step), world.cache, world.head_cls)
        unchanged = (world.cache == before) | (world.cache.isnan() & before.isnan())
        slots = step.slots[step.slots >= 0]
        unchanged[slots // world.block_size, :, slots % world.block_size] = True
        assert unchanged.all()


def test_rows_of_a_wider_tensor():
    world = World([PAGES], kv_heads=2)
    step = world.step([(0, 0, 40)])
    ours, theirs, rows, twin = both(world, step)
    wide = [torch.cat([x, x * torch.nan], -2 if x.dim() == 3 else -1) for x in rows]
    cut = [w[:, : x.shape[1]] for w, x in zip(wide, rows, strict=True)]
    ours.store(*cut, world.cache, world.head_cls)
    theirs.store(*rows, twin, world.head_cls)
    assert_same_cache(world, world.cache, twin)


@pytest.mark.parametrize("tables", [False, True], ids=["rows", "table"])
def test_rebuild_fills_the_free_place(tables):
    world = World([PAGES, MARKERS, PLAIN, NO_MARKER])
    ends = [len(text.roles) for text in world.texts]
    feed(world, *[(i, 0, end) for i, end in enumerate(ends)])
    twin = world.cache.clone()
    for i, blocks in enumerate(world.blocks):
        slots = world.slots(i, 0, ends[i])
        world.cache[slots // world.block_size, -1, slots % world.block_size, 64 + 22 :] = 333.5
        assert len(blocks)
    parts = [*[(i, end - 1, end) for i, end in enumerate(ends)], None]
    step = world.step(parts, tables=tables, trust=Trust.NONE)
    TritonLayer(step).rebuild(world.cache, world.head_cls)
    blank = twin.isnan() | (world.cache == 333.5)
    known = ~blank
    assert torch.equal(blank & ~twin.isnan(), torch.zeros_like(blank))
    torch.testing.assert_close(world.cache[known], twin[known], rtol=0, atol=1e-5)
