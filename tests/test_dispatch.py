"""The choice: a table of machines, forced names, reasons, facts found late, plug-ins."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dash_portable import dispatch, env, explanation, serve
from dash_portable.backends import BACKENDS, SHARED, probe, records
from dash_portable.backends.spec import (
    Backend,
    Capability,
    Code,
    Facts,
    Forced,
    Measured,
    Policy,
    Rejection,
    release,
)
from dash_portable.choice import Choice
from dash_portable.choose import choose
from dash_portable.dispatch import policy_of
from dash_portable.errors import ArgumentError, BackendError, DashError, UnsupportedError
from dash_portable.platform.facts import ARCHS, DISTRIBUTIONS, Platform, Vendor, pretended
from dash_portable.request import FEATURES, PHASES, Request
from tests.machines import MACHINES, asked


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing remembered from another test, and a cache folder of this one's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    dispatch.forget()
    yield
    dispatch.forget()


def forced(name: str) -> Policy:
    return Policy(forced=Forced(name=name, source=f"backend={name!r}", undo="pass backend='AUTO'"))


def name_of(choice: Choice) -> str | None:
    return choice.backend.name if choice.backend else None


def answer(choice: Choice, name: str) -> tuple[Rejection, ...]:
    return next(one.rejections for one in choice.decisions if one.backend.name == name)


def codes(choice: Choice, name: str) -> list[Code]:
    return [rejection.code for rejection in answer(choice, name)]


# --- the table ------------------------------------------------------------------------------

EXPECTED = {
    "h200": "triton",
    "a100": "flash_attn2_gather",
    "b200": "flash_attn2_gather",
    "rtx5090": "flashinfer_gather",
    "t4": "triton",
    "nvidia-bare": "triton",
    "nvidia-future": "flash_attn2_gather",
    "mi300x": "aiter_gather",
    "mi355x": "aiter_gather",
    "mi250": "flash_attn2_rocm_gather",
    "mi300x-flashinfer": "flashinfer_rocm_gather",
    "rx7900": "flash_attn2_rocm_gather",
    "strix-halo": "aiter_rdna_gather",
    "rx6900": "triton",
    "amd-future": "triton",
    "b580": "xpu_gather",
    "pvc": "xpu_gather",
    "a770": "triton",
    "b580-bare": "triton",
    "intel-future": "triton",
    "cpu": "sdpa",
    "cpu-no-triton": "sdpa",
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("machine", MACHINES)
def test_who_attends(machine: str, phase: str) -> None:
    choice = choose(asked(phase), MACHINES[machine])
    assert name_of(choice) == EXPECTED[machine]
    layer = "eager" if MACHINES[machine].vendor is Vendor.CPU else "triton"
    assert choice.layer is not None
    assert choice.layer.name == layer


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("h200", {"in_place": True}, "triton"),
    ("h200", {"lse": True}, "vllm_flash_attn3_segments"),
    ("h200", {"head_dim": 256}, "triton"),
    ("h200", {"dtype": "float32", "cache_dtype": "float32"}, "triton"),
    ("h200", {"cache_dtype": "float32"}, "triton"),
    ("h200", {"deterministic": True}, "triton"),
    ("a100", {"deterministic": True}, "flashinfer_gather"),
    ("b200", {"head_dim": 96}, "flash_attn4_gather"),
    ("t4", {"dtype": "float16", "cache_dtype": "float16"}, "flashinfer_gather"),
    ("pvc", {"graph": True}, "xpu_gather"),
    ("cpu", {"dtype": "float64"}, "eager"),
    ("cpu", {"lse": True}, "eager"),
    ("cpu", {"head_dim": 40, "block_size": 24, "group_size": 3}, "sdpa"),
]


@pytest.mark.parametrize(("machine", "changes", "name"), CHANGES, ids=lambda value: str(value))
def test_what_is_asked_filters_before_order_does(
    machine: str, changes: dict[str, Any], name: str
) -> None:
    request = asked(**changes)
    choice = choose(request, MACHINES[machine])
    assert name_of(choice) == name
    assert set(request.features) <= choice.required().capability.features


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda row: row.name)
def test_every_backend_is_chosen_somewhere(backend: Backend) -> None:
    """By name, on a machine of the table with its library installed."""
    packages = tuple((name, "99") for name in DISTRIBUTIONS if name != "flash-attn")
    packages += (("flash-attn", "2.8.3"),)
    rich = [replace(machine, packages=packages) for machine in MACHINES.values()]
    requests = [asked(), asked(dtype="float16", cache_dtype="float16", head_dim=64)]
    chosen = [name_of(choose(one, each, forced(backend.name))) for each in rich for one in requests]
    assert backend.name in chosen


@pytest.mark.parametrize("arch", [arch.token for arch in ARCHS] + ["sm130", "gfx1300"])
def test_every_arch_has_a_verdict_from_every_backend(arch: str) -> None:
    machine = pretended(arch, (("torch", "2.14.0"), ("triton", "3.8.0")))
    choice = choose(asked(), machine)
    assert {one.backend.name for one in choice.decisions} == {row.name for row in BACKENDS}
    assert choice.required()
    names = {one.backend.name for one in choice.decisions if one.ok}
    assert {"triton", "sdpa", "eager"} <= names


@pytest.mark.parametrize("arch", ["sm103", "sm120", "sm121", "sm130", "sm86"])
def test_hopper_only_code_is_refused_as_such(arch: str) -> None:
    machine = replace(MACHINES["h200"], arch=arch)
    choice = choose(asked(), machine)
    (reason,) = answer(choice, "flash_attn3_gather")
    assert (reason.code, reason.asked, reason.offers) == (Code.ARCH, arch, "sm90")
    assert not answer(choice, "flash_attn2_gather")


@pytest.mark.parametrize("backend", [*BACKENDS, *SHARED], ids=lambda row: row.entry)
def test_every_row_names_an_adapter_that_exists(backend: Backend) -> None:
    """Adapters import their library when they plan, so the modules load without it."""
    if "triton" in backend.name:
        pytest.importorskip("triton")
    assert callable(backend.load())
    if backend.check:
        assert callable(probe.attribute(backend.check))


def test_each_layer_ends_the_comparison() -> None:
    bare = replace(MACHINES["h200"], packages=(("torch", "2.8"), ("flash-attn", "3.1")))
    odd = asked(dtype="float32", cache_dtype="bfloat16", head_dim=40, graph=True)
    choice = choose(odd, bare, Policy(disabled=(("eager", "disable='eager'"),)))
    assert codes(choice, "eager") == [Code.DISABLED]
    assert codes(choice, "aiter_gather") == [Code.VENDOR]
    assert codes(choice, "flash_attn2_gather") == [Code.VERSION]
    assert codes(choice, "triton") == [Code.MISSING]
    rich = replace(bare, packages=(("flash-attn", "2.8.3"),))
    found = codes(choose(replace(odd, head_dim=41), rich), "flash_attn2_gather")
    assert found == [Code.DTYPE, Code.HEAD_DIM, Code.COMBINATION]


def test_every_rejection_holds_both_sides() -> None:
    seen = set[Code]()
    for machine in MACHINES.values():
        for request in (asked(), asked(dtype="float32", head_dim=41, lse=True, in_place=True)):
            for one in choose(request, machine).decisions:
                for reason in one.rejections:
                    seen.add(reason.code)
                    assert reason.asked
                    assert reason.offers
                    assert f"asked {reason.asked}, offers {reason.offers}" in str(reason)
    assert {Code.VENDOR, Code.ARCH, Code.MISSING, Code.DTYPE, Code.FEATURE} <= seen


def test_versions_are_compared_without_local_and_pre_release_parts() -> None:
    assert release("2.14.1+cu130") == (2, 14, 1)
    assert release("4.0.0b36") == (4, 0, 0)
    assert release("unknown") == ()
    for version, ok in (("2.10.9+cu130", False), ("2.11.0+cu130", True), ("", True)):
        machine = replace(MACHINES["nvidia-bare"], packages=(("torch", version),))
        found = codes(choose(asked(), machine), "torch_varlen_gather")
        assert found == ([] if ok else [Code.VERSION])


def test_a_reason_lists_every_distribution_that_provides_triton() -> None:
    packages = (("torch", "2.14.0"), ("triton", "3.8.0"), ("pytorch-triton-xpu", "3.7.0"))
    machine = replace(MACHINES["b580"], packages=packages)
    facts = Facts(imports={"dash_portable.backends.triton:Runner": "ImportError: no driver"})
    (reason,) = answer(choose(asked(), machine, facts=facts), "triton")
    assert reason.asked == "triton 3.8.0 pytorch-triton-xpu 3.7.0 to work"
    assert reason.offers == "ImportError: no driver"


def test_the_table_is_sound() -> None:
    names = [row.name for row in BACKENDS]
    assert len(set(names)) == len(names)
    families = {family for row in BACKENDS for family in row.families}
    assert not families & set(names)
    assert {name for row in BACKENDS for name in row.capability.packages} <= set(DISTRIBUTIONS)
    known = {arch.token for arch in ARCHS}
    for row in BACKENDS:
        assert (row.capability.archs or set()) | row.capability.except_archs <= known
        assert row.entry.startswith("dash_portable.backends.")
    assert [row.name for row in BACKENDS if row.fallback] == names[-2:] == ["sdpa", "eager"]
    with pytest.raises(ValueError, match="found \\['telepathy'\\]"):
        Capability(features=frozenset({"telepathy"}))


# --- order ----------------------------------------------------------------------------------


def figure(arch: str, microseconds: float, phase: str = "decode") -> Measured:
    return Measured(
        arch=arch, phase=phase, figure=microseconds, versions="triton 3.8.0", date="2026-11-30"
    )


def test_the_fastest_measured_comes_first_and_says_so() -> None:
    rows = tuple(
        replace(row, measured=(figure("sm90", {"triton": 45.0, "sdpa": 1.0}[row.name]),))
        if row.name in ("triton", "sdpa")
        else row
        for row in BACKENDS
    )
    choice = choose(asked(), MACHINES["h200"], backends=rows)
    assert name_of(choice) == "triton"
    assert "ok (chosen), measured 45 us on sm90 (triton 3.8.0, 2026-11-30)" in str(choice)
    assert name_of(choose(asked("prefill"), MACHINES["h200"], backends=rows)) != "triton"
    assert name_of(choose(asked(), MACHINES["a100"], backends=rows)) == "flash_attn2_gather"


def test_what_ran_without_a_figure_is_told_and_tested() -> None:
    choice = choose(asked(), MACHINES["h200"])
    remarks = {one.backend.name: one.remarks for one in choice.decisions if one.ok}
    told, test = remarks["flashinfer_in_place"]
    assert told.startswith("found right on sm90, not timed (torch 2.11.0, flashinfer-python 0.6.4,")
    assert test == "must pass the self-test first"
    assert remarks["flash_attn2_gather"][0] == "not run by us on sm90"
    on_ampere = choose(asked(), MACHINES["a100"])
    (other,) = [one for one in on_ampere.decisions if one.backend.name == "flashinfer_in_place"]
    assert other.remarks[0] == "not run by us on sm80"


def test_this_machines_own_figures_win_over_ours() -> None:
    ours = tuple(
        replace(row, measured=(figure("sm90", 10.0),)) if row.name == "triton" else row
        for row in BACKENDS
    )
    facts = Facts(recorded={"flash_attn2_gather": (figure("sm90", 99.0),)})
    choice = choose(asked(), MACHINES["h200"], backends=ours, facts=facts)
    assert [one.backend.name for one in choice.decisions][:2] == ["flash_attn2_gather", "triton"]


def test_records_survive_the_process_and_a_broken_file(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records.record_measured("triton", figure("sm90", 45.0))
    records.record_measured("triton", figure("sm90", 44.0))
    records.record_verdict(("triton", "3.8.0"), "wrong by 1e-1")
    read = records._parsed(records.path().read_text())
    assert read == records.read()
    assert read.measured == {"triton": (figure("sm90", 44.0),)}
    assert read.verdicts == {"triton 3.8.0": "wrong by 1e-1"}
    records._kept.clear()
    records.path().write_text("{")
    assert records.read() == records.Records()
    assert "records.json: not read" in caplog.text


def test_records_that_cannot_be_written_are_kept_in_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    records.record_measured("eager", figure("x86_64", 9.0))
    assert records.read().measured == {"eager": (figure("x86_64", 9.0),)}
    assert "not written" in caplog.text


# --- forced and forbidden -------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda row: row.name)
@pytest.mark.parametrize("machine", ["h200", "mi300x", "b580", "cpu"])
def test_forced_never_falls_back(machine: str, backend: Backend) -> None:
    choice = choose(asked(), MACHINES[machine], forced(backend.name))
    if answer(choice, backend.name):
        with pytest.raises(UnsupportedError) as raised:
            choice.required()
        assert raised.value.choice is choice
    else:
        assert choice.required() is backend


@pytest.mark.parametrize("machine", ["h200", "cpu"])
@pytest.mark.parametrize(("name", "wrong"), [("flash_attn", True), ("sdpa", False)])
def test_a_dtype_that_a_forced_library_never_takes_is_a_value_error(
    machine: str, name: str, wrong: bool
) -> None:
    """Callers of the established calls catch it as one; where another thing is missing they do
    not."""
    request = asked(dtype="float32", cache_dtype="float32", graph=True)
    with pytest.raises(UnsupportedError) as raised:
        choose(request, MACHINES[machine], forced(name)).required()
    assert isinstance(raised.value, ValueError) is wrong
    assert raised.value.choice is not None


def test_a_family_takes_its_best_and_nothing_else() -> None:
    family = choose(asked(), MACHINES["h200"], forced("flash_attn"))
    assert name_of(family) == "vllm_flash_attn3_gather"  # the fastest that was measured there
    assert name_of(choose(asked(), MACHINES["h200"], forced("flash_attn2"))) == (
        "vllm_flash_attn2_gather"  # measured, upstream's not
    )
    assert name_of(choose(asked(), MACHINES["mi250"], forced("flash_attn"))) == (
        "flash_attn2_rocm_gather"
    )
    in_place = asked(in_place=True)
    assert name_of(choose(in_place, MACHINES["h200"], forced("FLASH_ATTN"))) == (
        "vllm_flash_attn3_in_place"
    )
    assert name_of(choose(in_place, MACHINES["mi250"], forced("flash_attn"))) is None


def test_the_refusal_shows_request_reasons_chooser_and_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DASH_PORTABLE_BACKEND", "FlashInfer")
    policy = policy_of("decode", env.read(), BACKENDS)
    request = asked(head_dim=40, lse=True)
    with pytest.raises(UnsupportedError) as raised:
        choose(request, MACHINES["rtx5090"], policy).required()
    lines = str(raised.value).splitlines()
    source = "forced by DASH_PORTABLE_BACKEND=FlashInfer"
    assert lines[0].startswith(f"backend 'flashinfer' cannot serve this request ({source}): ")
    for row in ("flashinfer_gather", "flashinfer_in_place"):  # the reasons come first
        for reason in answer(raised.value.choice, row):
            assert str(reason) in lines[0]
            assert f"      {reason}" in lines[3:]
    assert "offers amd" not in lines[0]  # of the family's rows for other machines
    assert lines[1] == f"request   {request}"
    assert lines[2] == "platform  nvidia sm120 NVIDIA GeForce RTX 5090, CUDA 13.0"
    assert f"  flashinfer_gather: rejected ({source})" in lines
    assert f"  flashinfer_in_place: rejected ({source})" in lines
    assert lines[-1].startswith("unset DASH_PORTABLE_BACKEND to let ")
    assert "flashinfer" not in lines[-1]


def test_the_table_is_short_and_tells_each_reason_once() -> None:
    for name, machine in MACHINES.items():
        choice = choose(asked(), machine)
        lines = str(choice).splitlines()
        assert len(lines) <= 35, name
        before_stages = lines[: next(i for i, x in enumerate(lines) if x.startswith("stage"))]
        reasons = [line for line in before_stages if line.startswith("      ")]
        assert len(set(reasons)) == len(reasons), name
        told = " ".join(before_stages)
        assert all(re.search(rf"\b{row.name}\b", told) for row in BACKENDS)


def test_every_way_to_ask_has_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked(dtype="float32", cache_dtype="float32")

    def refusal(policy: Policy) -> str:
        with pytest.raises(UnsupportedError) as raised:
            choose(request, MACHINES["a100"], policy).required()
        return str(raised.value)

    monkeypatch.setenv("DASH_PORTABLE_BACKEND", "decode=flash_attn2")
    by_environment = policy_of("decode", env.read(), BACKENDS)
    by_argument = policy_of("decode", env.Settings(), BACKENDS, backend="Flash_Attn2")
    assert by_environment.forced is not None
    assert by_argument.forced is not None
    texts = [
        refusal(policy).replace(policy.forced.source, "X").replace(policy.forced.undo, "Y")
        for policy in (by_environment, by_argument)
        if policy.forced
    ]
    assert texts[0] == texts[1]
    assert refusal(by_argument) == refusal(by_argument)


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_PORTABLE_BACKEND", "eager")
    monkeypatch.setenv("DASH_PORTABLE_DISABLE", "triton")
    monkeypatch.setenv("DASH_PORTABLE_FA_VERSION", "2")
    settings = env.read()
    policy = policy_of(
        "decode", settings, BACKENDS, backend="triton", disable=["sdpa"], fa_version=3
    )
    assert policy.forced is not None
    assert (policy.forced.name, policy.forced.source) == ("triton", "backend='triton'")
    assert policy.disabled == (("sdpa", "disable='sdpa'"),)
    assert policy.generation == (3, "fa_version=3")
    auto = policy_of("decode", settings, BACKENDS, backend="auto")
    assert auto.forced is not None
    assert auto.forced.source == "DASH_PORTABLE_BACKEND=eager"


@pytest.mark.parametrize("variable", ["DASH_PORTABLE_BACKEND", "DASH_PORTABLE_DISABLE"])
def test_an_unknown_backend_in_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "flashinfr")
    with pytest.raises(ArgumentError, match=rf"{variable}: found 'flashinfr'.*nearest: flashinfer"):
        dispatch.choice_for(asked(), "cpu")
    with pytest.raises(ArgumentError, match=variable):
        explanation.explain(platform="sm90")


def test_an_unknown_backend_as_an_argument() -> None:
    with pytest.raises(ArgumentError, match=r"backend: found 'tritn'.*nearest: triton"):
        dispatch.choice_for(asked(), "cpu", backend="tritn")
    with pytest.raises(ArgumentError, match="disable: found 'egger'"):
        dispatch.choice_for(asked(), "cpu", disable=["egger"])
    with pytest.raises(ArgumentError, match="fa_version: found 5, needed 2, 3 or 4"):
        dispatch.choice_for(asked(), "cpu", fa_version=5)


def test_disabled_is_said_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_PORTABLE_DISABLE", "FLASH_ATTN,triton")
    policy = policy_of("decode", env.read(), BACKENDS)
    choice = choose(asked(), MACHINES["a100"], policy)
    assert name_of(choice) == "flashinfer_gather"
    (reason,) = answer(choice, "vllm_flash_attn2_in_place")
    assert reason.code is Code.DISABLED
    assert reason.hint == "DASH_PORTABLE_DISABLE=FLASH_ATTN,triton"
    assert choice.layer is not None
    assert choice.layer.name == "eager"


def test_the_shared_layers_last_resort_stays() -> None:
    choice = choose(asked(), MACHINES["cpu"], Policy(disabled=(("eager", "disable='eager'"),)))
    assert name_of(choice) == "sdpa"
    assert choice.layer is SHARED[-1]


def test_the_flash_attn_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_PORTABLE_FA_VERSION", "2")
    policy = policy_of("decode", env.read(), BACKENDS)
    choice = choose(asked(), MACHINES["a100"], policy)
    assert name_of(choice) == "flash_attn2_gather"
    (reason,) = answer(choice, "flash_attn3_gather")
    assert (reason.asked, reason.offers) == ("flash_attn 2", "flash_attn 3")
    assert reason.hint == "DASH_PORTABLE_FA_VERSION=2"
    assert not answer(choice, "triton")


# --- stages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
def test_every_stage_has_a_verdict(machine: str) -> None:
    choice = choose(asked(), MACHINES[machine])
    stages = {stage.name: stage for stage in choice.stages}
    assert {"store", "select"} <= set(stages)
    assert set(choice.required().stages) <= set(stages)
    for stage in stages.values():
        assert stage.backend is not None
        assert f"stage     {stage.name}: {stage.backend.name}" in str(choice)


@pytest.mark.parametrize("phase", PHASES)
def test_an_override_reaches_every_stage_or_says_why_not(phase: str) -> None:
    eager = choose(asked(phase), MACHINES["h200"], forced("eager"))
    assert {stage.backend.name for stage in eager.stages if stage.backend} == {"eager"}
    flash = str(choose(asked(phase), MACHINES["h200"], forced("flash_attn")))
    assert "stage     store: triton (flash_attn attends, it has no store of its own)" in flash


def test_a_broken_triton_leaves_the_stages_to_eager_with_the_reason() -> None:
    broken = {row.entry: "ImportError: no driver" for row in (*BACKENDS, *SHARED)}
    facts = Facts(imports={entry: text for entry, text in broken.items() if "triton" in entry})
    choice = choose(asked(), MACHINES["b580-bare"], facts=facts)
    assert (name_of(choice), choice.layer and choice.layer.name) == ("sdpa", "eager")
    assert "triton import: asked pytorch-triton-xpu 3.8.0 to work, offers ImportError" in str(
        choice
    )


# --- facts found late -----------------------------------------------------------------------


class FakeLibrary:
    """Backends whose modules are made here; what is imported is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.loaded = monkeypatch, list[str]()

    def row(self, name: str, *, error: Exception | None = None, **changes: Any) -> Backend:
        """A backend whose import raises `error`, or whose runner records the steps it planned."""
        library = self

        class Module(ModuleType):
            def __getattr__(self, attribute: str) -> Any:
                if attribute != "Runner":
                    raise AttributeError(attribute)
                library.loaded.append(name)
                if error is not None:
                    raise error
                return changes.get("runner", FakeRunner)

        self.monkeypatch.setitem(sys.modules, f"fake_{name}", Module(f"fake_{name}"))
        values = {key: value for key, value in changes.items() if key != "runner"}
        return Backend(
            name=name, entry=f"fake_{name}:Runner", **{"capability": Capability(), **values}
        )


