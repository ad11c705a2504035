"""Unions, inversion and attention of prefill rows, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dash_portable.kernels.launch_prefill import PrefillRow
from dash_portable.kernels.prefill import attend_shapes
from tests.kernels.prefill_batch import Batch, Part
from tests.kernels.tolerance import allowed_error

BOTH = PrefillRow(tile=16, select_groups=16, union_limit=14, union_all=0, pair_tile=16)
FORMS = {
    "both": BOTH,
    "by-block": BOTH._replace(union_limit=0),
    "by-tile": BOTH._replace(union_all=64),
    "by-tile-two": BOTH._replace(union_limit=63, tile_blocks=2, tile_step=64),
    "by-tile-four": BOTH._replace(union_limit=64, tile_blocks=4, tile_step=128, merge_programs=3),
}
PARTS = [
    Part(((1, 90), (3, 120)), 330, 40, padding=3),
    Part((), 610, 21),
    Part((), 1, 1, padding=1),
    Part(((1, 60),), 400, 1),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def choose(batch: Batch, *, alike: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random blocks among the candidates of each row; `alike` of the rows take the first twelve."""
    draw = torch.Generator().manual_seed(seed)
    topk = batch.config.topk
    ids = torch.full((batch.num_rows, topk), -1, dtype=torch.int32)
    bias = torch.zeros(batch.num_rows, topk)
    for i in batch.live():
        blocks = torch.tensor(batch.candidates(i)[0], dtype=torch.int32)
        if float(torch.rand((), generator=draw)) >= alike:
            blocks = blocks[torch.randperm(len(blocks), generator=draw)]
        used = min(len(blocks), topk)
        ids[i, :used] = blocks[:used]
        bias[i, :used] = torch.randn(used, generator=draw)
    padding = batch.row["pos"] < 0
    ids[padding], bias[padding] = -1, 0.0
    return ids, bias


def check(batch: Batch, out: Tensor, ids: Tensor, bias: Tensor) -> None:
    """No further from the oracle than rounding explains; padding rows are 0."""
    exact = batch.attended(ids, bias)
    allowed = allowed_error(
        exact,
        batch.attended(ids, bias, batch.dtype),
        batch.attended(ids, bias, magnitudes=True),
        batch.config.topk * batch.config.block + batch.config.local,
    )
    wrong = torch.nan_to_num(out.double() - exact, nan=torch.inf).abs().max()
    assert wrong <= allowed
    assert out[batch.row["pos"] < 0].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_attend(form: str, dtype: torch.dtype) -> None:
    batch, launch = Batch(PARTS, dtype=dtype), FORMS[form]
    groups = batch.grouped(launch)
    ids, bias = choose(batch, alike=0.5)
    out, scratch = batch.attend(launch, groups, ids, bias)
    check(batch, out, ids, bias)
    tiles = int((groups["tiles"][:, 0] >= 0).sum())
    forms = scratch["count"][:tiles, 0].lt(0)
    if form == "both":
        assert forms.any()
        assert not forms.all()


@pytest.mark.parametrize("cache_block", [8, 16, 48, 64, 128])
@pytest.mark.parametrize("form", ["by-block", "by-tile-two"])
def test_cache_blocks(form: str, cache_block: int) -> None:
    batch, launch = Batch(PARTS[:2], heads=1, cache_block=cache_block), FORMS[form]
    ids, bias = choose(batch)
    check(batch, batch.attend(launch, batch.grouped(launch), ids, bias)[0], ids, bias)


@pytest.mark.parametrize(("heads", "group", "width"), [(1, 4, 64), (3, 2, 128), (1, 1, 80)])
@pytest.mark.parametrize("form", ["by-block", "by-tile"])
def test_heads_and_widths(form: str, heads: int, group: int, width: int) -> None:
    batch = Batch(PARTS[:1], heads=heads, group=group, width=width, dtype=torch.float16)
    launch = FORMS[form]._replace(pair_heads=2)
    ids, bias = choose(batch)
    check(batch, batch.attend(launch, batch.grouped(launch), ids, bias)[0], ids, bias)


