"""Selection of rows that are alone in their sequence, beside the eager layer on the same cache."""

import pytest
import torch

from dash_portable.kernels import launch
from dash_portable.step import Trust
from dash_portable.triton_layer import TritonLayer
from tests.device import INTERPRETED
from tests.kernels.families import varied
from tests.kernels.world import Text, World, assert_same_cache, assert_same_selection, both, feed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LONG = Text(
    prompt=[0] * 5 + ([2] + [1] * 273) * 4 + [2, 0, 0] + [2] + [1] * 3 + [0] * 60,
    answer=[0] + [2, 0] * 5,
)
DENSE = Text(prompt=([2] + [1] * 5) * 80 + [0] * 200, answer=[2, 0] * 8)
PLAIN = Text(prompt=[0] * 1500, answer=[2] + [0] * 9)
ONE_PAGE = Text(prompt=[2] + [1] * 1500 + [0] * 30, answer=[0, 2, 0, 0])
TEXT_PAGE = Text(
    prompt=[2] + [1] * 40 + [2] + [0] * 700 + [2] + [1] * 300 + [0] * 20, answer=[2, 0, 2, 0, 2, 0]
)


@pytest.fixture(
    params=[(16, False, False), (16, True, False), (64, True, False), (16, True, True)],
    ids=["launches", "ticket", "tile-64", "ahead"],
)
def row(request, monkeypatch):
    """Small tiles, so that short contexts have several; both ways to merge and to ask."""
    tile, ticket, ahead = request.param
    found = launch.SelectRow(tile=tile, ticket=ticket, programs=24, ahead=ahead)
    monkeypatch.setattr(launch, "JOINT_HEADS", 1 if ahead else 16)
    monkeypatch.setattr(launch, "NARROW", 16 if ahead else 32)
    monkeypatch.setattr(launch, "SELECT", {"*": (found,)})
    return found


def filled(text, **options):
    world = World([text], **options)
    feed(world, (0, 0, len(text.prompt)))
    return world


def check(world, step, tolerance=2e-3):
    """The fused launch, and store and select apart: the same cache, the same blocks.

    Both rotate by the same formula, bit for bit in the interpreter. Of two compiled kernels one may
    round a product that the other adds unrounded: cosines and sines are then off by an ulp or two,
    a number of a query by a few of its terms, and by one of its own dtype once it is rounded.
    """
    ours, theirs, rows, twin = both(world, step)
    apart, other = TritonLayer(step), world.cache.clone()
    query, ids, bias = ours.prepare(*rows, world.cache, world.head_cls, 60.0, 1e-4)
    query2, index_query = apart.store(*rows, other, world.head_cls)
    again = apart.select(index_query, other, world.head_cls, 60.0, 1e-4)
    if INTERPRETED:
        assert torch.equal(query, query2)
        assert torch.equal(bias, again[1])
    largest = float(rows[0][step.row_pos >= 0].abs().max())
    rounding = 0.0 if world.dtype == torch.float32 else torch.finfo(world.dtype).eps
    terms = 8 * torch.finfo(torch.float32).eps * largest
    torch.testing.assert_close(query, query2, rtol=rounding, atol=terms)
    assert_same_selection((ids, bias), again, tolerance)
    theirs.store(*rows, twin, world.head_cls)
    assert_same_cache(world, world.cache, twin)
    wanted = theirs.select(index_query, world.cache, world.head_cls, 60.0, 1e-4)
    assert_same_selection((ids, bias), wanted, tolerance)
    return ids


@pytest.mark.parametrize(
    "text",
    [LONG, DENSE, PLAIN, ONE_PAGE, TEXT_PAGE],
    ids=["long", "dense", "plain", "one-page", "text-page"],
)
def test_answers(text, row):
    world = filled(text)
    first = len(text.prompt)
    for at in range(first, first + min(len(text.answer), 4 if text is LONG else 6)):
        check(world, world.step([(0, at, at + 1)], given=False))


