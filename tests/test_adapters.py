"""Every adapter over its library's fake: the whole attend equals the oracle, and broken ones are
caught."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dash_portable import self_test
from dash_portable.backends import BACKENDS
from dash_portable.errors import BackendError
from dash_portable.segments import attend_given, gather, places, spans, ways
from dash_portable.segments.given import given_slots
from dash_portable.self_test import Case, make_case
from tests.fakes import (
    aiter,
    flash_attn2,
    flash_attn3,
    flash_attn4,
    flashinfer,
    torch_varlen,
    vllm_flash_attn,
    xpu,
)
from tests.fakes.machine import Fake
from tests.machines import MACHINES

# fake, adapter's file, runners that it serves
ADAPTERS: tuple[tuple[Fake, str, tuple[str, ...]], ...] = (
    (flash_attn2.CUDA, "flash_attn", ("Gathered2", "Segmented2")),
    (flash_attn2.CK, "flash_attn", ("Gathered2", "Segmented2")),
    (flash_attn2.TRITON, "flash_attn", ("Gathered2", "Segmented2")),
    (flash_attn3.V274, "flash_attn", ("Gathered3", "Segmented3", "Paged3")),
    (flash_attn3.V283, "flash_attn", ("Gathered3", "Segmented3", "Paged3")),
    (flash_attn3.MAIN, "flash_attn", ("Gathered3", "Segmented3", "Paged3")),
    (flash_attn4.B36, "flash_attn", ("Gathered4", "Segmented4")),
    (vllm_flash_attn.SM80, "flash_attn", ("VllmGathered2", "VllmSegmented2", "VllmPaged2")),
    (vllm_flash_attn.SM90, "flash_attn", ("VllmGathered3", "VllmSegmented3", "VllmPaged3")),
    (vllm_flash_attn.SM100, "flash_attn", ("VllmGathered4", "VllmSegmented4")),
    (flashinfer.V06, "flashinfer", ("Gathered", "Paged")),
    (flashinfer.V07, "flashinfer", ("Gathered", "Paged")),
    (aiter.CDNA, "aiter", ("Gathered", "Segmented")),
    (aiter.RDNA, "aiter", ("GatheredRdna", "SegmentedRdna")),
    (aiter.RDNA_NEW, "aiter", ("GatheredRdna", "SegmentedRdna")),
    (xpu.OLD, "xpu", ("Gathered", "Segmented")),
    (xpu.NEW, "xpu", ("Gathered", "Segmented")),
    (xpu.IPEX, "ipex", ("Gathered",)),
    (torch_varlen.V211, "torch_varlen", ("Gathered", "Segmented")),
    (torch_varlen.V212, "torch_varlen", ("Gathered", "Segmented")),
)
ROWS = [
    pytest.param(fake, f"dash_portable.backends.{file}:{runner}", id=f"{fake.name}-{runner}")
    for fake, file, runners in ADAPTERS
    for runner in runners
]


def runner_of(entry: str) -> Any:
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _forget_plans() -> None:
    """Plans are kept for a process; a fake lives for one test."""
    module = importlib.import_module("dash_portable.backends.flashinfer")
    module._plan_ragged.cache_clear()
    module._plan_paged.cache_clear()


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `torch.empty` holds NaN: unwritten output cannot pass."""

    def poisoned(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> torch.Tensor:
            tensor = make(*args, **options)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


def run(entry: str, case: Case) -> torch.Tensor:
    out = torch.full_like(case.query, float("nan"))
    runner_of(entry)(case.step).run(case.query, case.cache, case.ids, case.bias, out)
    return out


SHAPES = {
    "decode-bf16-mha-bs32": {},
    "decode-fp16-G4-bs16": {"dtype": torch.float16, "group": 4, "block_size": 16},
    "prefill-bf16-G2-bs64": {"phase": "prefill", "group": 2, "block_size": 64},
    "prefill-fp16-mha-bs128": {"phase": "prefill", "dtype": torch.float16, "block_size": 128},
    "decode-bf16-D128": {"head_dim": 128, "kv_heads": 1},
}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(("fake", "entry"), ROWS)
def test_attend_equals_the_oracle(
    fake: Fake, entry: str, shape: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.install(monkeypatch, tmp_path)
    case = make_case(**SHAPES[shape])
    out = run(entry, case)
    assert case.error(out) <= case.allowed()
    assert bool((out[case.step.row_pos < 0] == 0).all())


IN_PLACE = [row for row in ROWS if "Paged" in str(row.id)]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("fake", "entry"), IN_PLACE)
def test_in_place_equals_the_oracle(
    fake: Fake, entry: str, block_size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.install(monkeypatch, tmp_path)
    case = make_case(block_size=block_size, group=2, seed=block_size)
    assert case.error(run(entry, case)) <= case.allowed()


@pytest.mark.parametrize(("fake", "entry"), IN_PLACE)
def test_in_place_reads_a_strided_cache(
    fake: Fake, entry: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.install(monkeypatch, tmp_path)
    case = make_case(strided=True)
    assert not case.cache.is_contiguous()
    assert case.error(run(entry, case)) <= case.allowed()


@pytest.mark.parametrize(("fake", "entry"), IN_PLACE)
def test_in_place_does_not_take_heads_for_tokens(
    fake: Fake, entry: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As many kv heads as tokens in a cache block: no shape can tell which axis is which."""
    fake.install(monkeypatch, tmp_path)
    case = make_case(kv_heads=16, block_size=16)
    assert case.error(run(entry, case)) <= case.allowed()


@pytest.mark.parametrize(("fake", "entry"), IN_PLACE)
def test_in_place_copies_nothing(
    fake: Fake, entry: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the library gets lies in the cache, and the cache is as it was."""
    fake.install(monkeypatch, tmp_path)
    case = make_case(block_size=64)
    before = case.cache.clone()
    seen: list[torch.Tensor] = []
    original = places.cache_pages

    def recorded(cache: torch.Tensor, **options: Any) -> Any:
        pages = original(cache, **options)
        seen.extend((pages.key, pages.value))
        return pages

    for module in ("dash_portable.segments.ways", "dash_portable.backends.flashinfer"):
        monkeypatch.setattr(importlib.import_module(module), "cache_pages", recorded)
    run(entry, case)
    storage = case.cache.untyped_storage().data_ptr()
    assert {tensor.untyped_storage().data_ptr() for tensor in seen} == {storage}
    assert torch.equal(case.cache.nan_to_num(9.0), before.nan_to_num(9.0))


VARLEN = [
    row
    for row in ROWS
    if "Paged" in str(row.id) or "Segmented" in str(row.id)
    if "flashinfer" not in str(row.id)
]
CALLS = ("flash_attn_varlen_func", "flash_attn_with_kvcache", "varlen_attn")


@pytest.mark.parametrize(("fake", "entry"), VARLEN)
def test_no_library_is_given_a_run_without_keys(
    fake: Fake, entry: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An empty segment is shown as one key and left out by its length: what libraries answer for a
    run without keys differs, and FlashAttention 2 has answered nonsense for groups."""
    lengths = list[torch.Tensor]()

    def watched(real: Any) -> Any:
        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            used = [options.get(name) for name in ("seqused_k", "cache_seqlens")]
            starts = [options.get(name) for name in ("cu_seqlens_k", "cu_seq_k")]
            found = [one for one in used if one is not None]
            found += [one.diff() for one in starts if one is not None]
            lengths.append(found[0].clone())
            return real(*args, **options)

        return call

    for module in fake.install(monkeypatch, tmp_path).values():
        for name in CALLS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, watched(getattr(module, name)))
    case = make_case(group=2)
    assert case.error(run(entry, case)) <= case.allowed()
    where = spans(case.step.row_pos, case.ids, block=32, local=case.step.config.local)
    (given,) = lengths[-1:]
    assert bool((where.length == 0).any())
    assert given.shape == where.length.flatten().shape
    assert int(given.min()) == 1


def test_many_rows_take_several_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flash_attn2.CUDA.install(monkeypatch, tmp_path)
    monkeypatch.setattr(ways, "SCRATCH_BYTES", 1 << 20)
    case = make_case(phase="prefill")
    for entry in ("Gathered2", "Segmented2"):
        runner = runner_of(f"dash_portable.backends.flash_attn:{entry}")(case.step)
        assert len(runner.passes) > 1
        out = torch.full_like(case.query, float("nan"))
        runner.run(case.query, case.cache, case.ids, case.bias, out)
        assert case.error(out) <= case.allowed()


def test_a_step_without_rows_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = flash_attn2.CUDA.install(monkeypatch, tmp_path)["flash_attn"]
    monkeypatch.delattr(module, "flash_attn_varlen_func")
    case = make_case()
    none = torch.zeros(0, dtype=torch.int32)
    step = replace(case.step, row_seq=none, row_pos=none, slots=none.long(), roles=none)
    runner = runner_of("dash_portable.backends.flash_attn:Segmented2")(step)
    nothing = case.query[:0]
    runner.run(nothing, case.cache, case.ids[:0], case.bias[:0], nothing.clone())


def test_one_plan_serves_every_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second layer with other blocks, through the same runner, leaves nothing of the first."""
    flashinfer.V06.install(monkeypatch, tmp_path)
    first, second = make_case(seed=1), make_case(seed=2)
    for name in ("Gathered", "Paged"):
        runner = runner_of(f"dash_portable.backends.flashinfer:{name}")(first.step)
        for case in (first, second):
            runner.step = case.step
            out = torch.full_like(case.query, float("nan"))
            runner.run(case.query, case.cache, case.ids, case.bias, out)
            assert case.error(out) <= case.allowed()


# --- broken on purpose: each of these must show ------------------------------------------------


WITH_LSE = [row for row in ROWS if "Segmented" in str(row.id) or "Paged" in str(row.id)]
OTHER: dict[str, object] = {"HN": "NH", "NH": "HN", "e": "2", "2": "e"}


def run_misread(entry: str, case: Case, what: str) -> torch.Tensor:
    """The attend with the library's LSE taken for what it is not: "layout" or "base"."""
    made = runner_of(entry)(case.step)
    if entry.startswith("dash_portable.backends.flashinfer"):
        made.planned.meaning[what] = OTHER[made.planned.meaning[what]]
    else:
        setattr(made.planned, f"lse_{what}", OTHER[getattr(made.planned, f"lse_{what}")])
    out = torch.full_like(case.query, float("nan"))
    made.run(case.query, case.cache, case.ids, case.bias, out)
    return out


@pytest.mark.parametrize("what", ["layout", "base"])
@pytest.mark.parametrize(("fake", "entry"), WITH_LSE)
def test_a_misread_lse_is_caught(
    fake: Fake, entry: str, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Transposed, which its shape tells, or of the other base: for every way that merges by it."""
    fake.install(monkeypatch, tmp_path)
    case = make_case(group=2)
    if what == "layout":
        with pytest.raises(BackendError, match=r"found a log-sum-exp of \(\d+, \d+\)"):
            run_misread(entry, case, what)
        return
    out = run_misread(entry, case, what)
    assert not case.error(out) <= case.allowed()


def test_xpu_versions_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The old library under the new one's version number: its LSE then reads transposed."""
    wrong = Fake(
        name="old as new",
        distributions=xpu.NEW.distributions,
        modules=xpu.OLD.modules,
        arch=xpu.OLD.arch,
    )
    wrong.install(monkeypatch, tmp_path)
    with pytest.raises(BackendError, match=r"found a log-sum-exp of \(78, 2\)"):
        run("dash_portable.backends.xpu:Segmented", make_case())


@pytest.mark.parametrize("ignored", ["block_table", "seqused_k"])
def test_an_ignored_argument_is_caught(
    ignored: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's copy with a table or with lengths that it takes and never looks at."""
    module = vllm_flash_attn.SM90.install(monkeypatch, tmp_path)["vllm.vllm_flash_attn"]
    real = module.flash_attn_varlen_func

    @functools.wraps(real)
    def broken(*args: Any, **options: Any) -> Any:
        if ignored == "block_table":
            options["block_table"] = torch.zeros_like(options["block_table"])
        else:
            options["seqused_k"] = torch.full_like(options["seqused_k"], 128)
        return real(*args, **options)

    monkeypatch.setattr(module, "flash_attn_varlen_func", broken)
    case = make_case()
    for entry in ("VllmSegmented3", "VllmPaged3"):
        out = run(f"dash_portable.backends.flash_attn:{entry}", case)
        assert not case.error(out) <= case.allowed()


def test_an_ignored_bias_column_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flash_attn2.CUDA.install(monkeypatch, tmp_path)
    zeros = torch.zeros_like
    monkeypatch.setattr(gather, "bias_columns", lambda bias, *rest: (zeros(bias), zeros(bias)))
    case = make_case()
    out = run("dash_portable.backends.flash_attn:Gathered2", case)
    assert not case.error(out) <= case.allowed()


# --- refusals -----------------------------------------------------------------------------------


def test_xpu_refuses_the_slow_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = xpu.PARTLY.install(monkeypatch, tmp_path)
    case = make_case(head_dim=64)  # gathered with bias columns: 96
    with pytest.raises(BackendError, match="head_dim 96 is not compiled"):
        runner_of("dash_portable.backends.xpu:Gathered")(case.step)
    # Its own notice was seen before: the next plan must refuse all the same.
    made["vllm_xpu_kernels.flash_attn_interface"]._warned_missing_configs.add(
        "head_dim 96 is not compiled"
    )
    with pytest.raises(BackendError, match="head_dim 96 is not compiled"):
        runner_of("dash_portable.backends.xpu:Gathered")(case.step)
    assert case.error(run("dash_portable.backends.xpu:Segmented", case)) <= case.allowed()


def test_xpu_refuses_a_stand_in_whose_use_is_not_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Renamed in a later version, the note could no longer tell which kernel ran."""
    made = xpu.PARTLY.install(monkeypatch, tmp_path)["vllm_xpu_kernels.flash_attn_interface"]
    del made._warned_missing_configs
    monkeypatch.setattr(made, "_fallback_varlen_attn", print, raising=False)
    with pytest.raises(BackendError, match="no note of its use"):
        runner_of("dash_portable.backends.xpu:Segmented")(make_case().step)


@pytest.mark.parametrize("name", ["Gathered", "Paged"])
def test_a_build_that_fails_is_a_refusal(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """flashinfer compiles when it plans; without a compiler it raises whatever it likes."""
    module = flashinfer.V06.install(monkeypatch, tmp_path)["flashinfer"]

    def plan(self: object, *args: object, **options: object) -> None:
        raise RuntimeError("Could not find nvcc")

    for wrapper in ("Ragged", "Paged"):
        made = getattr(module, f"BatchPrefillWith{wrapper}KVCacheWrapper")
        monkeypatch.setattr(made, "plan", plan)
    with pytest.raises(BackendError, match="flashinfer: RuntimeError: Could not find nvcc"):
        runner_of(f"dash_portable.backends.flashinfer:{name}")(make_case().step)


def test_plans_are_kept_a_few_and_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One plan for all steps of a shape, of any process's layers; the least recently used goes; all
    wrappers share one workspace."""
    module = flashinfer.V06.install(monkeypatch, tmp_path)["flashinfer"]
    adapter = importlib.import_module("dash_portable.backends.flashinfer")
    kind = module.BatchPrefillWithRaggedKVCacheWrapper
    plan, made, rooms = kind.plan, list[object](), list[torch.Tensor]()

    def counted(self: Any, *args: Any, **options: Any) -> None:
        made.append(self)
        plan(self, *args, **options)

    init = kind.__init__

    def spied(self: Any, workspace: torch.Tensor, *args: Any, **options: Any) -> None:
        rooms.append(workspace)  # held: a place that was given back would be given again
        init(self, workspace, *args, **options)

    monkeypatch.setattr(kind, "plan", counted)
    monkeypatch.setattr(kind, "__init__", functools.wraps(init)(spied))
    runner = runner_of("dash_portable.backends.flashinfer:Gathered")
    case = make_case()
    first, again = runner(case.step), runner(case.step)
    assert first.planned.wrapper is again.planned.wrapper
    assert len(made) == 1
    for group in range(2, 2 + adapter.PLANS):  # as many other shapes as are kept
        runner(make_case(group=group).step)
    assert adapter._plan_ragged.cache_info().currsize == adapter.PLANS
    assert runner(case.step).planned.wrapper is not first.planned.wrapper
    assert len(rooms) == adapter.PLANS + 2
    assert len({room.data_ptr() for room in rooms}) == 1


def test_plans_stay_on_the_host_whatever_torchs_default_device_is() -> None:
    adapter = importlib.import_module("dash_portable.backends.flashinfer")
    place = torch.device("cpu")
    shape = adapter.Shape(
        runs=4,
        lengths=(32, 128),
        heads=2,
        kv_heads=2,
        width=64,
        value_width=64,
        scale=1.0,
        dtype=torch.bfloat16,
        device=place,
        deterministic=False,
    )
    with torch.device("meta"):
        assert shape.starts().tolist() == [0, 32, 160, 192, 320]


def test_a_plan_inside_a_graph_is_its_own_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flashinfer.V06.install(monkeypatch, tmp_path)
    adapter = importlib.import_module("dash_portable.backends.flashinfer")
    monkeypatch.setattr(adapter, "_PINNED", [])
    case, captured = make_case(), make_case(graph=True)
    for name in ("Gathered", "Paged"):
        runner = runner_of(f"dash_portable.backends.flashinfer:{name}")
        plain, first, second = runner(case.step), runner(captured.step), runner(captured.step)
        planned = [getattr(one.planned, "wrapper", one.planned) for one in (plain, first, second)]
        assert len(set(map(id, planned))) == 3
    assert len(adapter._PINNED) == 4
    assert adapter._plan_ragged.cache_info().currsize == 1


def test_a_plan_that_a_capture_meets_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`paged_dash_decode` and `flash_dash_attention` are captured without being told: the plan that
    the graph reads outlives the cache of plans and the runner."""
    flashinfer.V06.install(monkeypatch, tmp_path)
    adapter = importlib.import_module("dash_portable.backends.flashinfer")
    monkeypatch.setattr(adapter, "_PINNED", [])
    case = make_case()
    for name in ("Gathered", "Paged"):
        runner = runner_of(f"dash_portable.backends.flashinfer:{name}")
        warm = runner(case.step).planned
        assert not [one for one in adapter._PINNED if one is getattr(warm, "wrapper", warm)]
        with monkeypatch.context() as capture:
            capture.setattr(adapter, "is_capturing", lambda: True)
            for _ in range(2):  # layers
                runner(case.step)
    assert len(adapter._PINNED) == 2


@pytest.mark.parametrize(
    ("fake", "module", "runner"),
    [
        (aiter.CDNA, "aiter.ops.mha", "aiter:Gathered"),
        (aiter.CDNA, "aiter.ops.mha", "aiter:Segmented"),
        (flash_attn4.B36, "flash_attn.cute", "flash_attn:Gathered4"),
        (flash_attn4.B36, "flash_attn.cute", "flash_attn:Segmented4"),
    ],
)
def test_a_library_builds_itself_before_a_graph_is_captured(
    fake: Fake, module: str, runner: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Planned for a graph it is called once, over zeros; another step of that shape needs none."""
    made, calls = fake.install(monkeypatch, tmp_path)[module], list[bool]()
    real = made.flash_attn_varlen_func
    fails = [True]

    @functools.wraps(real)
    def watched(query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(bool((key[..., :64] == 0).all()))
        if fails.pop():
            raise RuntimeError("hipcc: not found")
        fails.append(False)
        return real(query, key, *args, **options)

    monkeypatch.setattr(made, "flash_attn_varlen_func", watched)
    monkeypatch.setattr(ways, "_BUILT", set())
    kind = runner_of(f"dash_portable.backends.{runner}")
    case = make_case(graph=True)
    with pytest.raises(BackendError, match="hipcc: not found"):
        kind(case.step)
    fails.append(False)
    planned = kind(case.step)
    assert calls == [True, True]
    kind(case.step), kind(make_case().step)
    assert len(calls) == 2
    out = torch.full_like(case.query, float("nan"))
    planned.run(case.query, case.cache, case.ids, case.bias, out)
    assert case.error(out) <= case.allowed()


def test_in_place_refuses_strides_that_no_table_reaches() -> None:
    cache = torch.zeros(4, 3, 64, 128)
    uneven = torch.as_strided(cache, (3, 3, 64, 128), (3 * 64 * 128 + 128, 64 * 128, 128, 1))
    with pytest.raises(BackendError, match="block stride of 24704, needed a multiple of 4096"):
        places.cache_pages(uneven, size=32)
    assert places.cache_pages(uneven, size=64).per_block == 1


def test_flashinfer_refuses_amds_port() -> None:
    module = importlib.import_module("dash_portable.backends.flashinfer")
    assert "base" in module.check(MACHINES["mi300x-flashinfer"])


def test_self_test_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = vllm_flash_attn.SM90.install(monkeypatch, tmp_path)["vllm.vllm_flash_attn"]
    rows = {row.name: row for row in BACKENDS}
    ways_of = ("vllm_flash_attn3_gather", "vllm_flash_attn3_segments", "vllm_flash_attn3_in_place")
    for name in ways_of:
        assert self_test.run(rows[name], MACHINES["h200"], device="cpu") == ""
    real = module.flash_attn_varlen_func
    monkeypatch.setattr(
        module,
        "flash_attn_varlen_func",
        functools.wraps(real)(lambda *args, **options: _doubled(real(*args, **options))),
    )
    for name in ways_of:
        verdict = self_test.run(rows[name], MACHINES["h200"], device="cpu")
        assert "against the oracle" in verdict
    monkeypatch.setattr(module, "flash_attn_varlen_func", functools.wraps(real)(_raising))
    assert "KeyError" in self_test.run(rows[ways_of[0]], MACHINES["h200"], device="cpu")


def _doubled(got: Any) -> Any:
    (got[0] if isinstance(got, tuple) else got).mul_(2)
    return got


def _raising(*args: Any, **options: Any) -> Any:
    raise KeyError("gfx1099")


# --- given segments -----------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("fake", "entry"), [row for row in ROWS if "-Gathered" in str(row.id)])
def test_given_segments_equal_the_oracle(
    fake: Fake, entry: str, group: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`flash_dash_attention`'s buffers: gaps hold NaN, one row has no keys at all."""
    fake.install(monkeypatch, tmp_path)
    maker = torch.Generator().manual_seed(7)
    rows, kept, block, local, heads, width = 5, 3, 32, 64, 2, 64
    slots = kept * block + local
    used = torch.randint(0, 33, (rows, kept + 1), generator=maker, dtype=torch.int32)
    used[1], used[2, 0], used[3] = 0, 0, torch.tensor([32, 32, 32, 64])
    key = torch.randn(rows, slots, heads, width, generator=maker).bfloat16()
    value = torch.randn(rows, slots, heads, width, generator=maker).bfloat16()
    live = given_slots(used, kept, block=block, local=local)
    key[~live], value[~live] = float("nan"), float("nan")
    query = torch.randn(rows, heads * group, width, generator=maker).bfloat16()
    bias = torch.randn(rows, kept, generator=maker)
    exact = torch.zeros(query.shape, dtype=torch.float64)
    prior = torch.cat((bias.repeat_interleave(block, 1), torch.zeros(rows, local)), 1).double()
    for row in range(rows):
        keys = key[row, live[row]].double().repeat_interleave(group, 1)
        values = value[row, live[row]].double().repeat_interleave(group, 1)
        if len(keys):
            logit = torch.einsum("hd,thd->ht", query[row].double(), keys) / width**0.5
            weight = (logit + prior[row, live[row]]).softmax(-1)
            exact[row] = torch.einsum("ht,thd->hd", weight, values)
    out = attend_given(
        runner_of(entry).library,
        query,
        key.flatten(0, 1),
        value.flatten(0, 1),
        used.flatten(),
        bias,
        block=block,
        local=local,
    )
    gap = (out.double() - exact).abs().max()
    step = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert gap <= 2 * ((exact.bfloat16().double() - exact).abs().max() + step)
