"""What must hold for every document, through the public calls, on a CPU or on this machine's GPU.

Two runs of one path must agree on every row: their selections are bitwise the same. Against the
brute force, rows whose margin lies within the arithmetic's error are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import dash_portable
from tests import brute
from tests.brute import IMAGE, MARKER, TEXT, UNDEFINED, Document
from tests.device import BACKENDS, COMPILED, DEVICE, INTERPRETED
from tests.golden import CASES, golden
from tests.interpreter import kernels_serve
from tests.paged import DTYPES, Paged, expected
from tests.prompts import PROMPTS, document, random_answer, runs
from tests.strategies import SMALL, cuts, documents

# Divisors and multiples of SMALL's block of 8.
BLOCK_SIZES = (4, 16) if COMPILED else (2, 4, 8, 16, 32)

# Where kernels are compiled, every new shape costs seconds: few examples, the same in each run, and
# none made smaller. The interpreter is slow itself.
EXAMPLES = 4 if COMPILED else 2 if INTERPRETED else 15
some = settings(
    deadline=None,
    max_examples=EXAMPLES,
    derandomize=EXAMPLES < 15,
    phases=tuple(Phase) if EXAMPLES == 15 else (Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
backends = st.sampled_from(BACKENDS)


@pytest.fixture(autouse=True, scope="module")
def one_thread_and_device() -> Iterator[None]:
    """These tensors are small, and threads that wait for each other cost more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_device(DEVICE)
    with kernels_serve():
        yield
    torch.set_default_device(None)
    torch.set_num_threads(threads)


block_sizes = st.sampled_from(BLOCK_SIZES)


def check_against_brute(paged: Paged, out: torch.Tensor, seq: int = 0) -> int:
    """Outputs of a whole sequence against the brute force on its cache; how many rows were safe."""
    assert out.dtype == paged.dtype
    should = expected(paged, seq)
    error = np.abs(out.double().cpu().numpy() - should.out).max((1, 2), initial=0.0)
    assert not np.isnan(error).any()
    assert (error <= should.bound)[should.safe].all()
    return int(should.safe.sum())


def check_same(first: torch.Tensor, second: torch.Tensor) -> None:
    """Equal but for the order of float sums, of at most 64 roundings of the largest number."""
    assert first.shape == second.shape
    scale = max(1.0, float(first.abs().max())) if first.numel() else 1.0
    assert float((first - second).abs().max()) <= 64 * torch.finfo(first.dtype).eps * scale


def check_same_selection(
    first: tuple[torch.Tensor, torch.Tensor],
    other: tuple[torch.Tensor, torch.Tensor],
    paged: Paged,
    at: range,
    alone: bool,
) -> None:
    """Bitwise; but kernels have a path of their own for steps whose rows are all alone in their
    sequences, which adds up scores in another order: rows `at` of the sequence in `paged`, which
    holds all of it, are then the same as far as this order cannot tell.
    """
    if not alone or "TRITON" not in BACKENDS:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])
        return
    should = expected(paged)
    same = (first[0] == other[0]).all(1).cpu().numpy()
    assert same[should.safe[at]].all()
    off = (first[1] - other[1]).abs().amax(1).double().cpu().numpy()
    assert (off <= 2 * should.bias_error[at])[same].all()


def check_auxiliary(paged: Paged, of: Document, seq: int = 0) -> None:
    """Every byte of the auxiliary head, and its keys and summaries, against the brute force."""
    held, answer_bytes = (
        paged.stored(seq),
        brute.auxiliary_bytes(of.roles, paged.where[seq], of.rule),
    )
    defined = answer_bytes != UNDEFINED
    assert (held.auxiliary[defined] == answer_bytes[defined]).all()
    exact = of.run("float64")
    numbers = brute.auxiliary_numbers(exact.index_keys, exact.summaries, of.rule)
    there = ~np.isnan(numbers)
    # Keys are rounded once; a summary is a sum of rounded keys with rounded weights.
    bound = 64 * torch.finfo(paged.dtype).eps * np.abs(exact.index_keys).max()
    assert np.abs(held.auxiliary[there] - numbers[there]).max() <= bound


