"""The shared pieces by themselves: spans, places, gather layouts, normalisation, merge."""

from __future__ import annotations

import math

import pytest
import torch

from dash_portable.segments import (
    cache_pages,
    merge_segments,
    normalise,
    page_size,
    page_table,
    spans,
)
from dash_portable.segments.call import counted, fold_groups, unfold_groups, unfold_lse
from dash_portable.segments.gather import MASK, bias_columns, segment_starts
from dash_portable.segments.rows import slot_offsets


def test_spans_of_rows() -> None:
    """A far block, one that reaches into the window, one inside it, an unused one, a padding
    row.
    """
    ids = torch.tensor([[0, 3, 6, -1], [2, -1, -1, -1], [7, 7, 7, 7]], dtype=torch.int32)
    where = spans(torch.tensor([230, 50, -1]), ids, block=32, local=128)
    assert where.length.tolist() == [[32, 7, 0, 0, 128], [0, 0, 0, 0, 51], [0, 0, 0, 0, 0]]
    assert where.start[0].tolist() == [0, 96, 192, 0, 103]
    assert where.start.dtype == where.length.dtype == torch.int32


def test_slots_of_segments() -> None:
    segment, offset = slot_offsets(2, block=4, local=8, device=torch.device("cpu"))
    assert segment.tolist() == [0] * 4 + [1] * 4 + [2] * 8
    assert offset.tolist() == [*range(4), *range(4), *range(8)]


@pytest.mark.parametrize(
    ("block_size", "size"), [(1, 1), (8, 8), (16, 16), (24, 8), (32, 32), (64, 32), (256, 32)]
)
def test_page_size(block_size: int, size: int) -> None:
    assert page_size(block_size, 32) == size


@pytest.mark.parametrize("size", [1, 16, 32, 64])
def test_pages_show_the_cache(size: int) -> None:
    """Page ids address the tokens they say, in a cache that is a slice of a wider buffer."""
    wide = torch.arange(3 * 5 * 64 * 24).float().view(3, 5, 64, 24)
    cache = wide[:, :3, :, :16]
    pages = cache_pages(cache, size=size)
    assert pages.key.data_ptr() == cache.data_ptr()
    assert pages.value.data_ptr() == cache[..., 8:].data_ptr()
    assert pages.key.stride() == pages.value.stride()
    for block, token in ((0, 0), (1, 17), (2, 63)):
        page = block * pages.per_block + token // size
        assert torch.equal(pages.key[page, token % size], cache[block, :2, token, :8])
        assert torch.equal(pages.value[page, token % size], cache[block, :2, token, 8:])


@pytest.mark.parametrize(("block_size", "size"), [(16, 16), (64, 32), (32, 32)])
def test_page_table_starts_segments_at_pages(block_size: int, size: int) -> None:
    ids = torch.tensor([[3, 0, -1], [5, 5, 5]], dtype=torch.int32)
    where = spans(torch.tensor([230, -1]), ids, block=32, local=128)
    blocks = torch.tensor([[9, 4, 7, 1, 8, 2, 6, 0, 3, 5, 12, 11, 10, 14, 13]], dtype=torch.int32)
    per = block_size // size
    table = page_table(
        where,
        torch.tensor([0, 99]),
        blocks,
        size=size,
        per_block=per,
        block_size=block_size,
        local=128,
    )
    pages = table.pages.view(2, 4, -1)
    first = 103 // size * size
    assert table.length.view(2, 4).tolist() == [[7, 32, 1, 231 - first], [1, 1, 1, 1]]
    for segment, start in ((0, 96), (1, 0), (3, first)):
        block = int(blocks[0, start // block_size])
        assert int(pages[0, segment, 0]) == block * per + start % block_size // size
    assert not bool(pages[1].any())
    assert bool((pages >= 0).all())


def test_bias_columns_keep_twice_the_digits() -> None:
    bias = torch.linspace(-20, 20, 101)
    for dtype in (torch.float16, torch.bfloat16):
        high, low = bias_columns(bias, 128, dtype)
        exact = bias.double() * math.sqrt(128)
        error = (high.double() + low.double() - exact).abs()
        assert bool((error <= exact.abs() * torch.finfo(dtype).eps ** 2 + 1e-7).all())
    high, low = bias_columns(torch.tensor([1e9, -1e9]), 64, torch.float16)
    assert high.float().tolist() == [-MASK, MASK]
    assert bool(low.isfinite().all())


def test_starts_leave_a_slot_for_empty_segments() -> None:
    starts = segment_starts(torch.tensor([[3, 0], [0, 5]], dtype=torch.int32))
    assert starts.tolist() == [0, 3, 4, 5, 10]
    assert starts.dtype == torch.int32


def test_folded_groups_come_back() -> None:
    query = torch.randn(3, 8, 16)
    folded = fold_groups(query, 2)
    assert folded.shape == (12, 2, 16)
    assert torch.equal(folded[1, 0], query[0, 1])  # row 0, second head of kv head 0
    assert torch.equal(unfold_groups(folded, 4), query)
    lse = folded[..., 0].t()  # [H, B * G]
    assert torch.equal(unfold_lse(lse, 4), query[..., 0].t())
    assert counted(3, 4, torch.device("cpu")).tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("nothing", [math.inf, -math.inf, -5e4, 0.0, math.nan])
@pytest.mark.parametrize(("layout", "base"), [("HN", "e"), ("NH", "2")])
def test_normalise_by_length(nothing: float, layout: str, base: str) -> None:
    natural = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])  # [H, rows]
    given = natural.clone()
    given[:, 1] = nothing
    if base == "2":
        given = given / math.log(2)
    given = given.t() if layout == "NH" else given
    out = torch.full((3, 2, 4), 7.0)
    out[1] = math.nan
    out, lse = normalise(out, given, torch.tensor([5, 0, 1]), layout=layout, base=base)
    assert bool((lse[:, 1] == -math.inf).all())
    assert torch.allclose(lse[:, [0, 2]], natural[:, [0, 2]])
    assert out[1].abs().sum() == 0
    assert out[0, 0, 0] == 7.0
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()


def test_merge_is_one_softmax_in_any_order() -> None:
    maker = torch.Generator().manual_seed(0)
    logit = torch.randn(2, 3, 20, generator=maker, dtype=torch.float64)
    value = torch.randn(2, 20, 3, 8, generator=maker, dtype=torch.float64)
    exact = torch.einsum("nht,nthd->nhd", logit.softmax(-1), value)
    parts = [slice(0, 1), slice(1, 9), slice(9, 9), slice(9, 20)]
    out = torch.stack(
        [
            torch.einsum("nht,nthd->nhd", logit[..., part].softmax(-1), value[:, part])
            for part in parts
        ],
        1,
    )
    lse = torch.stack([logit[..., part].logsumexp(-1) for part in parts], 1)
    out[:, 2] = math.nan  # nothing of an empty segment counts
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        got = merge_segments(out[:, order].float(), lse[:, order].float())
        assert torch.allclose(got.double(), exact, atol=1e-6)
    length = torch.tensor([[1, 8, 0, 11]] * 2)
    lse[:, 2] = math.inf  # as generation 2 of FlashAttention says it
    got = merge_segments(out.float(), lse.float(), torch.zeros(2, 3), length)
    assert torch.allclose(got.double(), exact, atol=1e-6)


def test_merge_of_nothing_is_zero() -> None:
    out = torch.full((2, 3, 2, 4), math.nan)
    got = merge_segments(out, torch.full((2, 3, 2), -math.inf), torch.zeros(2, 2))
    assert got.abs().sum() == 0
