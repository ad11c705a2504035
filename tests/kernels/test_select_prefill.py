"""Grouping and selection of prefill rows, in Triton's interpreter, against plain float64."""

from __future__ import annotations

import pytest
import torch

from dash_portable import reference
from dash_portable.kernels.launch_prefill import PrefillRow
from tests.kernels.prefill_batch import Batch, Part

SMALL = PrefillRow(tile=16, select_groups=16)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BATCHES = {
    "text": [Part((), 700, 90)],
    "pages": [Part(((1, 273),) * 3, 870, 200, front=2)],
    "chunk-and-prompts": [
        Part(((1, 90), (1, 200), (40, 0), (3, 120)), 520, 130, padding=3),
        Part(((1, 20), (1, 3), (0, 2), (1, 1), (9, 0), (2, 150)), 300, 300, front=31),
        Part((), 1, 1, padding=1),
        Part(((1, 60),), 400, 1),
    ],
}


def check_grouping(
    batch: Batch, groups: dict[str, torch.Tensor], tile: int, given: bool = False
) -> None:
    pos, seq = batch.row["pos"], batch.row["seq"]
    live = batch.live()
    own = {}
    for i in live:
        blocks, own[i] = batch.candidates(i, given)
        assert int(groups["page"][i] > 0) == own[i]
        assert int(groups["last"][i]) == (blocks[-1] if blocks else -1) or own[i]
        if own[i]:
            assert int(groups["first"][i]) <= blocks[0]
            assert int(groups["last"][i]) >= blocks[-1]
    wanted = sorted(live, key=lambda i: (int(seq[i]), not own[i], int(pos[i])))
    assert groups["order"][: len(live)].tolist() == wanted
    at = 0
    for record in groups["tiles"].tolist():
        if record[0] < 0:
            continue
        rows = wanted[record[1] : record[2]]
        assert record[1] == at
        assert 0 < len(rows) <= tile
        assert {(int(seq[i]), int(own[i])) for i in rows} == {(record[0], record[3])}
        at = record[2]
    assert at == len(live)


def check_selection(batch: Batch, ids: torch.Tensor, bias: torch.Tensor) -> None:
    """Equal to the oracle; blocks differ only where float32 sums cannot tell their scores."""
    rule = batch.config
    for i in range(batch.num_rows):
        if int(batch.row["pos"][i]) < 0:
            assert ids[i].eq(-1).all()
            assert bias[i].eq(0).all()
            continue
        blocks, _ = batch.candidates(i)
        score = batch.scores(i)
        candidate = torch.zeros(1, len(score), dtype=torch.bool)
        candidate[0, blocks] = True
        score = score.masked_fill(~candidate[0], 0.0)
        expect = reference.select(
            score[None], candidate, batch.row["pos"][i : i + 1].long(), rule, rule.floor[0]
        )
        got, want = ids[i].tolist(), expect.ids[0].tolist()
        assert [b >= 0 for b in got] == [b >= 0 for b in want]
        used = [b for b in got if b >= 0]
        assert len(set(used)) == len(used)
        assert set(used) <= set(blocks)
        slack = 2 * 64 * torch.finfo(torch.float32).eps * max(float(score.abs().max()), 1.0)
        pairs = zip(used, [b for b in want if b >= 0], strict=True)
        assert all(abs(float(score[a] - score[b])) <= slack for a, b in pairs)
        # d ln(prior) / d score is at most 1 / sqrt(floor): the floor bounds the prior from below
        wrong = (bias[i].double() - expect.bias[0]).abs().max()
        assert wrong <= 4 * slack / rule.floor[0] ** 0.5 / rule.sigma + 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_select(name: str, dtype: torch.dtype) -> None:
    batch = Batch(BATCHES[name], dtype=dtype)
    groups = batch.grouped(SMALL)
    check_grouping(batch, groups, SMALL.tile)
    ids, bias, _ = batch.select(SMALL, groups)
    check_selection(batch, ids, bias)


def test_many_blocks_take_both_passes() -> None:
    batch = Batch([Part((), 3000, 32)], seed=3)
    ids, bias, redone = batch.select(SMALL, batch.grouped(SMALL))
    assert 0 < redone <= 32
    check_selection(batch, ids, bias)
    wide = PrefillRow(tile=16, select_groups=64)
    other = batch.select(wide, batch.grouped(wide))
    assert torch.equal(ids, other[0])
    assert other[2] < redone