class FakeRunner:
    def __init__(self, step: Any) -> None:
        self.step = step


class RefusingRunner:
    def __init__(self, step: Any) -> None:
        raise BackendError("no compiler found")


class FullRunner:
    def __init__(self, step: Any) -> None:
        raise MemoryError("out of memory: 3 GiB")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    probe._imports.clear()
    return FakeLibrary(monkeypatch)


def settled(rows: tuple[Backend, ...], policy: Policy | None = None) -> Choice:
    return dispatch.settle(asked(), MACHINES["cpu"], policy or Policy(), rows)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("gfx1103"),
        RuntimeError("unknown arch"),
        OSError("libfoo.so.9: cannot open"),
        ImportError("undefined symbol"),
        AttributeError("no attribute 'runtime'"),
        AssertionError("no GPU"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_library_may_fail_with_anything_and_the_next_serves(
    library: FakeLibrary, error: Exception
) -> None:
    rows = (library.row("first", error=error), library.row("second"), library.row("third"))
    choice = settled(rows)
    assert name_of(choice) == "second"
    (reason,) = answer(choice, "first")
    assert reason.code is Code.IMPORT
    assert reason.offers == probe.failed(error).text
    assert library.loaded == ["first", "second"]
    assert "Traceback" in probe.import_outcome(rows[0], MACHINES["cpu"]).trace
    assert settled(rows) == choice
    assert library.loaded == ["first", "second"]


def test_what_is_not_asked_for_is_not_imported(library: FakeLibrary) -> None:
    rows = (library.row("first", error=KeyError("gfx1103")), library.row("second"))
    assert name_of(settled(rows, forced("second"))) == "second"
    assert library.loaded == ["second"]
    assert name_of(settled(rows, forced("first"))) is None


def test_a_missing_symbol_is_named_with_the_file_that_was_imported(
    library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub, or a file of the library's name in the working folder."""
    (tmp_path / "shadowed.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    row = library.row("first", symbols=("shadowed:jit",))
    (reason,) = answer(settled((row, library.row("second"))), "first")
    assert reason.offers == (
        f"BackendError: shadowed has no jit (imported from {tmp_path / 'shadowed.py'})"
    )
    assert "shadowed" not in sys.modules


def test_a_library_that_stops_half_way_leaves_nothing_behind(
    library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halfway").mkdir()
    (tmp_path / "halfway/__init__.py").write_text("")
    (tmp_path / "halfway/leaf.py").write_text("raise OSError('libhalf.so: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    row = library.row("first", symbols=("halfway.leaf:attend",))
    (reason,) = answer(settled((row, library.row("second"))), "first")
    assert reason.offers == "OSError: libhalf.so: not found"
    assert not [name for name in sys.modules if name.startswith("halfway")]


def test_our_own_check_rejects_by_text_and_its_bugs_propagate(library: FakeLibrary) -> None:
    module = ModuleType("fake_check")
    module.refuses = lambda platform: f"not on {platform.arch}"  # type: ignore[attr-defined]
    module.buggy = lambda platform: 1 / 0  # type: ignore[attr-defined]
    library.monkeypatch.setitem(sys.modules, "fake_check", module)
    rows = (library.row("first", check="fake_check:refuses"), library.row("second"))
    (reason,) = answer(settled(rows), "first")
    assert reason.offers == "not on x86_64"
    with pytest.raises(ZeroDivisionError):
        settled((library.row("third", check="fake_check:buggy"),))


def test_answers_are_kept_per_version_and_device(library: FakeLibrary) -> None:
    row = library.row("first", capability=Capability(packages=("torch",)))
    cpu = MACHINES["cpu"]
    for machine in (
        cpu,
        cpu,
        replace(cpu, arch="aarch64"),
        replace(cpu, packages=(("torch", "3"),)),
    ):
        probe.import_outcome(row, machine)
    assert library.loaded == ["first"] * 3


def self_test(library: FakeLibrary, answers: dict[str, str]) -> list[str]:
    """Put a self-test in place that gives these answers; gives the list of what it tested."""
    tested = list[str]()
    module = ModuleType("dash_portable.self_test")

    def run(backend: Backend, platform: Platform) -> str:
        tested.append(backend.name)
        return answers.get(backend.name, "")

    module.run = run  # type: ignore[attr-defined]
    library.monkeypatch.setitem(sys.modules, "dash_portable.self_test", module)
    return tested


def test_a_library_nobody_ran_here_must_pass_the_self_test(library: FakeLibrary) -> None:
    tested = self_test(library, {"first": "wrong by 3e-1"})
    rows = tuple(library.row(name, self_test=True) for name in ("first", "second", "third"))
    choice = settled(rows)
    assert name_of(choice) == "second"
    (reason,) = answer(choice, "first")
    assert (reason.code, reason.offers) == (Code.SELF_TEST, "wrong by 3e-1")
    assert tested == ["first", "second"]
    records._kept.clear()
    assert name_of(settled(rows)) == "second"
    assert tested == ["first", "second"]


def test_measured_libraries_are_not_tested_again(library: FakeLibrary) -> None:
    tested = self_test(library, {})
    measured = library.row("first", self_test=True, measured=(figure("x86_64", 1.0),))
    assert name_of(settled((measured,))) == "first"
    assert name_of(settled((measured,), forced("first"))) == "first"
    assert tested == []


MUST = "must pass the self-test first"


def remarks(choice: Choice, name: str) -> str:
    (found,) = (one.remarks for one in choice.decisions if one.backend.name == name)
    return ", ".join(found)


def test_a_forced_library_is_tested_once_and_never_replaced(library: FakeLibrary) -> None:
    tested = self_test(library, {"second": "wrong by 3e-1"})
    rows = tuple(library.row(name, self_test=True) for name in ("first", "second"))
    assert MUST in remarks(
        choose(asked(), MACHINES["cpu"], forced("first"), backends=rows), "first"
    )
    assert MUST in remarks(settled(rows, forced("first")), "second")
    for _ in range(2):
        choice = settled(rows, forced("first"))
        assert name_of(choice) == "first"
        assert MUST not in remarks(choice, "first")
        refused = settled(rows, forced("second"))
        assert name_of(refused) is None
        head = refused.refusal().splitlines()[0]
        assert "offers wrong by 3e-1" in head
        assert "DASH_PORTABLE_SELF_TEST=0 runs it all the same" in head
        assert tested == ["first", "second"]
        records._kept.clear()


def test_a_forced_library_runs_untested_where_somebody_says_so(library: FakeLibrary) -> None:
    """Whatever a verdict says; what is chosen by itself has to pass as ever."""
    tested = self_test(library, {"first": "wrong by 3e-1"})
    rows = (library.row("first", self_test=True), library.row("second"))
    library.monkeypatch.setenv("DASH_PORTABLE_SELF_TEST", "0")
    ours = dispatch.policy_of("decode", dispatch.env.read(), rows, backend="first")
    choice = settled(rows, ours)
    assert (name_of(choice), tested) == ("first", [])
    assert "not self-tested (DASH_PORTABLE_SELF_TEST=0)" in remarks(choice, "first")
    assert name_of(settled(rows)) == "second"
    choice = settled(rows, ours)
    assert (name_of(choice), tested) == ("first", ["first"])
    assert "failed its self-test (DASH_PORTABLE_SELF_TEST=0): wrong" in remarks(choice, "first")


def test_a_layer_is_taken_along_untested_with_its_forced_backend(library: FakeLibrary) -> None:
    tested = self_test(library, {"first": "wrong by 3e-1"})
    rows = (library.row("first", self_test=True),)
    shared = (library.row("first", self_test=True), library.row("plain", fallback=True))
    library.monkeypatch.setattr(dispatch, "SHARED", shared)
    library.monkeypatch.setattr(
        dispatch,
        "choose",
        lambda *values, **named: choose(*values, **{**named, "shared": shared}),
    )
    policy = forced("first")
    assert policy.forced is not None
    untested = replace(policy, forced=replace(policy.forced, untested="because"))
    choice = settled(rows, untested)
    assert (name_of(choice), choice.layer, tested) == ("first", shared[0], [])
    assert settled(rows, policy).layer is None
    assert settled(rows, untested).layer is shared[0]


def test_another_version_than_the_measured_one_is_tested(library: FakeLibrary) -> None:
    tested = self_test(library, {})
    row = library.row(
        "first",
        self_test=True,
        capability=Capability(packages=("torch", "triton")),
        measured=(replace(figure("x86_64", 1.0), versions="torch 2.13.0, triton 3.7.1"),),
    )
    assert name_of(settled((row,))) == "first"
    assert tested == []
    newer = replace(MACHINES["cpu"], packages=(("torch", "2.13.0"), ("triton", "3.7.10")))
    assert name_of(dispatch.settle(asked(), newer, Policy(), (row,))) == "first"
    assert tested == ["first"]


def test_a_failed_self_test_rejects_a_forced_library_too(library: FakeLibrary) -> None:
    self_test(library, {"first": "wrong by 3e-1"})
    rows = (library.row("first", self_test=True), library.row("second"))
    settled(rows)
    choice = settled(rows, forced("first"))
    assert name_of(choice) is None
    assert "self_test: asked fake_first:Runner to pass, offers wrong by 3e-1" in choice.refusal()


def test_our_own_kernels_are_tested_where_nobody_ran_them() -> None:
    """On a new arch and with another Triton, the layer that stores and selects as well."""
    rows = [row for row in (*BACKENDS, *SHARED) if row.name == "triton"]
    assert len(rows) == 2
    run = {"torch": "2.11.0+cu130", "triton": "3.6.0"}
    for row in rows:
        assert row.self_test
        assert probe.verified(row, replace(MACHINES["h200"], packages=tuple(run.items())))
        newer = tuple({**run, "triton": "3.8.0"}.items())
        assert not probe.verified(row, replace(MACHINES["h200"], packages=newer))
        assert not probe.verified(row, MACHINES["mi300x"])


def test_a_layer_that_stores_wrong_gives_way_with_a_warning(library: FakeLibrary) -> None:
    tested = self_test(library, {"first": "stored: found an error of 3"})
    shared = (library.row("first", self_test=True), library.row("plain", fallback=True))
    library.monkeypatch.setattr(dispatch, "SHARED", shared)

    def choose_among(*values: Any, **named: Any) -> Choice:
        return choose(*values, **{**named, "shared": shared})

    library.monkeypatch.setattr(dispatch, "choose", choose_among)
    rows = (library.row("attends"),)
    library.monkeypatch.setattr(dispatch, "table", lambda: rows)
    library.monkeypatch.setattr(dispatch, "platform_for", lambda device, rows: MACHINES["rx6900"])
    library.monkeypatch.setattr(dispatch, "_warned", set())
    with pytest.warns(RuntimeWarning, match="plain stores and selects on a GPU, slowly"):
        choice = dispatch.choice_for(asked(), "cuda:0")
    assert tested == ["first"]
    assert choice.layer is shared[1]
    assert "first self_test: asked fake_first:Runner to pass" in str(choice)


def test_nothing_is_tested_while_a_graph_is_captured(library: FakeLibrary) -> None:
    torch = pytest.importorskip("torch")
    library.monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    library.monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    row = library.row("first", self_test=True)
    with pytest.raises(BackendError, match="'first': found a graph being captured, needed a step"):
        dispatch.run_self_test(row, MACHINES["mi300x"])
    with pytest.raises(BackendError, match="'first': found a graph being captured, needed a step"):
        settled((row,), forced("first"))
    assert records.read().verdicts == {}


def test_without_a_self_test_an_unknown_library_is_not_chosen(library: FakeLibrary) -> None:
    library.monkeypatch.setitem(sys.modules, "dash_portable.self_test", None)
    rows = (library.row("first", self_test=True), library.row("second"))
    choice = settled(rows)
    assert name_of(choice) == "second"
    assert codes(choice, "first") == [Code.SELF_TEST]


# --- calls ----------------------------------------------------------------------------------


@pytest.fixture
def served(library: FakeLibrary) -> FakeLibrary:
    """The table of this process replaced by fakes, on this machine's CPU."""
    rows = (
        library.row("first", runner=RefusingRunner),
        library.row("second"),
        library.row("full", runner=FullRunner),
    )
    library.monkeypatch.setattr(dispatch, "table", lambda: rows)
    return library


STEP: Any = SimpleNamespace(device="cpu")


def test_a_library_that_refuses_to_plan_is_remembered(served: FakeLibrary) -> None:
    for _ in range(2):
        choice, runner = dispatch.plan(STEP, asked())
        assert name_of(choice) == "second"
        assert isinstance(runner, FakeRunner)
        (reason,) = answer(choice, "first")
        assert (reason.code, reason.offers) == (Code.PLAN, "BackendError: no compiler found")


def test_a_forced_library_that_refuses_to_plan_raises(
    served: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASH_PORTABLE_BACKEND", "first")
    for _ in range(2):
        with pytest.raises(BackendError) as raised:
            dispatch.plan(STEP, asked())
        assert "backend 'first' (forced by DASH_PORTABLE_BACKEND=first)" in str(raised.value)
        assert "BackendError: no compiler found" in str(raised.value)


def test_any_failure_while_planning_names_backend_chooser_and_request(served: FakeLibrary) -> None:
    with pytest.raises(BackendError) as raised:
        dispatch.plan(STEP, asked(), backend="full")
    text = str(raised.value)
    assert "backend 'full' (forced by backend='full') failed while planning" in text
    assert "MemoryError: out of memory: 3 GiB" in text
    assert str(asked()) in text
    assert isinstance(raised.value.__cause__, MemoryError)


def test_a_change_of_the_environment_takes_effect_at_the_next_choice(
    served: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("second", "full", "second"):
        monkeypatch.setenv("DASH_PORTABLE_BACKEND", name)
        assert name_of(dispatch.choice_for(asked(), "cpu")) == name


def test_what_failed_is_tried_again_once_it_is_forgotten(library: FakeLibrary) -> None:
    """A repair that no version tells."""
    rows = (library.row("first", error=OSError("libfoo.so.9")), library.row("second"))
    library.monkeypatch.setattr(dispatch, "table", lambda: rows)
    assert name_of(dispatch.choice_for(asked(), "cpu")) == "second"
    library.row("first")
    assert name_of(dispatch.choice_for(asked(), "cpu")) == "second"
    dispatch.forget()
    assert name_of(dispatch.choice_for(asked(), "cpu")) == "first"


@pytest.mark.parametrize(
    ("device", "capturing", "asks"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_a_call_that_is_captured_asks_for_a_graph(
    device: str, capturing: bool, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`paged_dash_decode` cannot say that it is captured: who cannot be, sdpa, then refuses."""
    step: Any = SimpleNamespace(
        max_query_len=1,
        dtype="torch.bfloat16",
        head_dim=128,
        group=1,
        config=SimpleNamespace(block=32),
        block_size=32,
        graph=False,
        device=SimpleNamespace(type=device),
        deterministic=False,
    )
    monkeypatch.setattr(serve, "is_capturing", lambda: capturing)
    request = serve.request_of(step)
    assert request.graph is asks
    choice = choose(request, MACHINES["h200"], forced("sdpa"))
    assert (choice.backend is None) is asks


def test_a_choice_is_remembered_and_reported_once(
    served: FakeLibrary, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    served.monkeypatch.setenv("DASH_PORTABLE_LOG", "choice")
    with caplog.at_level(logging.INFO, "dash_portable"):
        first = dispatch.choice_for(asked(), "cpu", backend="second")
        assert dispatch.choice_for(asked(), "cpu", backend="second") is first
    assert len(caplog.records) == 1
    line = "second attends, eager stores and selects (forced by backend='second')"
    assert line in caplog.text
    assert capsys.readouterr().err.count(line) == 1


def test_determinism_is_asked_of_every_request(served: FakeLibrary) -> None:
    served.monkeypatch.setenv("DASH_PORTABLE_DETERMINISTIC", "1")
    with pytest.raises(UnsupportedError, match="feature: asked deterministic, offers none"):
        dispatch.choice_for(asked(), "cpu")


def test_nothing_runs_on_a_pretended_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_PORTABLE_PLATFORM", "gfx942")
    with pytest.raises(UnsupportedError, match="DASH_PORTABLE_PLATFORM=gfx942 is for reports"):
        dispatch.choice_for(asked(), "cpu")
    assert explanation.explain().choices[0].platform.arch == "gfx942"


def test_one_threads_choice_does_not_reach_another(served: FakeLibrary) -> None:
    found = dict[str, str | None]()

    def choose_one(backend: str) -> None:
        for _ in range(20):
            found[backend] = name_of(dispatch.choice_for(asked(), "cpu", backend=backend))

    threads = [threading.Thread(target=choose_one, args=(name,)) for name in ("second", "full")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"second": "second", "full": "full"}
    with pytest.raises(ArgumentError):
        dispatch.choice_for(asked(), "cpu", backend="nobody")
    assert name_of(dispatch.choice_for(asked(), "cpu")) == "first"


def test_the_last_resort_on_a_gpu_warns_once_with_the_reasons(library: FakeLibrary) -> None:
    self_test(library, {})
    rows = (library.row("slow", fallback=True),)
    library.monkeypatch.setattr(dispatch, "table", lambda: rows)
    library.monkeypatch.setattr(dispatch, "platform_for", lambda device, rows: MACHINES["rx6900"])
    library.monkeypatch.setattr(dispatch, "_warned", set())
    with pytest.warns(RuntimeWarning, match="slow attends on a GPU, slowly") as warned:
        dispatch.choice_for(asked(), "cuda:0")
    assert len(warned) == 1
    assert str(asked()) in str(warned[0].message)
    dispatch.choice_for(asked("prefill"), "cuda:0")  # warnings are errors: a second one would raise


def test_the_doctor_asks_everybody_and_keeps_tracebacks(library: FakeLibrary) -> None:
    rows = (library.row("good"), library.row("bad", error=KeyError("gfx1103")), library.row("last"))
    library.monkeypatch.setattr(explanation, "table", lambda: rows)
    told = json.loads(json.dumps(explanation.report("cpu")))
    assert library.loaded == ["good", "bad", "last"]
    assert [one["chosen"] for one in told["choices"]] == ["good", "good"]
    assert "KeyError: 'gfx1103'" in told["tracebacks"]["bad"]
    assert set(told["tracebacks"]) == {"bad"}
    assert {"python", "platform", "probes", "seen", "visible_devices", "settings"} <= set(told)


# --- plug-ins -------------------------------------------------------------------------------


def install(folder: Path, name: str, points: str, source: str = "") -> None:
    """A distribution with entry points, and its module."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dash_portable.backends]\n{points}\n")
    (folder / f"{name}.py").write_text(source)


GOOD = """
from dash_portable.backends.spec import Backend, Capability
class Runner:
    def __init__(self, step): pass
NEEDS = Capability(packages=("good_plugin",))
ROW = Backend(name="mine", entry="good_plugin:Runner", capability=NEEDS)
TWICE = Backend(name="triton", entry="good_plugin:Runner", capability=Capability())
"""


def test_plug_ins_good_and_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path,
        "good_plugin",
        "mine = good_plugin:ROW\ntaken = good_plugin:TWICE\nnothing = good_plugin:Runner",
        GOOD,
    )
    install(tmp_path, "bad_plugin", "bad = bad_plugin:ROW", "raise RuntimeError('half a plug-in')")
    monkeypatch.syspath_prepend(tmp_path)
    dispatch.forget()
    rows = {row.name: row for row in dispatch.table()}
    assert list(rows)[-len(BACKENDS) :] == [row.name for row in BACKENDS]
    choice = dispatch.choice_for(asked(), "cpu")
    assert name_of(choice) == "mine"
    assert name_of(dispatch.choice_for(asked(), "cpu", backend="MINE")) == "mine"
    assert choice.platform.version("good_plugin") == "1.0"
    assert answer(choice, "bad")[0].offers == "RuntimeError: half a plug-in"
    assert answer(choice, "taken")[0].offers == "the name triton is taken"
    assert "no Backend" in answer(choice, "nothing")[0].offers
    with pytest.raises(UnsupportedError, match="half a plug-in"):
        dispatch.choice_for(asked(), "cpu", backend="bad")
    for name in ("good_plugin", "bad_plugin"):
        sys.modules.pop(name, None)


# --- explain --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*(arch.token for arch in ARCHS), "cpu"])
def test_explain_on_a_laptop(name: str) -> None:
    found = explanation.explain(platform=name)
    assert [one.request.phase for one in found.choices] == list(PHASES)
    text = str(found)
    for row in BACKENDS:
        assert re.search(rf"\b{row.name}\b", text)
    assert "pretended: torch and triton are taken to be there" in text
    data = json.loads(found.to_json())
    assert [one["chosen"] for one in data] == [name_of(one) for one in found.choices]
    assert {one["backend"] for one in data[0]["decisions"]} == {row.name for row in BACKENDS}
    assert set(data[0]["stages"]) >= {"store", "select"}


def test_explain_never_raises_because_nobody_can() -> None:
    found = explanation.explain(asked(), "gfx1030", backend="flashinfer")
    assert found.choices[0].backend is None
    assert "backend 'flashinfer' cannot serve this request" in str(found)
    assert "pass backend='AUTO' to let triton run" in str(found)
    with pytest.raises(ArgumentError, match="platform: found 3, needed a Platform or a name"):
        explanation.explain(platform=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="request: found 'decode', needed a Request"):
        explanation.explain("decode")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="platform: found 'gfx94x'"):
        explanation.explain(platform="gfx94x")


def test_explain_takes_a_platform_and_this_process() -> None:
    facts = MACHINES["mi300x"]
    assert explanation.explain(asked(), replace(facts, pretended=True)).choices[
        0
    ].platform.arch == ("gfx942")
    assert explanation.explain(asked()).choices[0].required().name == "sdpa"


def test_a_choice_is_a_value() -> None:
    choice = choose(asked(), MACHINES["h200"])
    assert choice == choose(asked(), MACHINES["h200"])
    assert hash(choice.request) == hash(asked())
    assert json.loads(choice.to_json())["chosen"] == "triton"
    assert {field.name for field in fields(Request)} == set(choice.request.to_dict())
    assert set(FEATURES) < {field.name for field in fields(Request)}
    assert issubclass(UnsupportedError, DashError)


@pytest.mark.parametrize(
    ("machine", "wanted", "served"),
    [
        ("mi300x", {"block": 64}, True),
        ("mi300x", {"block": 128}, False),
        ("mi300x", {"block": 64, "dtype": "float32", "cache_dtype": "float32"}, False),
        ("mi300x", {"head_dim": 256, "dtype": "float32", "cache_dtype": "float32"}, True),
        ("h200", {"block": 128}, True),
        ("h200", {"block": 128, "head_dim": 256}, False),
        ("a770", {"head_dim": 256, "dtype": "float32", "cache_dtype": "float32"}, False),
        ("a770", {"head_dim": 256}, True),
    ],
)
def test_our_kernels_serve_blocks_that_fit_shared_memory(
    machine: str, wanted: dict[str, Any], served: bool
) -> None:
    choice = choose(asked(**wanted), MACHINES[machine], forced("triton"))
    refused = {r.code for d in choice.decisions if d.backend.name == "triton" for r in d.rejections}
    assert (Code.COMBINATION not in refused) is served