def test_batch_with_padding_and_tables(row):
    texts = [LONG, DENSE, PLAIN, TEXT_PAGE]
    world = World(texts, block_size=64)
    feed(world, *[(i, 0, len(text.prompt) + i) for i, text in enumerate(texts)])
    ends = [len(text.prompt) + i for i, text in enumerate(texts)]
    parts = [None, *[(i, end, end + 1) for i, end in enumerate(ends)], None]
    ids = check(world, world.step(parts, given=False))
    assert (ids[0] == -1).all()
    assert (ids[-1] == -1).all()
    ends = [end + 1 for end in ends]
    check(
        world, world.step([*[(i, end, end + 1) for i, end in enumerate(ends)], None], tables=True)
    )


@pytest.mark.parametrize(("dtype", "block_size"), varied(DTYPES, [8, 16, 128]))
def test_types_and_block_sizes(dtype, block_size):
    text = Text(prompt=([2] + [1] * 100) * 3 + [0] * 220, answer=[0, 2, 0, 2, 0])
    world = World(
        [text], dtype=dtype, block_size=block_size, kv_heads=2, group=2, width=80, strided=True
    )
    feed(world, (0, 0, len(text.prompt)))
    for at in range(len(text.prompt), len(text.roles)):
        check(world, world.step([(0, at, at + 1)], given=False))


@pytest.mark.parametrize("length", [1, 31, 128, 129, 159, 160, 161, 192, 193])
def test_short_sequences(length):
    text = Text(prompt=[2] + [1] * 10 + [0] * (length - 1), answer=[])
    world = World([Text(prompt=text.prompt[:length], answer=[])])
    if length > 1:
        feed(world, (0, 0, length - 1))
    check(world, world.step([(0, length - 1, length)]))


def test_single_prompt_rows_select_before_all_pages_are_known(row):
    text = Text(prompt=[2] * 300 + [1] * 300, answer=[])
    world = World([text])
    feed(world, (0, 0, 250))
    check(world, world.step([(0, 250, 251)]))
    feed(world, (0, 251, 500))
    check(world, world.step([(0, 500, 501)]))


def scored(world, change):
    """A row over 46 blocks whose summaries `change` made up; ours and the eager selection."""
    step = world.step([(0, 1500, 1501)], given=False)
    ours, theirs, rows, twin = both(world, step)
    _, index_query = ours.store(*rows, world.cache, world.head_cls)
    theirs.store(*rows, twin, world.head_cls)
    change(world.cache, index_query)
    found = ours.select(index_query, world.cache, world.head_cls, 60.0, 1e-4)
    wanted = theirs.select(index_query, world.cache, world.head_cls, 60.0, 1e-4)
    return found, wanted