def exact(batch: Batch, per_block: torch.Tensor, scale: float | None = None) -> None:
    """Scores that are `per_block`: queries of one, summaries that hold the score in one element."""
    batch.index_query[:] = 0
    batch.index_query[:, 0] = 1
    batch.summaries[:] = 0
    batch.summaries[:, :, 0] = per_block


@pytest.mark.parametrize("kind", ["equal", "falling", "rising", "two", "stripes", "zeros"])
def test_ties_and_orders(kind: str) -> None:
    batch = Batch([Part((), 2700, 20)])
    blocks = torch.arange(batch.max_blocks).float()
    values = {
        "equal": torch.ones_like(blocks),
        "falling": -blocks,
        "rising": blocks,
        "two": (blocks % 2 == 1).float(),
        "stripes": (blocks % 16 == 5).float() + (blocks > 60),
        "zeros": torch.where(blocks % 2 == 0, 0.0, -0.0),
    }[kind]
    exact(batch, values)
    ids, _, redone = batch.select(SMALL, batch.grouped(SMALL))
    for i in batch.live():
        last = batch.candidates(i)[0][-1]
        order = sorted(range(last + 1), key=lambda b: (-float(values[b]), b))
        assert ids[i].tolist() == order[:12]
    if kind in ("equal", "stripes", "zeros"):
        assert redone == len(batch.live())


@pytest.mark.filterwarnings("ignore:(invalid|overflow)")  # NumPy's, of the interpreter
@pytest.mark.parametrize("scale", [20.0, 0.0, -3.0, 1e-3])
def test_scores_that_are_no_numbers(scale: float) -> None:
    batch = Batch([Part((), 2000, 20)], seed=5)
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(batch.max_blocks, generator=draw)
    values[3::7] = torch.nan
    values[4::9] = torch.inf
    values[5::11] = -torch.inf
    values[6::13] = 1e9
    values[8::17] = -1e9
    exact(batch, values)
    batch.index_query[:, 1:] = 0
    ids, _, _ = batch.select(SMALL, batch.grouped(SMALL), scale=scale)
    for i in batch.live():
        score = reference.block_scores(batch.index_query[i : i + 1], batch.summaries[0], scale)[0]
        last = batch.candidates(i)[0][-1]
        order = sorted(range(last + 1), key=lambda b: (-float(score[b]), b))
        assert ids[i].tolist() == order[:12]


def test_a_row_is_the_same_in_any_batch() -> None:
    """Whole numbers, so that NumPy's sums, which depend on a row's place, are exact."""
    draw = torch.Generator().manual_seed(2)
    whole = Batch([Part(((1, 273),) * 3, 1500, 1500)], seed=7, dtype=torch.bfloat16)
    whole.index_query[:] = torch.randint(-8, 9, whole.index_query.shape, generator=draw)
    whole.summaries[:] = torch.randint(-8, 9, whole.summaries.shape, generator=draw)
    ids, bias, _ = whole.select(SMALL, whole.grouped(SMALL))
    part = Batch([Part(((1, 273),) * 3, 1500, 77), Part((), 300, 40)], dtype=torch.bfloat16)
    part.summaries[0], part.ranges[0] = whole.summaries[0], whole.ranges[0]
    part.index_query[:77] = whole.index_query[-77:]
    again = part.select(SMALL, part.grouped(SMALL))
    assert torch.equal(again[0][:77], ids[-77:])
    assert torch.equal(again[1][:77], bias[-77:])


def test_a_page_table_holds_before_its_row_is_stored() -> None:
    batch = Batch([Part(((1, 130), (1, 300)), 500, 200)], page_of=0)
    batch.row["num_pages"][:] = 600
    batch.row["query_page"][:] = 1
    groups = batch.grouped(SMALL, given=True)
    check_grouping(batch, groups, SMALL.tile, given=True)


def test_no_rows_with_a_page() -> None:
    batch = Batch([Part((), 600, 50)])
    batch.starts, batch.ranges = None, None  # type: ignore[assignment]
    ids, _, _ = batch.select(SMALL, batch.grouped(SMALL))
    assert (ids[:, 0] >= 0).all()