def shaped_alike(several: list[Document]) -> list[Document]:
    """The same roles with one number of heads and one head_cls, so that they fit one batch."""
    alike = [document(of.prompt, of.decoded, of.rule, seed=i) for i, of in enumerate(several)]
    return [replace(of, head_cls=alike[0].head_cls) for of in alike]


@some
@given(of=documents(), size=block_sizes, backend=backends, cached=st.booleans(), data=st.data())
def test_prefill_and_decode_agree_with_the_brute_force(
    of: Document, size: int, backend: str, cached: bool, data: st.DataObject
) -> None:
    paged = Paged([of], size, seed=data.draw(st.integers(0, 99)))
    chunks = data.draw(cuts(len(of.prompt)))
    out = paged.run(chunks, backend, cached=cached)
    check_against_brute(paged, out)
    check_auxiliary(paged, of)


@some
@given(of=documents(max_decoded=0), backend=backends, prefix=st.booleans(), data=st.data())
def test_chunks_do_not_matter(
    of: Document, backend: str, prefix: bool, data: st.DataObject
) -> None:
    whole, cut = Paged([of], 16, seed=1), Paged([of], 16, seed=1)
    expected_out = whole.prefill([len(of.prompt)], backend)
    check_same(expected_out, cut.prefill(data.draw(cuts(len(of.prompt))), backend, prefix=prefix))
    check_auxiliary(cut, of)


@some
@given(
    of=documents(), backend=backends, sizes=st.tuples(block_sizes, block_sizes), seed=st.integers()
)
def test_cache_blocks_and_their_order_do_not_matter(
    of: Document, backend: str, sizes: tuple[int, int], seed: int
) -> None:
    first = Paged([of], sizes[0], seed=0)
    second = Paged([of], sizes[1], seed=abs(seed))
    whole = [len(of.prompt)]
    check_same(first.run(whole, backend), second.run(whole, backend))


@some
@given(of=documents(min_decoded=1), backend=backends, data=st.data())
def test_recomputing_decoded_tokens_in_a_prefill_changes_nothing(
    of: Document, backend: str, data: st.DataObject
) -> None:
    stepwise, recomputed = Paged([of], 8), Paged([of], 8)
    one_by_one = stepwise.run([len(of.prompt)], backend)
    check_same(one_by_one, recomputed.prefill(data.draw(cuts(len(of.roles))), backend))
    check_auxiliary(recomputed, of)


@some
@given(of=documents(min_decoded=1), backend=backends, size=block_sizes, data=st.data())
def test_cached_rebuilt_and_recomputed_summaries_are_the_same(
    of: Document, backend: str, size: int, data: st.DataObject
) -> None:
    """Also for another owner's cache, whose free place holds anything."""
    total, last = len(of.roles), len(of.roles) - 1
    here = [Paged([of], size) for _ in range(5)]
    for paged in here:
        paged.run([len(of.prompt)], backend)
    prefix = data.draw(st.integers(0, total))
    for paged in here[2:4]:
        paged.spoil(data.draw(st.sampled_from([0.0, float("nan"), 7.0, 60000.0])))
    dash_portable.rebuild_summaries(
        here[3].cache,
        here[3].table([0], [last]),
        torch.tensor([last], dtype=torch.int32),
        here[3].head_cls[0],
        here[3].config,
    )
    row = [(0, last)]
    outputs = [
        here[0].decode(row, backend, cached=True),
        here[1].decode(row, backend, cached=True, prefix_lens=[prefix]),
        here[2].decode(row, backend, cached=False),
        here[3].decode(row, backend, cached=True),
        here[4].decode(row, backend, cached=False),
    ]
    for other in outputs[1:]:
        check_same(outputs[0], other)
    check_auxiliary(here[3], of)


@some
@given(of=documents().filter(lambda of: of.k.shape[1] == 2), backend=backends)
def test_a_subset_of_heads_gives_its_part_of_the_output(of: Document, backend: str) -> None:
    group = of.q.shape[1] // 2
    whole = Paged([of], 8).run([len(of.prompt)], backend)
    for head in range(2):
        mine = slice(head * group, (head + 1) * group)
        part = replace(of, q=of.q[:, mine], k=of.k[:, head : head + 1], v=of.v[:, head : head + 1])
        check_same(whole[:, mine], Paged([part], 8).run([len(of.prompt)], backend))


