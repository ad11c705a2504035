"""What adapters say of libraries that are absent, broken, incomplete or somebody else's; and
FlashAttention's versions.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dash_portable
from dash_portable.backends import BACKENDS, flash_attn, flash_versions, imports, probe
from dash_portable.backends.flash_attn_cute import FlashAttentionCuTeDSLCompileSpec
from dash_portable.backends.spec import Backend
from dash_portable.errors import ArgumentError, BackendError
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
from tests.fakes.machine import Fake, package
from tests.machines import MACHINES

ROWS = {row.name: row for row in BACKENDS}
# The machines, and one whose architecture is another of the same family.
PLACES = {**MACHINES, "thor": replace(MACHINES["b200"], arch="sm110")}
# fake, machine, a row of it
SEEN: tuple[tuple[Fake, str, str], ...] = (
    (flash_attn2.CUDA, "h200", "flash_attn2_gather"),
    (flash_attn2.CK, "mi250", "flash_attn2_rocm_gather"),
    (flash_attn3.V274, "h200", "flash_attn3_in_place"),
    (flash_attn3.MAIN, "h200", "flash_attn3_gather"),
    (flash_attn4.B36, "b200", "flash_attn4_gather"),
    (vllm_flash_attn.SM90, "h200", "vllm_flash_attn3_gather"),
    (vllm_flash_attn.SM80, "a100", "vllm_flash_attn2_in_place"),
    (flashinfer.V06, "h200", "flashinfer_gather"),
    (aiter.CDNA, "mi300x", "aiter_gather"),
    (aiter.RDNA, "strix-halo", "aiter_rdna_gather"),
    (aiter.RDNA_NEW, "strix-halo", "aiter_rdna_segments"),
    (xpu.NEW, "b580", "xpu_gather"),
    (xpu.IPEX, "a770", "ipex_gather"),
    (torch_varlen.V211, "h200", "torch_varlen_gather"),
)


def outcome(name: str, machine: str) -> str:
    return probe.try_import(ROWS[name], MACHINES[machine]).text


@pytest.mark.parametrize(
    ("fake", "machine", "name"), [pytest.param(*row, id=f"{row[0].name}-{row[2]}") for row in SEEN]
)
def test_a_working_library_is_found(
    fake: Fake, machine: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.install(monkeypatch, tmp_path)
    before = dict(os.environ)
    assert outcome(name, machine) == ""
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "error",
    [
        ImportError("undefined symbol: _ZN3c104cuda"),
        OSError("libcudart.so.13: cannot open shared object file"),
        RuntimeError("flashinfer-cubin version does not match"),
        KeyError("gfx1099"),
        AttributeError("module 'torch' has no attribute 'xpu'"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    ("fake", "machine", "name"), [pytest.param(*row, id=f"{row[0].name}-{row[2]}") for row in SEEN]
)
def test_a_library_that_breaks_on_import_is_quoted(
    fake: Fake,
    machine: str,
    name: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The library's own words are kept and no half of it stays behind."""
    made = fake.install(monkeypatch, tmp_path)
    leaf = max(fake.modules(), key=len)
    for module in fake.modules():
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [_Breaks(leaf, error), *sys.meta_path])
    if not leaf.startswith("torch."):
        assert str(error.args[0]) in outcome(name, machine)
        assert leaf not in sys.modules
    assert made


