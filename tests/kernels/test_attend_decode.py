"""Decode attention beside the oracle in float64, on the ids and biases it is given."""

import pytest
import torch

from dash_portable import reference
from dash_portable.backends.triton import Runner
from dash_portable.kernels import launch
from tests.kernels.families import varied
from tests.kernels.tolerance import allowed_error
from tests.kernels.world import Text, World, feed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [700, 33, 160, 1, 401]


@pytest.fixture(
    params=[
        (1, False, False),
        (2, True, True),
        (4, False, False),
        (4, True, False),
        (16, True, True),
    ],
    ids=lambda p: f"split-{p[0]}-ticket-{p[1]}-dot-{p[2]}",
)
def row(request, monkeypatch):
    split, ticket, dot = request.param
    found = launch.AttendRow(split=split, ticket=ticket, dot=dot)
    monkeypatch.setattr(launch, "ATTEND", {"*": (found,)})


def attended(world, step, ids, bias, query, dtype, magnitudes=False):
    """The oracle row by row, in a dtype; of the values' magnitudes, if asked."""
    out = torch.zeros(query.shape, dtype=dtype)
    for n in (step.row_pos >= 0).nonzero().flatten().tolist():
        end = int(step.row_pos[n]) + 1
        token = torch.arange(end)
        block = step.block_table[int(step.row_seq[n])][token // world.block_size].long()
        rows = world.cache[block, :-1, token % world.block_size].to(dtype)
        values = rows[..., world.width :]
        out[n] = reference.attend(
            query[n : n + 1].to(dtype),
            rows[..., : world.width],
            values.abs() if magnitudes else values,
            ids[n : n + 1],
            bias[n : n + 1].to(dtype),
            torch.tensor([end - 1]),
            world.config,
        )[0]
    return out


def check(world, step, seed=0):
    random = torch.Generator().manual_seed(seed)
    config, rows = world.config, step.num_rows
    ids = torch.full((rows, config.topk), -1, dtype=torch.int32)
    bias = torch.zeros(rows, config.topk)
    for n in range(rows):
        remote = max(int(step.row_pos[n]) // config.block - config.local_blocks + 1, 0)
        kept = torch.randperm(remote, generator=random)[: config.topk].sort(descending=True).values
        ids[n, : len(kept)] = kept.int()
        bias[n, : len(kept)] = torch.randn(len(kept), generator=random) * 3
    query = torch.randn((rows, step.heads, step.head_dim), generator=random).to(world.dtype)
    query[step.row_pos < 0] = torch.nan
    out = torch.empty_like(query)
    runner = Runner(step)
    for _ in range(2):  # a second time: tickets and scratch left over
        runner.run(query, world.cache, ids, bias, out)
    assert (out[step.row_pos < 0] == 0).all()
    exact = attended(world, step, ids, bias, query, torch.float64)
    eager = attended(world, step, ids, bias, query, torch.float32).to(world.dtype)
    spread = attended(world, step, ids, bias, query, torch.float64, magnitudes=True)
    allowed = allowed_error(exact, eager, spread, config.topk * config.block + config.local)
    error = (out.double() - exact).abs().max()
    assert error <= allowed
    return out


def world_of(lengths=LENGTHS, **options):
    texts = [Text(prompt=[2] + [1] * (length - 1), answer=[]) for length in lengths]
    world = World(texts, **options)
    feed(world, *[(i, 0, length) for i, length in enumerate(lengths)])
    step = world.step([None, *[(i, n - 1, n) for i, n in enumerate(lengths)], None])
    return world, step


@pytest.mark.parametrize("group", [1, 4, 8])
def test_splits_and_groups(group, row):
    check(*world_of(kv_heads=2, group=group))


@pytest.mark.parametrize(("dtype", "width", "group"), varied(DTYPES, [64, 80, 128], [1, 3]))
def test_types_and_widths(dtype, width, group):
    check(*world_of([300, 161], dtype=dtype, width=width, kv_heads=2, group=group, strided=True))


@pytest.mark.parametrize("block_size", [1, 8, 16, 128])
def test_block_sizes(block_size):
    check(*world_of([401, 64], block_size=block_size, dtype=torch.bfloat16))


@pytest.mark.parametrize(("block", "local_blocks", "topk"), [(8, 3, 5), (64, 1, 12), (16, 4, 16)])
def test_other_rules(block, local_blocks, topk, row):
    check(*world_of([500, 90], block=block, local_blocks=local_blocks, topk=topk, block_size=64))


def test_every_length_over_the_window():
    lengths = list(range(127, 131)) + list(range(158, 163))
    check(*world_of(lengths))


def test_deterministic_rows_do_not_see_their_batch(monkeypatch):
    rows = (launch.AttendRow(programs=2, split=16), launch.AttendRow(split=1))
    monkeypatch.setattr(launch, "ATTEND", {"*": rows})
    world, _ = world_of()
    ids = torch.full((3, 12), -1, dtype=torch.int32)
    ids[0, :4] = torch.tensor([3, 9, 1, 0])
    bias = torch.zeros(3, 12)
    query = world.random(3, 1, 64)

    def attended_in(parts):
        step = world.step(parts, deterministic=True)
        n = len(parts)
        out = torch.empty_like(query[:n])
        Runner(step).run(query[:n], world.cache, ids[:n], bias[:n], out)
        return out

    together = attended_in([(0, 699, 700), (1, 32, 33), (4, 400, 401)])
    assert torch.equal(together[:1], attended_in([(0, 699, 700)]))