@some
@given(
    several=st.lists(
        documents(max_prompt=60, max_decoded=4, min_decoded=1), min_size=2, max_size=4
    ),
    backend=backends,
    cached=st.booleans(),
    data=st.data(),
)
def test_padding_and_neighbours_in_a_batch_change_nothing(
    several: list[Document], backend: str, cached: bool, data: st.DataObject
) -> None:
    same_shape = shaped_alike(several)
    alone = [Paged([of], 16).run([len(of.prompt)], backend, cached=cached) for of in same_shape]
    batch = Paged(same_shape, 16, seed=3)
    for seq, of in enumerate(same_shape):
        batch.prefill([len(of.prompt)], backend, seq=seq)
    for step in range(max(len(of.decoded) for of in same_shape)):
        rows: list[tuple[int, int] | None] = [
            (seq, len(of.prompt) + step) if step < len(of.decoded) else None
            for seq, of in enumerate(same_shape)
        ]
        rows = data.draw(st.permutations([*rows, None]))
        out = batch.decode(rows, backend, cached=cached)
        for i, row in enumerate(rows):
            if row is None:
                assert (out[i] == 0).all()
            else:
                check_same(alone[row[0]][row[1]], out[i])
    for seq, of in enumerate(same_shape):
        check_auxiliary(batch, of, seq)


@some
@given(
    several=st.lists(documents(max_prompt=60, max_decoded=5), min_size=1, max_size=3),
    backend=backends,
    page_table=st.booleans(),
    data=st.data(),
)
def test_steps_that_mix_prompts_chunks_and_decodes(
    several: list[Document], backend: str, page_table: bool, data: st.DataObject
) -> None:
    """Any number of rows of any sequences in a step, and their selections are bitwise the same."""
    batch_of = shaped_alike(several)
    alone = []
    for of in batch_of:
        own = Paged([of], 16)
        outputs, selections = own.step([(0, 0, len(of.roles))], backend)
        alone.append((outputs[0], selections[0], own))
    batch = Paged(batch_of, 16, seed=5)
    done = [0] * len(batch_of)
    while any(at < len(of.roles) for at, of in zip(done, batch_of, strict=True)):
        parts = []
        for seq, of in enumerate(batch_of):
            left = len(of.roles) - done[seq]
            if left and (take := data.draw(st.integers(0 if parts or seq else 1, left))):
                parts.append((seq, done[seq], done[seq] + take))
        if not parts:
            continue
        padding = data.draw(st.lists(st.integers(0, 2), max_size=len(parts)))
        outputs, selections = batch.step(parts, backend, padding, page_table)
        for (seq, first, end), out, (ids, bias) in zip(parts, outputs, selections, strict=True):
            check_same(alone[seq][0][first:end], out)
            whole = (alone[seq][1][0][first:end], alone[seq][1][1][first:end])
            single = max(map(len, outputs)) == 1
            check_same_selection((ids, bias), whole, alone[seq][2], range(first, end), single)
            done[seq] = end
    for seq, of in enumerate(batch_of):
        check_auxiliary(batch, of, seq)


