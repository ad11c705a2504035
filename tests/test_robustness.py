"""What may be anything is: padding, strides, index types, free places, and plain garbage."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dash_portable
from dash_portable import DashAttention, DashError, DashStep, dispatch, self_test
from dash_portable.step import row_positions
from tests.machines import MACHINES
from tests.scene import (
    CALLS,
    CONFIG,
    HEADS,
    KV_HEADS,
    OUTSIDE,
    PROMPT,
    SIZE,
    TABLES,
    WIDTH,
    Scene,
    bits,
    run_step,
    same,
    slots_of,
)

BACKENDS = ("EAGER", "SDPA")
ATTENDING = ("prefill", "decode", "step")
both = pytest.mark.parametrize("backend", BACKENDS)
every_call = pytest.mark.parametrize("call", sorted(CALLS))
attending = pytest.mark.parametrize("call", ATTENDING)
FREE = WIDTH + 22  # where the free place of an auxiliary row begins
HUGE = (-(2**63), -1, 2**40, 2**63 - 1)


@pytest.fixture(scope="module")
def stored() -> Scene:
    return Scene()


@pytest.fixture
def scene(stored: Scene) -> Scene:
    return another(stored)


def another(scene: Scene) -> Scene:
    made = copy.copy(scene)
    made.cache = scene.cache.clone()
    return made


def called(scene: Scene, call: str, **changes: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What a call gives, and the cache after it, of a copy of the scene."""
    own = another(scene)
    out = CALLS[call](**{**getattr(own, call)(), **changes})
    return out, own.cache


def alike(first: tuple[Any, torch.Tensor], second: tuple[Any, torch.Tensor]) -> bool:
    return same(first[1], second[1]) and (first[0] is None or same(first[0], second[0]))


# --- padding ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("huge", HUGE)
def test_padding_holds_anything(scene: Scene, backend: str, number: float, huge: int) -> None:
    expected = called(scene, "decode", backend=backend)
    given = scene.decode()
    for name in ("q", "k", "v", "iq", "ik"):
        given[name][1] = number
    for name in ("roles", "seq_lens", "block_table", "prefix_lens"):
        given[name][1] = huge
    given["slots"][1] = -(2**63)
    given["positions"][:, 1] = huge
    del given["cache"]
    found = called(scene, "decode", **{**given, "backend": backend})
    assert alike(found, expected)
    assert not found[0][1].any()


@both
def test_padding_of_a_step_holds_anything(scene: Scene, backend: str) -> None:
    expected = called(scene, "step", backend=backend)
    given = scene.step()
    padding = given["slots"] < 0
    for name in ("q", "k", "v", "iq", "ik"):
        given[name][padding] = torch.nan
    given["roles"][padding] = 2**62
    given["positions"][:, padding] = -(2**63)
    del given["cache"]
    assert alike(called(scene, "step", **{**given, "backend": backend}), expected)


@both
def test_a_sequence_without_live_rows_holds_anything(scene: Scene, backend: str) -> None:
    given = scene.decode()
    given["slots"][:] = -1
    given["seq_lens"][:] = 2**62
    given["block_table"][:] = OUTSIDE
    before = scene.cache.clone()
    out = dash_portable.paged_dash_decode(**{**given, "backend": backend})
    assert not out.any()
    assert same(scene.cache, before)


def test_an_empty_batch_is_no_error(scene: Scene) -> None:
    before = scene.cache.clone()
    given = scene.decode()
    none = {name: x[:0] for name, x in given.items() if torch.is_tensor(x) and len(x) == 3}
    out = dash_portable.paged_dash_decode(**{**given, **none, "positions": None})
    assert out.shape == (0, HEADS, WIDTH)
    given = scene.prefill()
    none = {name: x[:0] for name, x in given.items() if torch.is_tensor(x) and len(x) == 33}
    none["positions"] = given["positions"][:, :0]
    assert dash_portable.paged_dash_prefill(**{**given, **none}).shape == (0, HEADS, WIDTH)
    given = scene.step()
    none = {name: x[:0] for name, x in given.items() if torch.is_tensor(x) and len(x) == 68}
    none["positions"] = given["positions"][:, :0]
    assert run_step(**{**given, **none, "query_lens": [0, 0]}).shape == (0, HEADS, WIDTH)
    none |= {"query_lens": [], "seq_lens": [], "block_table": given["block_table"][:0]}
    assert run_step(**{**given, **none, "prefix_lens": None}).shape == (0, HEADS, WIDTH)
    given = scene.rebuild()
    given |= {"block_table": given["block_table"][:0], "seq_lens": given["seq_lens"][:0]}
    dash_portable.rebuild_summaries(**given)
    given = {name: x[:0] if torch.is_tensor(x) else x for name, x in scene.segments().items()}
    assert dash_portable.flash_dash_attention(**given).shape == (0, HEADS, WIDTH)
    assert same(scene.cache, before)