def test_unions_and_lists() -> None:
    """Every tile has its union or its pairs in the lists of their blocks, each pair once."""
    batch, launch = Batch(PARTS, heads=1), BOTH
    groups = batch.grouped(launch)
    ids, bias = choose(batch, alike=0.5, seed=4)
    one = launch.tile * 12 * (batch.width * 4 + 4)
    _, scratch = batch.attend(launch, groups, ids, bias, budget=2 * one)
    chunks, keys = scratch["offset"].shape[0], scratch["offset"].shape[1] - 1
    tiles = groups["tiles"]
    chunk_tiles = -(-len(tiles) // chunks)
    assert chunks > 1
    assert scratch["part"].shape[0] == chunk_tiles * launch.tile * 12
    expected: dict[tuple[int, int, int], set[tuple[int, int]]] = {}
    for t, (seq, begin, end, *_) in enumerate(tiles.tolist()):
        if seq < 0:
            assert scratch["count"][t, 0] == 0
            continue
        rows = groups["order"][begin:end].long()
        blocks = sorted(set(ids[rows].flatten().tolist()) - {-1})
        if len(blocks) <= launch.union_limit:
            at = t * launch.union_room
            assert scratch["count"][t, 0] == len(blocks)
            assert scratch["union"][at : at + len(blocks)].tolist() == blocks
            for j, block in enumerate(blocks):
                hit = ids[rows] == block
                want = torch.where(
                    hit.any(1), (bias[rows] * hit).sum(1) * 1.4426950408889634, -torch.inf
                )
                got = scratch["weight"][at + j, : len(rows)]
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
            continue
        assert scratch["count"][t, 0] == -1
        for row in rows.tolist():
            for slot, block in enumerate(ids[row].tolist()):
                if block >= 0:
                    expected.setdefault((t // chunk_tiles, seq, block), set()).add((row, slot))
    found: dict[tuple[int, int, int], set[tuple[int, int]]] = {}
    for chunk in range(chunks):
        base = int(tiles[min(chunk * chunk_tiles, len(tiles) - 1), 1])
        for seq, block, begin, end in scratch["entry"][
            chunk, : scratch["first"][chunk, keys]
        ].tolist():
            assert 0 < end - begin <= launch.pair_tile
            for pair in scratch["pair"][chunk, begin:end].tolist():
                place = (int(groups["order"][base + pair // 12]), pair % 12)
                assert place not in found.setdefault((chunk, seq, block), set())
                found[chunk, seq, block].add(place)
    assert found == expected


def test_chunks_reuse_one_buffer() -> None:
    batch, launch = Batch(PARTS, heads=2), FORMS["by-block"]
    groups = batch.grouped(launch)
    ids, bias = choose(batch)
    whole, _ = batch.attend(launch, groups, ids, bias)
    cut, scratch = batch.attend(launch, groups, ids, bias, budget=1)
    assert scratch["part"].shape[0] == launch.tile * 12
    check(batch, whole, ids, bias)
    check(batch, cut, ids, bias)


def test_more_keys_than_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from dash_portable.kernels import prefill

    monkeypatch.setattr(prefill, "KEYS", 16)
    batch, launch = Batch(PARTS, heads=1), FORMS["by-block"]
    ids, bias = choose(batch)
    check(batch, batch.attend(launch, batch.grouped(launch), ids, bias)[0], ids, bias)


def test_the_nearest_block_stops_at_the_local_window() -> None:
    """Every place of a row in its block, with the nearest remote block chosen, alone and with
    others.
    """
    for form in ("by-block", "by-tile"):
        batch = Batch([Part((), 260, 70)], heads=1)
        ids = torch.full((batch.num_rows, 12), -1, dtype=torch.int32)
        bias = torch.zeros(batch.num_rows, 12)
        ids[:, 0] = batch.row["pos"] // 32 - 4
        ids[::2, 1] = batch.row["pos"][::2] // 32 - 5
        bias[:, 0] = 2.0
        out, _ = batch.attend(FORMS[form], batch.grouped(FORMS[form]), ids, bias)
        check(batch, out, ids, bias)


def test_what_lies_beside_a_sequence_does_not_count() -> None:
    """Scratch of an earlier call, other sequences and free cache blocks: the same bits."""
    batch, launch = Batch(PARTS, heads=1), BOTH
    groups = batch.grouped(launch)
    ids, bias = choose(batch)
    first, _ = batch.attend(launch, groups, ids, bias)
    free = torch.ones(batch.cache.shape[0], dtype=torch.bool)
    used = [batch.table[r, : -(-p.length // 32)] for r, p in enumerate(PARTS)]
    free[torch.cat(used).long()] = False
    batch.cache[free] = 1e4
    second, _ = batch.attend(launch, groups, ids, bias)
    assert torch.equal(first, second)


def test_only_steps_with_lists_take_room_for_partial_results() -> None:
    launch = BOTH._replace(union_all=96)
    small, large = (
        attend_shapes(640, 2, 44, blocks, 10, 64, 2, 12, budget=1 << 30, launch=launch)
        for blocks in (96, 97)
    )
    assert large.keys() - small.keys() == {
        "runs", "offset", "first", "pair", "entry", "part", "part_mass",
    }  # fmt: skip
    assert small.keys() <= large.keys()