@pytest.mark.parametrize("chunk", [1, 7, 97])
@pytest.mark.parametrize("name", ["pages", "text_only"])
def test_a_selection_is_bitwise_the_same_however_the_prompt_is_cut(name: str, chunk: int) -> None:
    of = document(PROMPTS[name], rule=replace(SMALL, topk=12, window=16))
    total = len(of.prompt)
    own = Paged([of], 16)
    _, whole = own.step([(0, 0, total)])
    paged, steps = Paged([of], 16), []
    for first in range(0, total, chunk):
        _, (chosen,) = paged.step([(0, first, min(first + chunk, total))])
        steps.append([x.clone() for x in chosen])
    ids, bias = map(torch.cat, zip(*steps, strict=True))
    check_same_selection((ids, bias), whole[0], own, range(total), chunk == 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_documents_share_their_first_cache_blocks_through_a_page_table(backend: str) -> None:
    """Same first page, other pages later: they overwrite each other's counts, and need them not."""
    shared = runs((MARKER, 1), (IMAGE, 20), (MARKER, 1), (IMAGE, 10))
    first = document(
        [*shared, *runs((IMAGE, 12), (MARKER, 1), (IMAGE, 9), (TEXT, 6))],
        [TEXT, MARKER, TEXT, MARKER, TEXT, MARKER, TEXT, MARKER],
        SMALL,
    )
    second = document(
        [*shared, *runs((TEXT, 2), (IMAGE, 3), (TEXT, 30))],
        [MARKER, TEXT, MARKER, TEXT, TEXT, MARKER],
        SMALL,
        seed=1,
    )
    common = len(shared) // 16 * 16
    same = {
        name: np.concatenate([getattr(first, name)[:common], getattr(second, name)[common:]])
        for name in ("q", "k", "v", "iq", "ik")
    }
    second = replace(second, **same, head_cls=first.head_cls)
    alone = [Paged([of], 16).run([len(of.prompt)], backend) for of in (first, second)]

    both = Paged([first, second], 16)
    both.blocks[1][: common // 16] = both.blocks[0][: common // 16]
    lengths = [len(first.prompt), len(second.prompt)]
    (out,), _ = both.step([(0, 0, lengths[0])], backend, page_table=True)
    check_same(alone[0][: lengths[0]], out)
    (out,), _ = both.step([(1, common, lengths[1])], backend, page_table=True)
    check_same(alone[1][common : lengths[1]], out)
    for step in range(6):
        parts = [(seq, length + step, length + step + 1) for seq, length in enumerate(lengths)]
        outputs, _ = both.step(parts, backend, page_table=True)
        for (seq, at, end), out in zip(parts, outputs, strict=True):
            check_same(alone[seq][at:end], out)


@some
@given(
    rows=st.integers(1, 3),
    kept=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    backend=backends,
    data=st.data(),
)
def test_attention_over_gathered_segments(
    rows: int, kept: int, heads: tuple[int, int], backend: str, data: st.DataObject
) -> None:
    block, local, width = 8, 16, 64
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    lengths = [
        [data.draw(st.integers(0, block)) for _ in range(kept)] + [data.draw(st.integers(1, local))]
        for _ in range(rows)
    ]
    places = kept * block + local
    query = random.standard_normal((rows, heads[0], width)).astype(np.float32)
    keys, values = random.standard_normal((2, rows, places, heads[1], width)).astype(np.float32)
    bias = random.standard_normal((rows, kept)).astype(np.float32)
    exact = np.stack(
        [
            brute.attend_segments(query[i], keys[i], values[i], lengths[i], list(bias[i]), block)
            for i in range(rows)
        ]
    )
    for row in range(rows):
        for segment in range(kept + 1):
            at = segment * block
            end = at + (block if segment < kept else local)
            keys[row, at + int(lengths[row][segment]) : end] = np.nan
            values[row, at + int(lengths[row][segment]) : end] = np.nan
    out = dash_portable.flash_dash_attention(
        torch.tensor(query),
        torch.tensor(keys).flatten(0, 1),
        torch.tensor(values).flatten(0, 1),
        torch.tensor(lengths).flatten().int(),
        torch.tensor(bias),
        backend,
        block,
        local,
    )
    check_same(torch.tensor(exact).float(), out)


@some
@given(of=documents(max_prompt=SMALL.local, max_decoded=0), backend=backends)
def test_within_the_local_window_it_is_causal_attention(of: Document, backend: str) -> None:
    paged = Paged([of], 4)
    out = paged.run([len(of.prompt)], backend)
    exact = of.run()
    dense = brute.causal(exact.query, exact.keys, exact.values)
    bound = 64 * 2.0**-23 * max(1.0, float(np.abs(of.v).max()))
    assert np.abs(out.double().cpu().numpy() - dense).max() <= bound


# In the interpreter, which is slow, every prompt has one type: its turn's.
TYPED = [
    pytest.param(name, dtype, marks=pytest.mark.full if INTERPRETED and (i + j) % 3 else [])
    for i, name in enumerate(PROMPTS)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "dtype"), TYPED)
def test_every_kind_of_prompt_in_every_type(name: str, dtype: str, backend: str) -> None:
    prompt = PROMPTS[name]
    of = document(prompt, random_answer(6, seed=1), heads=4, kv_heads=2)
    paged = Paged([of], 16, dtype)
    half = len(prompt) // 2
    out = paged.run([half, len(prompt) - half] if half else [len(prompt)], backend)
    safe = check_against_brute(paged, out)
    assert safe > 0.8 * len(of.roles)
    check_auxiliary(paged, of)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_stored_at_once_is_the_same_cache(name: str) -> None:
    of = document(PROMPTS[name])
    paged, stored = Paged([of], 16), Paged([of], 16)
    total = len(of.prompt)
    paged.prefill([total])
    _, k, v, _, ik = stored.inputs(0, 0, total)
    result = dash_portable.cache_dash_prefill(
        k, v, ik, stored.roles(0, 0, total), stored.slots(0, 0, total), stored.cache,
        stored.config, head_cls=stored.head_cls[0],
    )  # fmt: skip
    assert result is None
    assert torch.equal(paged.cache.isnan(), stored.cache.isnan())
    check_same(paged.cache.nan_to_num(), stored.cache.nan_to_num())


def blocks_read(out: np.ndarray, position: int, rule: brute.Rule) -> dict[int, tuple[float, float]]:
    """Kept blocks with their biases and what float32 may change of these, from an output that is
    the share of each block in the attention.

    With zero queries every key weighs exp(bias) of its block; values tell the block of a token.
    """
    low = max(position + 1 - rule.local, 0)
    newest = out[position // rule.block] / (position % rule.block + 1)  # one local key's weight
    # A share is a sum over its block's keys, divided by a sum over all keys; roundings of n terms
    # add up to about the root of n.
    rounding = 2.0**-22 * math.sqrt(rule.topk * rule.block + rule.local)
    found = {}
    for block in range(-(-low // rule.block)):
        remote = min((block + 1) * rule.block, low) - block * rule.block
        share = out[block] / newest
        weight = share - (rule.block - remote)  # less its tokens in the window
        if weight > 2 * rounding * share:
            found[block] = float(np.log(weight / remote)), 2 * rounding * share / weight
    return found


ALWAYS = {
    ("two_pages", 1, 32), ("two_pages", 97, 16), ("two_pages", 0, 128),
    ("small_blocks_many_pages", 7, 8), ("small_blocks_many_pages", 0, 64),
    ("shorter_than_window", 7, 16), ("text_between_pages", 97, 64),
    ("text_between_pages", 7, 8),
}  # fmt: skip
GRID = [
    pytest.param(*case, marks=[] if case in ALWAYS else pytest.mark.full)
    for case in itertools.product(CASES, (1, 7, 97, 0), (8, 16, 32, 64, 128))  # 0: the whole prompt
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "chunk", "size"), GRID)
def test_golden_vectors_end_to_end(name: str, chunk: int, size: int, backend: str) -> None:
    """Blocks and biases read off the attention's output, with the cache in between."""
    case = golden(name)
    of, rule = case.document, case.document.rule
    total, prompt = len(of.roles), len(of.prompt)
    values = np.eye(rule.dim)[np.arange(total) // rule.block][:, None]
    of = replace(of, q=np.zeros_like(of.q[:, :1]), v=values)
    paged = Paged([of], size)
    chunk = chunk or prompt
    lengths = [min(chunk, prompt - at) for at in range(0, prompt, chunk)]
    out = paged.run(lengths, backend).double().cpu().numpy()[:, 0]
    compared, should = 0, expected(paged)
    for position, row in enumerate(case.rows):
        state = paged.stored().auxiliary[position, rule.dim + 2 : rule.dim + 10]
        assert state @ [1, 256, 65536, 2**24, 0, 0, 0, 0] == row.tok
        assert state @ [0, 0, 0, 0, 1, 256, 65536, 2**24] == row.page
        if row.margin <= 1e-3:
            continue
        found = blocks_read(out[position], position, rule)
        assert set(found) == set(row.blocks)
        for block, bias in zip(row.blocks, row.bias, strict=True):
            read, rounding = found[block]
            # Ours and the independent implementation's may each be off, in either direction.
            assert abs(read - bias) <= rounding + 2 * should.bias_error[position]
        compared += 1
    assert compared > 0.95 * total