# --- inputs ----------------------------------------------------------------------------------


@every_call
def test_inputs_are_not_modified(scene: Scene, call: str) -> None:
    given = getattr(scene, call)()
    read = {name: x for name, x in given.items() if torch.is_tensor(x) and name != "cache"}
    before = {name: x.clone() for name, x in read.items()}
    CALLS[call](**given)
    assert all(same(x, before[name]) for name, x in read.items())


@every_call
def test_gradients_do_not_reach_the_cache(scene: Scene, call: str) -> None:
    given = getattr(scene, call)()
    for name in ("q", "k", "v", "iq", "ik", "head_cls"):
        if name in given and call != "segments":
            given[name] = given[name].requires_grad_()
    out = CALLS[call](**given)
    assert not scene.cache.requires_grad
    assert out is None or not out.requires_grad


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_with_gradients_on_leaves_the_cache_alone(scene: Scene, compiled: bool) -> None:
    module = DashAttention(CONFIG, 0, 32, HEADS, KV_HEADS)
    step = planned(scene, {})
    run = torch.compile(module, backend="eager") if compiled else module
    out = run(torch.randn(68, 32), step, scene.cache)
    assert out.shape == (68, 32)
    assert not scene.cache.requires_grad


def strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The same numbers elsewhere: in a wider buffer, with the first two dimensions swapped, or
    in every second place.
    """
    if kind == "wider":
        buffer = torch.full((x.shape[0] + 2, *x.shape[1:-1], x.shape[-1] + 8), 7, dtype=x.dtype)
        view = buffer[1:-1, ..., 3:-5]
    elif kind == "swapped":
        view = torch.empty_like(x.transpose(0, -1)).contiguous().transpose(0, -1)
    else:
        view = torch.full((*x.shape, 2), 7, dtype=x.dtype)[..., 0]
    assert len(x) < 2 or not view.is_contiguous()
    return view.copy_(x)


@every_call
@both
@pytest.mark.parametrize("kind", ["wider", "swapped", "second"])
def test_strides_of_inputs_do_not_matter(scene: Scene, call: str, backend: str, kind: str) -> None:
    given = getattr(scene, call)()
    changes = {
        name: strided(x, kind)
        for name, x in given.items()
        if torch.is_tensor(x) and name != "cache" and (x.dim() > 1 or kind == "second")
    }
    chosen = {"backend": backend} if "backend" in given else {}
    expected = called(scene, call, **chosen)
    assert alike(called(scene, call, **changes, **chosen), expected)


CACHES = {
    "wider": lambda n, h, p, d: torch.full((n + 1, h + 1, p + 3, d + 8), 7.0)[1:, :-1, 1:-2, 4:-4],
    "tokens_first": lambda n, h, p, d: torch.full((n, p, h, d), 7.0).transpose(1, 2),
    "heads_first": lambda n, h, p, d: torch.full((h, n, p, d), 7.0).transpose(0, 1),
    "all_turned": lambda n, h, p, d: torch.full((p, h, n, d), 7.0).permute(2, 1, 0, 3),
    "layers": lambda n, h, p, d: torch.full((n, 3, h, p, d), 7.0)[:, 1],
}


@attending
@both
@pytest.mark.parametrize("kind", sorted(CACHES))
def test_strides_of_the_cache_do_not_matter(
    scene: Scene, call: str, backend: str, kind: str
) -> None:
    expected = called(scene, call, backend=backend)
    view = CACHES[kind](*scene.cache.shape)
    whole = torch.empty(0)
    whole.set_(view.untyped_storage())
    view.fill_(11.0)
    outside = whole == 7.0
    view.copy_(scene.cache)
    given = {**getattr(scene, call)(), "cache": view, "backend": backend}
    assert alike((CALLS[call](**given), view), expected)
    assert bool((whole[outside] == 7.0).all())


INDICES = ("roles", "slots", "positions", "block_table", "seq_lens", "prefix_lens", "used")


@every_call
@pytest.mark.parametrize("first", [torch.int32, torch.int64])
def test_index_types_do_not_matter(scene: Scene, call: str, first: torch.dtype) -> None:
    given, types = getattr(scene, call)(), [first, torch.int64, torch.int32]
    names = [name for name in INDICES if torch.is_tensor(given.get(name))]
    changes = {name: given[name].to(types[i % 3]) for i, name in enumerate(names)}
    assert alike(called(scene, call, **changes), called(scene, call))


@pytest.mark.parametrize("seed", range(4))
def test_rows_alone_in_their_sequence_are_placed_as_any_others(seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    slots = torch.randint(-2, 5, (40,), generator=made)
    lengths = torch.randint(-3, 90, (40,), generator=made)
    at = torch.arange(41)
    general, short = (
        row_positions(slots, at[:-1], at, lengths, alone=alone) for alone in (False, True)
    )
    assert same(general, short)


@both
@pytest.mark.parametrize("limit", [66, 80, 96, 10**12])
def test_a_longer_bound_changes_nothing(scene: Scene, backend: str, limit: int) -> None:
    expected = called(scene, "decode", backend=backend)
    assert alike(called(scene, "decode", backend=backend, max_model_len=limit), expected)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_query_heads_of_a_group_read_the_same_head(backend: str, dtype: torch.dtype) -> None:
    """As if every query head had a kv head of its own."""
    scene = Scene(dtype)
    given = {**scene.decode(), "backend": backend}
    wide = scene.cache[:, [0, 0, 1, 1, 2]].contiguous()
    own = {name: given[name].repeat_interleave(2, 1) for name in ("k", "v")}
    out = dash_portable.paged_dash_decode(**given)
    each = dash_portable.paged_dash_decode(**{**given, **own, "cache": wide})
    assert out.dtype == dtype
    # Only the order of float32 sums may differ.
    bound = 2 * torch.finfo(dtype).eps * float(out.abs().max())
    assert float((each.double() - out.double()).abs().max()) <= bound


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


DEFAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "deterministic": deterministic_algorithms,
}


@both
@every_call
@pytest.mark.parametrize("default", DEFAULTS)
def test_torchs_modes_do_not_matter(scene: Scene, call: str, backend: str, default: str) -> None:
    """A server may have set torch's default type or device for its own model, or run it under
    autocast.
    """
    changes = {"backend": backend} if call in (*ATTENDING, "segments") else {}
    expected = called(scene, call, **changes)
    own = another(scene)
    given = {**getattr(own, call)(), **changes}
    with DEFAULTS[default]():
        out = CALLS[call](**given)
    assert alike((out, own.cache), expected)


@pytest.mark.parametrize("default", DEFAULTS)
def test_the_self_test_minds_no_default(default: str) -> None:
    rows = [row for row in (*dispatch.BACKENDS, *dispatch.SHARED) if row.fallback]
    assert len(rows) == 3
    with DEFAULTS[default]():
        assert [self_test.run(row, MACHINES["cpu"]) for row in rows] == [""] * 3


# --- summaries -------------------------------------------------------------------------------


def spoil(scene: Scene, what: float) -> None:
    """Another owner's cache: the free place of every stored row holds anything."""
    for table in TABLES:
        for at in range(len(PROMPT)):
            scene.cache[table[at // SIZE], -1, at % SIZE, FREE:] = what


@both
@pytest.mark.parametrize("prefix", [-(2**31), -1, 0, 1, 7, 8, 9, 31, 64, 65, 66, 2**31 - 1, 2**62])
def test_prefix_lens_change_nothing(scene: Scene, backend: str, prefix: int) -> None:
    expected = called(scene, "decode", backend=backend, prefix_lens=None)
    given = torch.tensor([prefix, 0, 66 - prefix])
    assert alike(called(scene, "decode", backend=backend, prefix_lens=given), expected)
    expected = called(scene, "prefill", backend=backend)
    assert alike(called(scene, "prefill", backend=backend, prefix_lens=given[:1]), expected)


@both
@pytest.mark.parametrize("what", [float("nan"), float("inf"), -300.0, 0.0, 255.0, 0.5])
def test_a_foreign_free_place_is_not_trusted_or_rebuilt(
    scene: Scene, backend: str, what: float
) -> None:
    expected, _ = called(scene, "decode", backend=backend)
    clean = scene.cache.clone()
    spoil(scene, what)
    found, _ = called(scene, "decode", backend=backend, cached_summaries=False)
    assert same(found, expected)
    dash_portable.rebuild_summaries(**scene.rebuild())
    assert same(called(scene, "decode", backend=backend)[0], expected)
    known = clean[:, -1].nan_to_num(nan=what)
    # Only what was stored there before: the rest of a free place is nobody's.
    written = ~scene.cache[:, -1].eq(known) & ~clean[:, -1].isnan()
    assert not written.any()


@both
def test_a_prompt_stored_without_summaries_is_rebuilt(scene: Scene, backend: str) -> None:
    expected = called(scene, "decode", backend=backend)
    for seq in range(2):
        scene.cache[list(TABLES[seq])] = torch.nan
        dash_portable.cache_dash_prefill(**{**scene.store(seq), "head_cls": None})
    assert same(called(scene, "decode", backend=backend, cached_summaries=False)[0], expected[0])
    dash_portable.rebuild_summaries(**scene.rebuild())
    assert alike(called(scene, "decode", backend=backend), expected)


# --- planned steps ---------------------------------------------------------------------------

_RUN_ONLY = ("q", "k", "v", "iq", "ik", "head_cls", "layer", "out")


def planned(scene: Scene, changes: dict[str, Any]) -> DashStep:
    arguments = {**scene.step(), **changes}
    return DashStep.plan(**{name: x for name, x in arguments.items() if name not in _RUN_ONLY})


@both
def test_an_updated_step_equals_a_fresh_plan(scene: Scene, backend: str) -> None:
    """A step of two decodes, first both padding, then one token after another."""
    at, given = len(PROMPT), scene.decode()
    rows = {name: given[name][:2] for name in ("q", "k", "v", "iq", "ik")}
    none = {
        "seq_lens": torch.zeros(2, dtype=torch.int64),
        "block_table": torch.full((2, 6), OUTSIDE),
        "slots": torch.full((2,), -1),
        "roles": torch.full((2,), 99),
        "prefix_lens": torch.zeros(2, dtype=torch.int64),
    }
    shared = {"config": CONFIG, "backend": backend, "num_heads": HEADS, "max_model_len": 96}
    fresh = another(scene)
    step = DashStep.plan([1, 1], positions=None, cache=scene.cache, graph=True, **none, **shared)
    for i in range(6):
        slots = [slots_of(seq, at + i, at + i + 1) for seq in (0, 1)]
        now = {
            "seq_lens": torch.tensor([at + i + 1] * 2),
            "block_table": torch.tensor(TABLES),
            "slots": torch.cat(slots).int(),
            "roles": torch.tensor([i % 3, 0]),
            "prefix_lens": torch.tensor([8 * i, at]),
        }
        if i == 5:
            now["slots"][0] = -1  # a request that left; the other goes on
        step.update(**now)
        ours = step.run(**rows, cache=scene.cache, head_cls=scene.head_cls, layer=1)
        once = DashStep.plan([1, 1], positions=None, cache=fresh.cache, **now, **shared)
        theirs = once.run(**rows, cache=fresh.cache, head_cls=fresh.head_cls, layer=1)
        assert same(ours, theirs)
        assert same(scene.cache, fresh.cache)


@both
def test_out_is_filled_and_returned(scene: Scene, backend: str) -> None:
    expected = called(scene, "step", backend=backend)
    out = torch.full((68, HEADS, WIDTH), torch.nan, requires_grad=True)
    found = called(scene, "step", backend=backend, out=out)
    assert found[0] is out
    assert same(out.detach(), expected[0])


@both
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_wrong_number_reaches_only_rows_that_read_it(
    scene: Scene, backend: str, number: float
) -> None:
    """A value that overflowed, in a row that most other rows do not read."""
    given = scene.step()
    clean = run_step(**{**given, "backend": "EAGER"})
    given["v"][3] = number
    out = run_step(**{**given, "backend": backend})
    wrong = ~out.isfinite().flatten(1).all(1)
    reads = run_step(**{**given, "backend": "EAGER"}).isfinite().flatten(1).all(1)
    assert torch.equal(wrong, ~reads)
    assert reads[-20:65].any()
    # The same keys in another order: a logit is a sum of products of the size of its two vectors,
    # and moves the output by as much of the largest value.
    longest = [float(given[name].norm(dim=-1).max()) for name in ("q", "k")]
    eps, largest = torch.finfo(out.dtype).eps, float(clean.abs().max())
    bound = 2 * eps * (1 + longest[0] * longest[1]) * largest
    assert float((out[reads] - clean[reads]).abs().max()) <= bound


# --- garbage ---------------------------------------------------------------------------------


class Odd:
    """No number, no tensor, no text."""


THINGS: tuple[Any, ...] = (
    None, 3, -1, 2**40, 2**70, True, 1.5, float("nan"), "x", b"", (), [], [1], ["x"], {}, {"a": 1},
    Odd(), torch, torch.float32, torch.device("meta"), range(3), 1j,
)  # fmt: skip
SHAPES = ((), (0,), (1,), (3,), (4, 3), (1, 6), (3, 2, 64), (3, 4, 64), (65,), (0, 6), (2, 1, 1, 1))
DTYPES = (torch.int32, torch.int64, torch.uint8, torch.bool, torch.float32, torch.float16,
          torch.float64, torch.complex64)  # fmt: skip


@st.composite
def garbage(draw: st.DrawFn, right: Any) -> Any:
    """Any thing; any tensor; or the right tensor with some wrong numbers in it."""
    kind = draw(st.sampled_from(["thing", "tensor", "numbers", "numbers", "numbers"]))
    if kind == "thing":
        return draw(st.sampled_from(THINGS))
    if kind == "tensor" or not torch.is_tensor(right) or not right.numel():
        made = torch.zeros(draw(st.sampled_from(SHAPES)), dtype=draw(st.sampled_from(DTYPES)))
        return made.to_sparse() if draw(st.integers(0, 9)) == 0 else made
    changed, flat = right.clone(), draw(st.integers(0, right.numel() - 1))
    if right.is_floating_point():
        number = draw(st.sampled_from([float("nan"), float("inf"), 1e38, 0.0]))
    else:
        number = draw(st.one_of(st.integers(-3, 100), st.sampled_from(HUGE)))
        changed = changed.long()
    changed.view(-1)[flat : flat + draw(st.integers(1, 3))] = number
    return changed


def may_change(scene: Scene, given: dict[str, Any], call: str) -> torch.Tensor:
    """Which numbers of the cache a call may write: its live rows, and the free place of the blocks
    that they complete; whole free places of sequences that are rebuilt.
    """
    allowed = torch.zeros(scene.cache.shape, dtype=torch.bool)
    if call == "segments":
        return allowed
    if call == "rebuild":  # wherever the table says, which may be a block that nobody has
        table = given["block_table"].flatten().long()
        allowed[table[(table >= 0) & (table < len(allowed))], -1, :, FREE:] = True
        return allowed
    live = given["slots"][given["slots"] >= 0].long()
    allowed[live // SIZE, :, live % SIZE] = True
    for slot in live.tolist():
        first = slot % SIZE // 8 * 8  # a sparse block of 8 lies inside a cache block of 16
        allowed[slot // SIZE, -1, first : first + 2, FREE:] = True
    return allowed


@settings(
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_garbage_gives_our_errors_and_no_wrong_write(stored: Scene, data: st.DataObject) -> None:
    scene = another(stored)
    call = data.draw(st.sampled_from(sorted(CALLS)))
    given = getattr(scene, call)()
    for name in data.draw(st.sets(st.sampled_from(sorted(given)), min_size=1, max_size=2)):
        given[name] = data.draw(garbage(given[name]), label=name)
    before = bits(scene.cache).clone()
    try:
        CALLS[call](**given)
        allowed = may_change(scene, given, call)
    except DashError:
        allowed = torch.zeros(scene.cache.shape, dtype=torch.bool)
    assert not (~allowed & (bits(scene.cache) != before)).any()


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**31),
    call=st.sampled_from([*ATTENDING, "rebuild"]),
    kind=st.sampled_from(["bytes", "floats", "nan", "big"]),
    pages=st.booleans(),
    cached=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
def test_a_cache_full_of_garbage_is_read_within_bounds(
    seed: int, call: str, kind: str, pages: bool, cached: bool, backend: str
) -> None:
    """States that name pages which cannot be, counts and ranges of nothing."""
    random = torch.Generator().manual_seed(seed)
    shape = (16, KV_HEADS + 1, SIZE, 2 * WIDTH)
    cache = torch.randn(shape, generator=random)
    if kind == "bytes":
        cache[:, -1, :, WIDTH:] = torch.randint(
            256, shape[:1] + shape[2:3] + (WIDTH,), generator=random
        ).float()
    elif kind != "floats":
        cache[:, -1] = torch.nan if kind == "nan" else 3e38
    scene = Scene.__new__(Scene)
    scene.dtype, scene.cache, scene.head_cls = torch.float32, cache, torch.ones(WIDTH)
    given = getattr(scene, call)()
    if call == "step" and pages:
        given["page_table"] = torch.randint(-5, 2**31, (2, 4, 2), generator=random)
    if call in ("decode", "step"):
        given["cached_summaries"] = cached
    if call != "rebuild":
        given["backend"] = backend
    before = bits(cache).clone()
    CALLS[call](**given)
    assert not (~may_change(scene, given, call) & (bits(cache) != before)).any()