class _Breaks:
    """A finder whose module raises while it is executed."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("name", "machine", "root", "leaf"),
    [
        ("aiter_gather", "mi300x", "aiter", "ops/mha.py"),
        ("aiter_rdna_gather", "strix-halo", "aiter", "ops/triton/mha.py"),
        ("flash_attn3_in_place", "h200", "flash_attn_3", "flash_attn_interface.py"),
        ("vllm_flash_attn3_gather", "h200", "vllm", "vllm_flash_attn/__init__.py"),
    ],
)
def test_no_half_of_a_library_stays(
    name: str,
    machine: str,
    root: str,
    leaf: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A package on disk that stops after it has imported parts of itself, and the same when it is
    whole again."""
    for module in [*sys.modules]:
        if module.partition(".")[0] in (root, "flash_attn_interface"):
            monkeypatch.delitem(sys.modules, module)
    file = tmp_path / root / leaf
    file.parent.mkdir(parents=True)
    for folder in (file.parent, *file.parent.parents):
        if folder == tmp_path:
            break
        (folder / "__init__.py").touch()
    (tmp_path / root / "core.py").touch()
    file.write_text(f"import {root}.core\nraise KeyError('gfx1099')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "KeyError: 'gfx1099'" in outcome(name, machine)
    assert f"{root}.core" not in sys.modules  # which was whole; its use was not
    file.write_text(f"import {root}.core\n", encoding="utf-8")
    importlib.invalidate_caches()
    assert "KeyError" not in outcome(name, machine)
    for module in [*sys.modules]:
        if module.partition(".")[0] == root:
            del sys.modules[module]


def test_a_missing_leaf_leaves_the_rest_of_a_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What stands above a module that does not exist is whole, and is not imported twice."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "No module named 'whole.leaf'" in imports.reason(("whole.leaf", "attend", ()))
    assert "whole" in sys.modules
    monkeypatch.delitem(sys.modules, "whole")


def test_aiter_of_iterators_is_not_amds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    aiter.IMPOSTOR.install(monkeypatch, tmp_path)
    assert "aiter.ops" in outcome("aiter_gather", "mi300x")


def test_a_library_without_our_function_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = aiter.CDNA.install(monkeypatch, tmp_path)
    del made["aiter.ops.mha"].flash_attn_varlen_func
    found = probe.try_import(ROWS["aiter_gather"], MACHINES["mi300x"])
    assert "aiter.ops.mha has no flash_attn_varlen_func" in found.text
    assert "Traceback" in found.trace


def test_a_function_without_our_argument_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch_varlen.V210.install(monkeypatch, tmp_path)
    assert "varlen_attn takes no scale" in outcome("torch_varlen_gather", "h200")


def test_what_xpu_swallowed_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    xpu.BROKEN.install(monkeypatch, tmp_path)
    assert "libsycl.so.9" in outcome("xpu_gather", "b580")


def test_vllms_copy_says_which_generation_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vllm_flash_attn.SM100.install(monkeypatch, tmp_path)
    assert "FA3 is only supported" in outcome("vllm_flash_attn3_gather", "h200")
    assert "CUDA only" in outcome("vllm_flash_attn2_gather", "mi300x")


def test_the_switch_for_amds_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Missing where it is needed it is named; set where it harms, the library is refused."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    name = "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE"
    assert name in flash_attn.flash2_check(MACHINES["rx7900"])
    assert name not in flash_attn.flash2_check(MACHINES["h200"])
    flash_attn2.TRITON.install(monkeypatch, tmp_path)
    interface = package("flash_attn.flash_attn_interface", USE_TRITON_ROCM=True)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    assert "unset it" in flash_attn.flash2_check(MACHINES["h200"])
    assert flash_attn.flash2_check(MACHINES["rx7900"]) == ""


# --- FlashAttention's versions ------------------------------------------------------------------


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Be on a machine with these libraries, and nothing else of FlashAttention."""

    def be(machine: str, *fakes: Fake) -> None:
        for name in ("flash_attn", "flash_attn_interface", "flash_attn_3", "vllm"):
            monkeypatch.setitem(sys.modules, name, None)
        for fake in fakes:
            fake.install(monkeypatch, tmp_path)
        monkeypatch.setattr(flash_versions, "current_platform", lambda: PLACES[machine])

    monkeypatch.delenv("DASH_PORTABLE_FA_VERSION", raising=False)
    return be


@pytest.mark.parametrize(
    ("machine", "fakes", "asked", "version"),
    [
        ("h200", (vllm_flash_attn.SM90,), {}, 3),
        ("h200", (flash_attn2.CUDA,), {}, 2),
        ("h200", (flash_attn2.CUDA, flash_attn3.MAIN), {}, 3),
        ("h200", (vllm_flash_attn.SM90,), {"requires_alibi": True}, 2),
        ("h200", (vllm_flash_attn.SM90,), {"head_size": 512}, 4),
        ("h200", (vllm_flash_attn.SM90,), {"head_size": 128}, 3),
        ("b200", (vllm_flash_attn.SM100,), {}, 4),
        ("b200", (vllm_flash_attn.SM100,), {"head_size": 192}, 2),
        ("b200", (vllm_flash_attn.SM100,), {"head_size": 256}, 2),
        ("b200", (vllm_flash_attn.SM100,), {"head_size": 128}, 4),
        ("thor", (vllm_flash_attn.SM100,), {}, 2),
        ("t4", (flash_attn2.CUDA,), {}, None),
        ("b200", (flash_attn4.B36,), {"requires_alibi": True}, None),
        ("a100", (vllm_flash_attn.SM80,), {}, 2),
        ("rtx5090", (flash_attn2.CUDA, flash_attn3.MAIN), {}, 2),
        ("a100", (), {}, None),
        ("mi300x", (flash_attn2.CK,), {}, None),
        ("b580", (), {}, 2),
        ("cpu", (flash_attn2.CUDA,), {}, None),
    ],
)
def test_flash_attn_version(
    on: Callable[..., None],
    machine: str,
    fakes: tuple[Fake, ...],
    asked: dict[str, Any],
    version: int | None,
) -> None:
    on(machine, *fakes)
    assert dash_portable.get_flash_attn_version(**asked) == version


@pytest.mark.parametrize(
    ("machine", "wanted", "version"),
    [
        ("h200", "2", 2),
        ("h200", "4", 4),
        ("b200", "3", 4),
        ("thor", "3", 4),
        ("a100", "4", None),
        ("a100", "3", None),
    ],
)
def test_flash_attn_version_by_the_environment(
    on: Callable[..., None],
    machine: str,
    wanted: str,
    version: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blackwell = vllm_flash_attn.SM100
    offers = {"h200": vllm_flash_attn.SM90, "b200": blackwell, "thor": blackwell}
    on(machine, offers.get(machine, vllm_flash_attn.SM80))
    monkeypatch.setenv("DASH_PORTABLE_FA_VERSION", wanted)
    assert dash_portable.get_flash_attn_version() == version
    monkeypatch.setenv("DASH_PORTABLE_FA_VERSION", "5")
    with pytest.raises(ArgumentError):
        dash_portable.get_flash_attn_version()


@pytest.mark.parametrize(
    ("machine", "fakes", "available"),
    [
        ("h200", (flash_attn2.CUDA,), True),
        ("h200", (vllm_flash_attn.SM90,), True),
        ("h200", (), False),
        ("mi300x", (flash_attn2.CK,), True),
        ("mi300x", (aiter.CDNA,), False),
        ("b580", (xpu.NEW,), True),
        ("b580", (xpu.BROKEN,), False),
        ("cpu", (flash_attn2.CUDA,), False),
    ],
)
def test_varlen_availability(
    on: Callable[..., None], machine: str, fakes: tuple[Fake, ...], available: bool
) -> None:
    on(machine, *fakes)
    assert dash_portable.is_flash_attn_varlen_func_available() is available


def test_compile_spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = FlashAttentionCuTeDSLCompileSpec(
        q_shape=(1, 2, 64),
        k_shape=(32, 2, 64),
        v_shape=(32, 2, 64),
        q_dtype="bfloat16",  # type: ignore[arg-type]
        max_seqlen_q=1,
        max_seqlen_k=32,
        softmax_scale=0.125,
        causal=False,
        fa_version=4,
        window_size=(127, 0),
        num_splits=1,
    )
    assert spec.request_key() == (
        *((1, 2, 64), (32, 2, 64), (32, 2, 64), "bfloat16", 1, 32, 0.125, False, 4),
        *(None, None, None, (127, 0), False, 1),
    )
    assert len({spec, spec}) == 1
    vllm_flash_attn.SM90.install(monkeypatch, tmp_path)
    vllm_flash_attn.COMPILED.clear()
    spec.compile()
    assert [done["num_splits"] for done in vllm_flash_attn.COMPILED] == [1]
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", package("vllm.vllm_flash_attn"))
    with pytest.raises(BackendError, match="has no compile_flash_attn_varlen_func_from_specs"):
        spec.compile()


def test_every_library_row_has_a_check_of_ours() -> None:
    own = {"triton", "sdpa", "eager"}
    rows: list[Backend] = [row for row in BACKENDS if row.name not in own]
    assert all(row.check and row.self_test for row in rows)