def summary(world, b):
    """Places of both halves of block b's summary."""
    slots = world.slots(0, 32 * b, 32 * b + 2)
    return [(slot // world.block_size, -1, slot % world.block_size) for slot in slots.tolist()]


@pytest.mark.parametrize(
    "value", [0.0, float("nan"), 1e30, -1e30], ids=["zero", "nan", "huge", "negative"]
)
def test_equal_scores_give_the_lowest_blocks(value, row):
    world = filled(PLAIN)

    def change(cache, index_query):
        for b in range(46):
            for place in summary(world, b):
                cache[place][96:] = value
        index_query.fill_(1.0)

    found, wanted = scored(world, change)
    assert found[0].tolist() == [list(range(12))]
    assert_same_selection(found, wanted)


def test_nan_and_ties_among_scores(row):
    world = filled(PLAIN)

    def change(cache, index_query):
        index_query.fill_(1.0)
        for b in range(46):
            for place in summary(world, b):
                cache[place][96:] = float("nan") if b % 3 == 0 else (b % 5) / 8

    found, wanted = scored(world, change)
    assert_same_selection(found, wanted)
    assert found[0].tolist() == [[4, 14, 19, 29, 34, 8, 13, 23, 28, 38, 2, 7]]


@pytest.mark.parametrize(("topk", "window"), [(1, 1), (5, 9), (16, 16)])
def test_other_windows(topk, window, row):
    world = filled(PLAIN, topk=topk, window=window, local_blocks=2)
    check(world, world.step([(0, 1500, 1501)], given=False))


@pytest.mark.parametrize("block", [8, 16, 64])
def test_other_blocks(block):
    text = Text(prompt=([2] + [1] * 70) * 5 + [0] * 250, answer=[0, 2, 0, 2, 0])
    world = World([text], block=block, block_size=max(16, block))
    feed(world, (0, 0, len(text.prompt)))
    for at in range(len(text.prompt), len(text.roles)):
        check(world, world.step([(0, at, at + 1)], given=False))


@pytest.mark.parametrize("tables", [False, True], ids=["rows", "table"])
def test_another_owners_cache(tables, row):
    texts = [LONG, DENSE]
    world = World(texts)
    ends = [len(text.prompt) + 4 for text in texts]
    feed(world, *[(i, 0, end) for i, end in enumerate(ends)])
    for i, end in enumerate(ends):
        slots = world.slots(i, 0, end)
        world.cache[slots // world.block_size, -1, slots % world.block_size, 64 + 22 :] = 3.0
    parts = [*[(i, end, end + 1) for i, end in enumerate(ends)], None]
    step = world.step(parts, given=False, tables=tables, trust=Trust.NONE)
    ours, theirs, rows, twin = both(world, step)
    _, ids, bias = ours.prepare(*rows, world.cache, world.head_cls, 60.0, 1e-4)
    theirs.store(*rows, twin, world.head_cls)
    wanted = theirs.select(ours.index_query, world.cache, world.head_cls, 60.0, 1e-4)
    assert_same_selection((ids, bias), wanted)


def test_prefix_of_trusted_summaries(row):
    world = filled(LONG)
    at = len(LONG.prompt)
    for slots in (world.slots(0, 20 * 32, at),):
        world.cache[slots // world.block_size, -1, slots % world.block_size, 96:] = 9.0
    step = world.step([(0, at, at + 1)], given=False, trust=Trust.PREFIX, prefix_lens=[20 * 32 + 5])
    ours, theirs, rows, twin = both(world, step)
    _, ids, bias = ours.prepare(*rows, world.cache, world.head_cls, 60.0, 1e-4)
    theirs.store(*rows, twin, world.head_cls)
    wanted = theirs.select(ours.index_query, world.cache, world.head_cls, 60.0, 1e-4)
    assert_same_selection((ids, bias), wanted)


def test_a_rows_selection_does_not_see_its_batch(row):
    texts = [PLAIN, LONG, DENSE]
    world = World(texts)
    feed(world, *[(i, 0, len(text.prompt)) for i, text in enumerate(texts)])
    parts = [(i, len(text.prompt), len(text.prompt) + 1) for i, text in enumerate(texts)]

    def selected(which):
        step = world.step(which, given=False)
        layer, cache = TritonLayer(step), world.cache.clone()
        return layer.prepare(*world.rows(step), cache, world.head_cls, 60.0, 1e-4)[1:]

    ids, bias = selected(parts)
    for i, part in enumerate(parts):
        alone = selected([part])
        assert torch.equal(ids[i : i + 1], alone[0])
        assert torch.equal(bias[i : i + 1], alone[1])


def test_tickets_are_clean_after_a_run(row):
    world = filled(PLAIN)
    step = world.step([(0, 1500, 1501)], given=False)
    layer = TritonLayer(step)
    first = [
        x.clone() for x in layer.prepare(*world.rows(step), world.cache, world.head_cls, 60.0, 1e-4)
    ]
    again = layer.prepare(*world.rows(step), world.cache, world.head_cls, 60.0, 1e-4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
