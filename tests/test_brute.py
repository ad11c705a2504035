"""The brute force against the golden vectors and against small cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.brute import (
    IMAGE,
    MARKER,
    TEXT,
    UNDEFINED,
    Answer,
    Coordinates,
    Rule,
    Selection,
    attend,
    attend_segments,
    auxiliary_bytes,
    auxiliary_numbers,
    candidate_blocks,
    causal,
    coordinates,
    entmax15,
    positions,
    remote_blocks,
    rotate,
    rounded,
    select,
    summarise,
)
from tests.golden import CASES, Golden, entmax_vectors, golden
from tests.prompts import PROMPTS, document, pages_prompt, random_answer, tiled_prompt

T, I, M = TEXT, IMAGE, MARKER  # noqa: E741  # read as words in the tables below
RULE = Rule(dim=64)
EPS32 = 2.0**-23


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Golden:
    return golden(request.param)


@pytest.fixture
def answer(case: Golden) -> Answer:
    return case.document.run()


def test_golden_coordinates_are_exact_on_every_row(case: Golden, answer: Answer) -> None:
    assert [row.tok for row in case.rows] == answer.where.tok.tolist()
    assert [row.page for row in case.rows] == answer.where.page.tolist()


def test_golden_blocks_are_equal_wherever_the_margin_allows(case: Golden, answer: Answer) -> None:
    compared = 0
    for row, selection in zip(case.rows, answer.selections, strict=True):
        if row.margin > 1e-3:
            assert set(row.blocks) == set(selection.blocks)
            compared += 1
    assert compared > 0.95 * len(case.rows)


def test_golden_biases_and_margins_are_close(case: Golden, answer: Answer) -> None:
    rule = case.document.rule
    for row, selection in zip(case.rows, answer.selections, strict=True):
        if set(row.blocks) != set(selection.blocks) or not row.blocks:
            continue
        # An error of the scores moves ln(prior) by 2 / sqrt(prior) times as much, prior >= floor.
        worst = max(abs(score) for score in selection.scores.values())
        score_error = math.sqrt(rule.dim) * EPS32 * worst
        bias = dict(zip(selection.blocks, selection.bias, strict=True))
        for block, expected in zip(row.blocks, row.bias, strict=True):
            error = abs(bias[block] - expected)
            assert error <= 2 * score_error / math.sqrt(rule.floor) / rule.sigma
        if selection.margin == math.inf:
            assert row.margin == 1e9
        else:  # stored with four digits
            assert abs(row.margin - selection.margin) <= 1e-3 * max(row.margin, 1.0)


def test_golden_summaries_are_close(case: Golden, answer: Answer) -> None:
    expected = np.array(case.summaries)
    assert answer.summaries.shape[0] == expected.shape[0]
    bound = case.document.rule.dim * EPS32 * np.abs(answer.index_keys).max()
    assert np.abs(answer.summaries[:, :4] - expected).max() <= bound


def test_golden_entmax() -> None:
    for values, expected in entmax_vectors():
        assert np.abs(np.array(entmax15(values)) - expected).max() < 1e-6


def table(where: Coordinates) -> dict[str, list[int]]:
    return {
        "tok": where.tok.tolist(),
        "page": where.page.tolist(),
        "query_page": where.query_page.tolist(),
        "image_page": where.image_page.tolist(),
        "counts": where.counts.tolist(),
        "starts": where.starts.tolist(),
    }


def test_two_pages_and_an_instruction() -> None:
    where = coordinates([M, I, I, M, I, T, T])
    assert table(where) == {
        "tok": [0, 1, 2, 0, 1, 0, 1],
        "page": [1, 1, 1, 2, 2, 0, 0],
        "query_page": [0, 0, 0, 1, 1, -1, -1],
        "image_page": [-1, 0, 0, -1, 1, -1, -1],
        "counts": [0, 3, 2],
        "starts": [0, 0, 3],
    }
    assert where.num_pages == 2
    assert positions(where).tolist() == [
        [0, 1, 2, 0, 1, 0, 1],
        [1, 1, 1, 2, 2, 0, 0],
        [2] * 7,
        [-1, -4, -3, -1, -1, -1, -1],
    ]


def test_decoded_markers_past_the_last_page_are_clamped_but_the_query_page_is_not() -> None:
    where = coordinates([M, I, I, M, I, T, T], [T, M, T, M, M, T, M])
    assert where.page[7:].tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert where.tok[7:].tolist() == [2, 3, 4, 2, 2, 3, 2]
    assert where.query_page[7:].tolist() == [-1, 0, 0, 1, 2, 2, 3]
    # As rows of `positions`, page and query page follow from row 1 and row 2 alone.
    table = positions(where)[:, 7:]
    assert np.minimum(table[1], table[2]).tolist() == where.page[7:].tolist()
    assert (table[1] - 1).tolist() == where.query_page[7:].tolist()
    assert (table[3] >= 0).all()


def test_the_instruction_continues_the_count_of_what_stands_before_the_first_marker() -> None:
    where = coordinates([T, T, M, I, T, T], [T])
    assert where.page.tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert where.tok.tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert where.counts.tolist() == [2, 2]
    assert where.starts.tolist() == [0, 2]


def test_decoding_after_a_prompt_that_ends_in_an_image_starts_from_its_page() -> None:
    where = coordinates([M, I], [T, M, T])
    assert where.page.tolist() == [1, 1, 1, 1, 1]
    assert where.tok.tolist() == [0, 1, 2, 2, 3]
    assert where.query_page.tolist() == [0, 0, 0, 1, 1]


def test_plain_text_has_one_page_and_its_markers_are_text() -> None:
    where = coordinates([T, M, T], [M, T])
    assert where.tok.tolist() == [0, 1, 2, 3, 4]
    assert where.page.tolist() == [0] * 5
    assert where.query_page.tolist() == [-1] * 5
    assert (where.num_pages, where.counts.tolist(), where.starts.tolist()) == (0, [0], [0])
    assert positions(where)[3].tolist() == [-1, -1, -1, 0, 0]


def test_markers_after_the_last_image_count_from_page_zero_again() -> None:
    where = coordinates([M, I, T, M, T])
    assert where.page.tolist() == [1, 1, 0, 1, 1]
    assert where.tok.tolist() == [0, 1, 0, 2, 3]
    assert where.query_page.tolist() == [0, 0, -1, 0, 0]
    assert where.counts.tolist() == [0, 2]


def test_more_markers_after_the_last_image_than_before_make_empty_pages() -> None:
    where = coordinates([M, I, M, M, T], [M])
    assert where.page.tolist() == [1, 1, 1, 2, 2, 2]
    assert where.tok.tolist() == [0, 1, 2, 0, 1, 0]  # counts[2] is 0
    assert where.query_page.tolist() == [0, 0, 0, 1, 1, 2]
    assert where.counts.tolist() == [0, 2, 0]
    assert where.starts.tolist() == [0, 0, 2]
    assert positions(where)[3].tolist() == [-1, -3, -1, -1, -1, 0]


def test_images_before_the_first_marker_belong_to_no_page() -> None:
    where = coordinates([I, I, M, T], [M])
    assert where.page.tolist() == [0, 0, 1, 1, 1]
    assert where.tok.tolist() == [0, 1, 0, 1, 0]
    assert where.query_page.tolist() == [-1, -1, 0, 0, 1]
    assert where.image_page.tolist() == [-1] * 5
    assert where.counts.tolist() == [2, 0]


def test_images_without_any_marker_still_let_a_decoded_marker_count() -> None:
    where = coordinates([I, I, I], [T, M])
    assert where.tok.tolist() == [0, 1, 2, 3, 3]
    assert where.query_page.tolist() == [-1, -1, -1, -1, 0]
    assert where.page.tolist() == [0] * 5


def test_too_many_pages_and_no_token_are_errors() -> None:
    assert coordinates([M] * 10 + [I]).num_pages == 10
    with pytest.raises(ValueError, match="at least one"):
        coordinates([])
    with pytest.raises(ValueError, match="65536 pages"):
        coordinates([M] * 65_536 + [I])


@pytest.mark.parametrize("name", PROMPTS)
def test_pages_up_to_the_last_image_are_contiguous_runs(name: str) -> None:
    where = coordinates(PROMPTS[name], random_answer(20, seed=3))
    for page, (start, count) in enumerate(zip(where.starts, where.counts, strict=True)):
        assert (where.page[start : start + count] == page).all()
    end = where.starts[-1] + where.counts[-1]
    of_images = [i for i, role in enumerate(PROMPTS[name]) if role == IMAGE]
    assert end == (of_images[-1] + 1 if of_images else 0)
    has_page = where.image_page >= 0
    assert (where.image_page[has_page] == where.page[has_page] - 1).all()


def test_shapes_of_real_documents() -> None:
    assert coordinates(pages_prompt(3)).counts.tolist() == [0, 274, 274, 274]
    assert coordinates(tiled_prompt(4, 4)).counts.tolist() == [0, 1 + 273 + 41 * 40]


def test_rotation_angles_pair_by_pair() -> None:
    half = RULE.dim // 2
    for pair, angle in [(0, 5.0), (1, 5 * 1e4 ** (-1 / 31)), (30, 5 * 1e4 ** (-30 / 31)), (31, 1)]:
        x = np.zeros(RULE.dim)
        x[pair], x[pair + half] = 2.0, 3.0
        turned = rotate(x, tok=5, page=7, rule=RULE)
        assert turned[pair] == pytest.approx(2 * math.cos(angle) - 3 * math.sin(angle), rel=1e-14)
        assert turned[pair + half] == pytest.approx(
            3 * math.cos(angle) + 2 * math.sin(angle), rel=1e-14
        )
        assert np.count_nonzero(turned) == 2
    assert (rotate(np.ones(64), tok=0, page=2, rule=RULE) == 1).all()


def test_bfloat16_keeps_the_upper_half_of_float32_rounded_to_even() -> None:
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    x = np.concatenate(
        [x, x * np.float32(1e-39), np.array([0, 1.00390625, 1.01171875, 3.3e38], np.float32)]
    )
    bits = x.view(np.uint32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    assert (rounded(x, "bfloat16") == even.astype(np.uint32).view(np.float32)).all()
    assert rounded([3.4e38, -3.4e38, math.inf], "bfloat16").tolist() == [
        math.inf, -math.inf, math.inf
    ]  # fmt: skip
    assert math.isnan(rounded(math.nan, "bfloat16"))
    assert rounded([70000.0, 1 + 2.0**-11], "float16").tolist() == [math.inf, 1.0]


def test_summary_is_the_mean_without_a_query_and_one_key_under_a_strong_one() -> None:
    keys = np.arange(32 * 64, dtype=np.float64).reshape(32, 64) / 10
    assert np.allclose(summarise(keys, np.zeros(64)), keys.mean(0), rtol=1e-14)
    assert (summarise(keys, np.ones(64)) == keys[31]).all()
    # Both logits pass 1e4 and are clamped to it: neither key wins.
    both = np.zeros((2, 64))
    both[0, 0], both[1, 0] = 1e6, 3e6
    assert summarise(both, np.ones(64))[0] == 2e6


@pytest.mark.parametrize(
    ("position", "blocks"), [(0, 0), (127, 0), (128, 1), (159, 1), (160, 2), (1023, 28)]
)
def test_remote_blocks_are_four_behind(position: int, blocks: int) -> None:
    assert remote_blocks(position, RULE) == list(range(blocks))


def test_candidates_hold_an_image_of_the_page_itself() -> None:
    prompt = PROMPTS["page_of_text_inside_a_block"]
    pages = coordinates(prompt).image_page
    assert {0, 2} == set(pages[32:64]) - {-1}
    assert candidate_blocks(224, 0, pages, RULE) == [0, 1]
    assert candidate_blocks(224, 1, pages, RULE) == [0, 1, 2, 3]  # text only: all remote blocks
    assert candidate_blocks(224, 2, pages, RULE) == [1, 2, 3]
    assert candidate_blocks(224, 9, pages, RULE) == [0, 1, 2, 3]
    assert candidate_blocks(224, -1, pages, RULE) == [0, 1, 2, 3]
    assert candidate_blocks(127, 0, pages, RULE) == []


def test_decoded_images_have_no_page() -> None:
    prompt = [M] + [I] * 10
    where = coordinates(prompt, [T] * 60 + [I] * 80 + [T] * 40)
    assert candidate_blocks(190, 0, where.image_page, RULE) == [0]
    assert (where.image_page[11:] == -1).all()


def along_first_axis(scores: list[float], rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """A query and summaries that give exactly these scores."""
    query, kbar = np.zeros(rule.dim), np.zeros((len(scores), rule.dim))
    query[0] = rule.dim / rule.scale
    kbar[:, 0] = scores
    return query, kbar


def chosen(scores: list[float], rule: Rule = RULE, position: int | None = None) -> Selection:
    at = (len(scores) + rule.local_blocks - 1) * rule.block if position is None else position
    query, kbar = along_first_axis(scores, rule)
    return select(at, query, kbar, list(range(len(scores))), rule)


def test_ties_go_to_the_lower_block() -> None:
    selection = chosen([1.0] * 20)
    assert selection.blocks == list(range(12))
    assert selection.bias == pytest.approx([0.0] * 12, abs=1e-12)
    assert selection.prior == pytest.approx([1 / 16] * 12)
    assert selection.margin == 0
    assert chosen([0, 2, 1, 2, 0, 1]).blocks == [1, 3, 2, 5, 0, 4]


def test_fewer_candidates_than_topk_are_all_kept() -> None:
    selection = chosen([0.1, 0.3, 0.2])
    assert selection.blocks == [1, 2, 0]
    assert sum(selection.prior) == pytest.approx(1.0)
    assert selection.margin == math.inf
    assert sum(selection.bias) == pytest.approx(0.0, abs=1e-12)


def test_no_candidate_selects_nothing() -> None:
    selection = chosen([], position=100)
    assert (selection.blocks, selection.bias, selection.margin) == ([], [], math.inf)


def test_a_prior_of_zero_stays_at_the_floor() -> None:
    selection = chosen([0.0, 10.0], rule=Rule(dim=64, floor=1e-4, sigma=2.0))
    assert selection.blocks == [1, 0]
    assert selection.prior == [1.0, 0.0]
    half_way = math.log(1e-4) / 2
    assert selection.bias == pytest.approx([-half_way / 2, half_way / 2])


def test_two_scores_by_hand() -> None:
    # x = 0, -1/4: tau_2 = -1/8 - sqrt((1 - 2 / 64) / 2)
    tau = -0.125 - math.sqrt((1 - 2 / 64) / 2)
    assert entmax15([0.5, 0.0]) == pytest.approx([tau**2, (0.25 + tau) ** 2])
    assert entmax15([3.0]) == [1.0]
    assert entmax15([2.0, -10.0]) == [1.0, 0.0]


def test_the_window_looks_further_than_the_kept_blocks() -> None:
    scores = [1.0] * 12 + [0.9] * 8
    assert sum(chosen(scores).prior) < 1  # four more share the prior
    narrow = chosen(scores, rule=Rule(dim=64, window=12))
    assert narrow.prior == pytest.approx([1 / 12] * 12)
    assert chosen(scores).margin == pytest.approx(0.1)


def test_unusable_scores_are_last_and_never_spread() -> None:
    selection = chosen([math.nan, 1.0, 0.5])
    assert selection.blocks == [1, 2, 0]
    assert selection.scores[0] == -1e4
    assert selection.bias[2] == pytest.approx(min(selection.bias))
    # All of them unusable: seven places of equal value, three of them real.
    nothing = chosen([math.nan] * 3)
    assert nothing.blocks == [0, 1, 2]
    assert nothing.prior == pytest.approx([1 / 7] * 3)
    assert nothing.bias == pytest.approx([0.0] * 3, abs=1e-12)


def test_products_are_clamped_before_the_scale() -> None:
    rule = Rule(dim=64, scale=8.0)
    assert chosen([math.inf, 1e9, -1e9, 5.0], rule=rule).scores == {0: 1e4, 1: 1e4, 2: -1e4, 3: 5}


@pytest.mark.parametrize(("position", "low"), [(128, 1), (143, 16), (158, 31), (159, 32)])
def test_the_local_window_wins_over_the_block_that_reaches_into_it(position: int, low: int) -> None:
    bias = 1.5
    query, keys = np.zeros((1, 64)), np.zeros((position + 1, 1, 64))
    values = np.zeros((position + 1, 1, 64))
    values[:, 0, 0] = np.arange(position + 1) < low
    out = attend(position, query, keys, values, [0], [bias], RULE)
    remote = low * math.exp(bias)
    assert out[0, 0] == pytest.approx(remote / (remote + 128))


@pytest.mark.parametrize("name", ["exactly_128", "one_text_token", "marker_and_image"])
def test_up_to_128_tokens_it_is_causal_attention(name: str) -> None:
    answer = document(PROMPTS[name], heads=4, kv_heads=2).run()
    expected = causal(answer.query, answer.keys, answer.values)
    assert np.allclose(answer.out, expected, rtol=1e-12, atol=0)


def test_every_query_head_reads_its_kv_head() -> None:
    answer = document(PROMPTS["pages"], heads=6, kv_heads=2).run()
    last, selection = len(answer.out) - 1, answer.selections[-1]
    assert len(selection.blocks) == 12
    for head in range(6):
        kv = slice(head // 3, head // 3 + 1)
        alone = attend(
            last, answer.query[last, head : head + 1], answer.keys[:, kv], answer.values[:, kv],
            selection.blocks, selection.bias, RULE,
        )  # fmt: skip
        assert (alone[0] == answer.out[last, head]).all()


@pytest.mark.parametrize("position", [3, 128, 140, 399, 558])
def test_merged_segments_equal_one_softmax(position: int) -> None:
    answer = document(PROMPTS["pages"], heads=2, kv_heads=1).run()
    selection = answer.selections[position]
    low = max(position + 1 - RULE.local, 0)
    keys = np.full((12 * 32 + 128, 1, 64), np.nan)
    values = keys.copy()
    used = [0] * 13
    for segment, block in enumerate(selection.blocks):
        first, end = block * 32, min(block * 32 + 32, low)
        used[segment] = end - first
        keys[segment * 32 : segment * 32 + end - first] = answer.keys[first:end]
        values[segment * 32 : segment * 32 + end - first] = answer.values[first:end]
    used[12] = position + 1 - low
    keys[384 : 384 + used[12]] = answer.keys[low : position + 1]
    values[384 : 384 + used[12]] = answer.values[low : position + 1]
    bias = selection.bias + [0.0] * (12 - len(selection.bias))
    merged = attend_segments(answer.query[position], keys, values, used, bias, block=32)
    assert np.allclose(merged, answer.out[position], rtol=1e-12, atol=1e-14)
    assert (attend_segments(answer.query[0], keys, values, [0] * 13, bias, block=32) == 0).all()


def test_bytes_of_a_small_document() -> None:
    rule = Rule(dim=64, block=8)
    roles = [T] * 2 + [M] + [I] * 3 + [M] + [I] * 300 + [T, M]
    row = auxiliary_bytes(roles, coordinates(roles[:-1], roles[-1:]), rule)
    assert row[0, 64:94].tolist() == [
        0, -1, *[0] * 4, *[0] * 4, 2, 0, 0, 0, *[255] * 4, 2, 0, 0, 0, *[0] * 4, 1, 0, 2, 0
    ]  # fmt: skip
    assert row[2, 64:82].tolist() == [2, -1, *[0] * 4, 1, 0, 0, 0, 2, 0, 0, 0, *[0] * 4]
    assert row[2, 82:90].tolist() == [45, 1, 0, 0, 6, 0, 0, 0]  # page 2: 301 tokens from token 6
    assert (row[3:, 82:90] == UNDEFINED).all()
    assert row[8, 90:94].tolist() == [2, 0, 2, 0]
    assert (row[1, 90:94] == UNDEFINED).all()
    # The decoded marker: page 1, whose count is 4, query page 0.
    assert row[-1, 64:82].tolist() == [2, -1, 4, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, *[0] * 4]
    # Block 38 (tokens 304..311) has only five tokens: no range.
    assert len(roles) == 309
    assert (row[304, 90:94] == UNDEFINED).all()
    assert (row[:, :64] == UNDEFINED).all()
    assert (row[:, 94:] == UNDEFINED).all()


def test_images_before_the_first_marker_and_decoded_ones_leave_the_range_alone() -> None:
    rule = Rule(dim=64, block=8)
    prompt = [I] * 4 + [M] + [I] * 3 + [I] * 7 + [T]
    row = auxiliary_bytes([*prompt, *[I] * 8], coordinates(prompt, [I] * 8), rule)
    assert row[[0, 8, 16], 90:94].tolist() == [[1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]


def test_numbers_of_the_auxiliary_head() -> None:
    answer = document(PROMPTS["odd_length"]).run("float16")
    numbers = auxiliary_numbers(answer.index_keys, answer.summaries, RULE)
    assert (numbers[:, :64] == answer.index_keys).all()
    assert (numbers[32, 96:] == answer.summaries[1, :32]).all()
    assert (numbers[33, 96:] == answer.summaries[1, 32:]).all()
    assert np.isnan(numbers[34, 64:]).all()
    assert len(answer.summaries) == 213 // 32


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_every_kind_of_prompt_runs(name: str, dtype: str) -> None:
    decoded = random_answer(9, seed=11)
    answer = document(PROMPTS[name], decoded, heads=2, kv_heads=1).run(dtype)
    total = len(PROMPTS[name]) + 9
    assert answer.out.shape == (total, 2, 64)
    assert np.isfinite(answer.out).all()
    assert len(answer.selections) == total
    for position, selection in enumerate(answer.selections):
        remote = remote_blocks(position, RULE)
        assert set(selection.blocks) <= set(selection.candidates) <= set(remote)
        assert len(selection.blocks) == min(12, len(selection.candidates))
        assert bool(selection.candidates) == bool(remote)
