"""A cache and a page table may say anything of pages: no kernel reads or writes outside its
tensors for it, and sequences that are sound are served as if alone.
"""

from dataclasses import replace

import pytest
import torch

from dash_portable import cache as layout
from dash_portable.backends.triton import Runner
from dash_portable.kernels import launch
from dash_portable.step import Trust
from dash_portable.triton_layer import TritonLayer
from tests.device import INTERPRETED
from tests.kernels.world import Text, World, feed

if not INTERPRETED:
    pytest.skip("addresses are seen by the interpreter", allow_module_level=True)

from tests.kernels.bounds import addresses_checked

# Blanks are NaN, and a number of pages that is nonsense leads to them.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")

LARGEST = 2**31 - 1
SOUND = Text(prompt=([2] + [1] * 70) * 3 + [0] * 60, answer=[2, 0, 2, 0])
SPOILT = Text(prompt=([2] + [1] * 40) * 6 + [0] * 90, answer=[2, 2, 0, 0])
NONSENSE = [LARGEST, -LARGEST - 1, 2**30, -7, 300, 5000]
BLOCKS = [{}, {"block_size": 16, "block": 16, "local_blocks": 1}]


def spoil(world, value, row):
    """State, counts, starts and ranges of every stored row of the second sequence."""
    aux = layout.auxiliary(world.cache)
    slots = world.slots(1, 0, row)
    made = layout.to_bytes(torch.full((1, 6), value), 4).flatten(-2)
    at = (slots // world.block_size, slots % world.block_size)
    aux[(*at, slice(world.width + 2, world.width + 26))] = made.to(aux.dtype)


def outputs(world, step):
    layer, rows = TritonLayer(step), world.rows(step)
    query, ids, bias = layer.prepare(*rows, world.cache, world.head_cls, 60.0, 1e-4)
    out = torch.full_like(query, torch.nan)
    Runner(step).run(query, world.cache, ids, bias, out)
    return [x.clone() for x in (query, ids, bias, out)]


def check(value, lengths, parts, options, *, tables=False, **how):
    """The first sequence's rows beside a spoilt second one, and beside a sound one."""
    found = []
    for spoilt in (False, True):
        world = World([SOUND, SPOILT], **options)
        feed(world, *[(i, 0, length) for i, length in enumerate(lengths)])
        step = world.step(parts, tables=tables, **how)
        if tables and spoilt:
            step.page_table[[i for i, part in enumerate(parts) if part and part[0] == 1]] = value
        if spoilt:
            spoil(world, value, lengths[1])
            with addresses_checked():
                found.append(outputs(world, step))
        else:
            found.append(outputs(world, step))
    sound = torch.cat([torch.arange(step.num_rows)[step.row_seq == i] for i in range(len(parts))
                       if parts[i] is None or parts[i][0] == 0])  # fmt: skip
    for clean, beside in zip(*found, strict=True):
        assert torch.equal(clean[sound].nan_to_num(7), beside[sound].nan_to_num(7))


@pytest.fixture(params=[True, False], ids=["ticket", "launches"])
def row(request, monkeypatch):
    found = launch.SelectRow(tile=16, programs=8, ticket=request.param)
    monkeypatch.setattr(launch, "SELECT", {"*": (found,)})
    monkeypatch.setattr(launch, "NARROW", 16)


@pytest.mark.parametrize("options", BLOCKS, ids=["32-32", "16-16"])
@pytest.mark.parametrize("tables", [False, True], ids=["cache", "table"])
@pytest.mark.parametrize("value", NONSENSE)
def test_decode(row, value, tables, options):
    lengths = [len(SOUND.prompt), len(SPOILT.prompt)]
    parts = [None, *[(i, n, n + 1) for i, n in enumerate(lengths)]]
    check(value, lengths, parts, options, given=False, tables=tables)


@pytest.mark.parametrize("trust", [Trust.NONE, Trust.PREFIX], ids=str)
@pytest.mark.parametrize("tables", [False, True], ids=["cache", "table"])
@pytest.mark.parametrize("value", [LARGEST, -7, 5000])
def test_decode_beside_the_cache(row, value, tables, trust):
    lengths = [len(SOUND.prompt), len(SPOILT.prompt)]
    parts = [(i, n, n + 1) for i, n in enumerate(lengths)]
    more = {"prefix_lens": [64, 64]} if trust is Trust.PREFIX else {}
    check(value, lengths, parts, {}, given=False, tables=tables, trust=trust, **more)


@pytest.mark.parametrize("given", [False, True], ids=["continued", "positions"])
@pytest.mark.parametrize("tables", [False, True], ids=["cache", "table"])
@pytest.mark.parametrize("value", NONSENSE)
def test_several_rows(value, tables, given):
    """Chunks of a prompt with its answer (positions), or of the answer alone."""
    lengths = [len(SOUND.prompt), len(SPOILT.prompt)]
    if given:
        lengths = [n - 5 for n in lengths]
    ends = [len(SOUND.roles), len(SPOILT.roles)]
    parts = [(i, *ends_of) for i, ends_of in enumerate(zip(lengths, ends, strict=True))]
    check(value, lengths, parts, {}, given=given, tables=tables)


@pytest.mark.parametrize("value", NONSENSE)
def test_rebuild(value):
    """Of a sequence whose state is nonsense, summaries are made and nothing else is touched."""
    world = World([SOUND, SPOILT])
    lengths = [len(SOUND.prompt), len(SPOILT.prompt)]
    feed(world, *[(i, 0, length) for i, length in enumerate(lengths)])
    spoil(world, value, lengths[1])
    step = world.step([(i, n, n) for i, n in enumerate(lengths)])
    twin = world.cache.clone()
    with addresses_checked():
        TritonLayer(replace(step, trust=Trust.NONE)).rebuild(world.cache, world.head_cls)
    own = world.blocks[1].long()
    others = torch.ones(len(twin), dtype=torch.bool)
    others[own] = False
    torch.testing.assert_close(world.cache[others], twin[others], equal_nan=True)
    assert torch.equal(world.cache[own, :-1].nan_to_num(7), twin[own, :-1].nan_to_num(7))
