"""The package's oracle and coordinates against the brute force and the golden vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_portable import pages, reference
from dash_portable.config import DashConfig
from dash_portable.segments.merge import merge_segments
from tests import brute
from tests.golden import CASES, entmax_vectors, golden
from tests.prompts import PROMPTS, document, random_answer
from tests.strategies import answers, documents, prompts

RULE = brute.Rule(dim=64)
EXACT = torch.float64


def config_of(rule: brute.Rule) -> DashConfig:
    return DashConfig(
        index_dim=rule.dim, scale=(rule.scale,), floor=(rule.floor,), block=rule.block,
        local_blocks=rule.local_blocks, topk=rule.topk, window=rule.window, sigma=rule.sigma,
        theta=rule.theta, page_mod=rule.page_mod,
    )  # fmt: skip


def close(found: torch.Tensor, exact: np.ndarray, dtype: torch.dtype = EXACT) -> bool:
    """Equal but for sums of a thousand terms in another order, in `dtype`."""
    if not exact.size:
        return found.numel() == 0
    bound = 1024 * torch.finfo(dtype).eps * max(float(np.abs(exact).max()), 1.0)
    return float(np.abs(found.double().numpy() - exact).max()) <= bound


def check_coordinates(prompt: list[int], decoded: list[int]) -> None:
    where = brute.coordinates(prompt, decoded)
    split = len(prompt)
    found = pages.prompt_coordinates(torch.tensor(prompt))
    assert found.tok.tolist() == where.tok[:split].tolist()
    assert found.page.tolist() == where.page[:split].tolist()
    assert found.query_page.tolist() == where.query_page[:split].tolist()
    assert found.counts.tolist() == where.counts.tolist()
    assert found.starts.tolist() == where.starts.tolist()
    assert found.num_pages == where.num_pages
    table = pages.prompt_positions(torch.tensor(prompt, dtype=torch.int32))
    assert table.dtype == torch.int32
    assert table.tolist() == brute.positions(brute.coordinates(prompt)).tolist()

    state = torch.tensor(
        [found.tok[-1], found.page[-1], found.num_pages, found.query_page[-1]], dtype=torch.int64
    )
    for i, role in enumerate(decoded, start=split):
        count = found.counts[pages.next_page(state)]
        state = pages.next_coordinates(state, torch.tensor(role), count)
        expected = [where.tok[i], where.page[i], where.num_pages, where.query_page[i]]
        assert state.tolist() == [int(value) for value in expected]


@pytest.mark.parametrize("name", PROMPTS)
def test_coordinates_of_every_kind_of_prompt(name: str) -> None:
    check_coordinates(PROMPTS[name], random_answer(40, seed=5))


@settings(deadline=None, max_examples=150)
@given(prompt=prompts(), decoded=answers(20))
def test_coordinates_of_any_prompt(prompt: list[int], decoded: list[int]) -> None:
    check_coordinates(prompt, decoded)


@pytest.mark.parametrize(
    ("tok", "page"), [(0, 0), (1, 1), (273, 4), (1_899, 7), (100_000, 3), (123_457, 2)]
)
def test_rotation(tok: int, page: int) -> None:
    x = np.random.default_rng(tok).standard_normal((1, 3, RULE.dim))
    exact = brute.rotate(x, tok, page, RULE)
    at = torch.tensor([tok]), torch.tensor([page])
    config = config_of(RULE)
    # An angle is a product of up to 10**5: its rounding error in float64 is what remains.
    angle_error = max(tok, 1) * 2.0**-52 * np.abs(x).max() * 2
    found = reference.rotate(torch.tensor(x), *at, config, EXACT)
    assert np.abs(found.numpy() - exact).max() <= angle_error
    single = reference.rotate(torch.tensor(x).float(), *at, config).double().numpy()
    assert np.abs(single - exact).max() <= 8 * 2.0**-23 * np.abs(x).max()


def test_summaries() -> None:
    random = np.random.default_rng(1)
    keys = random.standard_normal((5, RULE.block, RULE.dim))
    keys[2] *= 1e6  # logits beyond the clamp
    head_cls = random.standard_normal(RULE.dim) * 3
    exact = np.stack([brute.summarise(block, head_cls) for block in keys])
    found = reference.summarize(torch.tensor(keys), torch.tensor(head_cls))
    for block in range(5):
        assert close(found[block], exact[block])


def test_entmax_of_the_golden_vectors() -> None:
    for values, expected in entmax_vectors():
        for dtype in (torch.float32, EXACT):
            found = reference.entmax15(torch.tensor(values, dtype=dtype))
            assert np.abs(found.double().numpy() - expected).max() < 1e-6


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=16),
    spread=st.floats(0, 1, width=32),
)
def test_entmax_of_any_values(values: list[float], spread: float) -> None:
    ordered = sorted((value * spread for value in values), reverse=True)
    exact = np.array(brute.entmax15(ordered))
    # tau is the difference of two sums of squares under a root: half the digits at worst.
    bound = math.sqrt(2.0**-52) * 16 * max(1.0, abs(ordered[0] - ordered[-1]))
    assert np.abs(reference.entmax15(torch.tensor(ordered, dtype=EXACT)).numpy() - exact).max() <= (
        bound
    )
    padded = torch.tensor([*ordered, *[-brute.LIMIT] * 3], dtype=EXACT)
    counted = reference.entmax15(padded, torch.tensor(len(ordered)))[: len(ordered)]
    assert np.abs(counted.numpy() - exact).max() <= bound


def select_document(
    answer: brute.Answer, rule: brute.Rule, dtype: torch.dtype
) -> reference.Selection:
    """The package's selection for every row, fed with the brute force's candidates."""
    total, blocks = len(answer.out), len(answer.summaries)
    candidate = torch.zeros(total, blocks, dtype=torch.bool)
    for row, selection in enumerate(answer.selections):
        candidate[row, selection.candidates] = True
    score = reference.block_scores(
        torch.tensor(answer.index_query, dtype=dtype),
        torch.tensor(answer.summaries, dtype=dtype),
        rule.scale,
    )
    return reference.select(score, candidate, torch.arange(total), config_of(rule), rule.floor)


def check_selection(answer: brute.Answer, rule: brute.Rule, dtype: torch.dtype) -> None:
    found = select_document(answer, rule, dtype)
    for row, selection in enumerate(answer.selections):
        kept = len(selection.blocks)
        assert found.ids[row, kept:].tolist() == [-1] * (rule.topk - kept)
        assert found.bias[row, kept:].tolist() == [0] * (rule.topk - kept)
        worst = max((abs(score) for score in selection.scores.values()), default=0.0)
        score_error = 2 * rule.dim * torch.finfo(dtype).eps * worst
        if selection.margin <= score_error:
            continue
        bias = dict(zip(found.ids[row].tolist(), found.bias[row].tolist(), strict=True))
        assert set(bias) - {-1} == set(selection.blocks)
        # ln(prior) moves by 2 / sqrt(prior) times the score's error, prior >= floor; the threshold
        # itself is exact only to the root of the arithmetic's error.
        error = score_error + math.sqrt(torch.finfo(dtype).eps)
        for block, expected in zip(selection.blocks, selection.bias, strict=True):
            assert abs(bias[block] - expected) <= 4 * error / math.sqrt(rule.floor) / rule.sigma


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("dtype", [torch.float32, EXACT], ids=["float32", "float64"])
def test_selection_for_every_kind_of_prompt(name: str, dtype: torch.dtype) -> None:
    answer = document(PROMPTS[name], random_answer(20, seed=2), RULE, heads=1).run("float32")
    check_selection(answer, RULE, dtype)


@settings(deadline=None, max_examples=40)
@given(of=documents())
def test_selection_for_any_document(of: brute.Document) -> None:
    check_selection(of.run("float32"), of.rule, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, EXACT], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "scores",
    [
        [1.0] * 20,
        [0.0, 2.0, 1.0, 2.0, -0.0, 1.0],
        [0.0, 10.0],
        [math.nan, 1.0, 0.5],
        [math.nan] * 3,
        [math.inf, -math.inf, 3.0],
        [1.0] * 12 + [0.9] * 8,
        [-5.0 * i for i in range(18)],
    ],
)
def test_tricky_scores(scores: list[float], dtype: torch.dtype) -> None:
    rule = brute.Rule(dim=64, scale=8.0)
    query, kbar = np.zeros(64), np.zeros((len(scores), 64))
    query[0] = 8.0
    kbar[:, 0] = scores
    position = (len(scores) + 3) * 32 + 5
    exact = brute.select(position, query, kbar, list(range(len(scores))), rule)
    score = reference.block_scores(
        torch.tensor(query[None], dtype=dtype), torch.tensor(kbar, dtype=dtype), rule.scale
    )
    found = reference.select(
        score,
        torch.ones(1, len(scores), dtype=torch.bool),
        torch.tensor([position]),
        config_of(rule),
        rule.floor,
    )
    kept = len(exact.blocks)
    assert found.ids[0, :kept].tolist() == exact.blocks
    bound = 64 * math.sqrt(torch.finfo(dtype).eps)
    assert found.bias[0, :kept].tolist() == pytest.approx(exact.bias, abs=bound)


def test_no_block_at_all() -> None:
    found = reference.select(
        torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), torch.tensor([0, 127]),
        config_of(RULE), RULE.floor,
    )  # fmt: skip
    assert found.ids.tolist() == [[-1] * 12] * 2
    assert found.bias.tolist() == [[0.0] * 12] * 2


def attend_document(
    answer: brute.Answer, rule: brute.Rule, dtype: torch.dtype, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """The package's attention for every row, fed with the brute force's selection."""
    total = len(answer.out)
    ids = torch.full((total, rule.topk), -1, dtype=torch.int32)
    bias = torch.zeros(total, rule.topk, dtype=dtype)
    for row, selection in enumerate(answer.selections):
        ids[row, : len(selection.blocks)] = torch.tensor(selection.blocks, dtype=torch.int32)
        bias[row, : len(selection.bias)] = torch.tensor(selection.bias, dtype=dtype)
    return reference.attend(
        torch.tensor(answer.query, dtype=dtype),
        torch.tensor(answer.keys, dtype=dtype) if keys is None else keys,
        torch.tensor(answer.values, dtype=dtype),
        ids,
        bias,
        torch.arange(total),
        config_of(rule),
    )


@pytest.mark.parametrize("name", PROMPTS)
def test_attention_for_every_kind_of_prompt(name: str) -> None:
    of = document(PROMPTS[name], random_answer(5, seed=9), RULE, heads=4, kv_heads=2)
    answer = of.run("float32")
    assert close(attend_document(answer, RULE, EXACT), answer.out)
    assert close(attend_document(answer, RULE, torch.float32), answer.out, torch.float32)


@settings(deadline=None, max_examples=30)
@given(of=documents())
def test_attention_for_any_document(of: brute.Document) -> None:
    answer = of.run()
    assert close(attend_document(answer, of.rule, EXACT), answer.out)


def test_attention_does_not_see_what_the_row_does_not_read() -> None:
    answer = document(PROMPTS["pages"], (), RULE).run()
    row = len(answer.out) - 1
    selection = answer.selections[row]
    read = {t for block in selection.blocks for t in range(block * 32, block * 32 + 32)}
    read |= set(range(row + 1 - 128, row + 1))
    unread = [token for token in range(row + 1) if token not in read]
    assert unread
    keys, values = torch.tensor(answer.keys), torch.tensor(answer.values)
    keys[unread] = torch.nan
    values[unread] = torch.nan
    out = reference.attend(
        torch.tensor(answer.query[row:]), keys, values, torch.tensor([selection.blocks]),
        torch.tensor([selection.bias], dtype=EXACT), torch.tensor([row]), config_of(RULE),
    )  # fmt: skip
    assert close(out, answer.out[row:])


@pytest.mark.parametrize("seed", range(4))
def test_merged_segments(seed: int) -> None:
    random = np.random.default_rng(seed)
    used = [int(n) for n in random.integers(0, 9, 4)]
    bias = random.standard_normal(3)
    query = random.standard_normal((4, 64))
    keys, values = random.standard_normal((2, 3 * 8 + 16, 2, 64))
    exact = brute.attend_segments(query, keys, values, used, list(bias), block=8)
    out = torch.full((1, 4, 4, 64), torch.nan, dtype=EXACT)
    lse = torch.full((1, 4, 4), -torch.inf, dtype=EXACT)
    for segment, length in enumerate(used):
        for head in range(4 if length else 0):
            at = slice(segment * 8, segment * 8 + length)
            logit = torch.tensor(keys[at, head // 2] @ query[head] / 8)
            out[0, segment, head] = logit.softmax(0) @ torch.tensor(values[at, head // 2])
            lse[0, segment, head] = logit.logsumexp(0)
    assert close(merge_segments(out, lse, torch.tensor(bias)[None])[0], exact)
    nothing = merge_segments(out, torch.full_like(lse, -torch.inf))
    assert nothing.tolist() == torch.zeros(1, 4, 64).tolist()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, EXACT], ids=["float32", "float64"])
def test_golden_vectors_through_the_pure_functions(name: str, dtype: torch.dtype) -> None:
    """All the stages in turn; only the candidates are found by a loop of this test."""
    case = golden(name)
    of, config = case.document, config_of(case.document.rule)
    prompt = pages.prompt_coordinates(torch.tensor(of.prompt))
    state = torch.stack(
        [
            prompt.tok,
            prompt.page,
            torch.full_like(prompt.tok, prompt.num_pages),
            prompt.query_page,
        ],
        1,
    )
    for role in of.decoded:
        count = prompt.counts[pages.next_page(state[-1])]
        after = pages.next_coordinates(state[-1], torch.tensor(role), count)
        state = torch.cat([state, after[None]])
    assert state[:, 0].tolist() == [row.tok for row in case.rows]
    assert state[:, 1].tolist() == [row.page for row in case.rows]

    total, size = len(state), config.block
    tok, page = state[:, 0], state[:, 1]
    query = reference.rotate(torch.tensor(of.iq, dtype=dtype), tok, page, config, dtype)
    key = reference.rotate(torch.tensor(of.ik, dtype=dtype), tok, page, config, dtype)
    blocks = total // size
    summaries = reference.summarize(
        key[: blocks * size].unflatten(0, (blocks, size)), torch.tensor(of.head_cls, dtype=dtype)
    )
    bound = 16 * torch.finfo(torch.float32).eps * float(key.abs().max())
    assert (summaries[:, :4].double() - torch.tensor(case.summaries)).abs().max() <= bound

    images = torch.where(torch.tensor(of.prompt) == pages.IMAGE, prompt.raw - 1, -1).tolist()
    images += [-1] * len(of.decoded)
    candidate = torch.zeros(total, blocks, dtype=torch.bool)
    for row in range(total):
        remote = range(max(row // size - config.local_blocks + 1, 0))
        wanted = int(state[row, 3])
        own = [b for b in remote if wanted >= 0 and wanted in images[b * size : b * size + size]]
        candidate[row, own or list(remote)] = True
    score = reference.block_scores(query, summaries, config.scale[0])
    found = reference.select(score, candidate, torch.arange(total), config, config.floor[0])
    compared = 0
    for row, expected in enumerate(case.rows):
        if expected.margin > 1e-3:
            assert set(found.ids[row].tolist()) - {-1} == set(expected.blocks)
            compared += 1
    assert compared > 0.95 * total
