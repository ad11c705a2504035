"""The public calls through every library's fake, on its vendor's machine: prefill, decode,
oracle's answer.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dash_portable import dispatch, self_test
from dash_portable.backends import BACKENDS
from dash_portable.backends.spec import Facts, Policy, compare
from dash_portable.errors import UnsupportedError
from dash_portable.platform.facts import Platform
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
from tests.machines import MACHINES, asked
from tests.paged import Paged
from tests.prompts import PROMPTS, document
from tests.test_adapters import ADAPTERS

SERVED: tuple[tuple[Fake, str, str], ...] = (
    (flash_attn2.CUDA, "a100", "flash_attn2_gather"),
    (flash_attn2.CK, "mi250", "flash_attn2_rocm_segments"),
    (flash_attn2.TRITON, "rx7900", "flash_attn2_rocm_gather"),
    (flash_attn3.V274, "h200", "flash_attn3_segments"),
    (flash_attn3.V283, "h200", "flash_attn3_in_place"),
    (flash_attn3.MAIN, "h200", "flash_attn3_gather"),
    (flash_attn4.B36, "b200", "flash_attn4_segments"),
    (vllm_flash_attn.SM80, "a100", "vllm_flash_attn2_in_place"),
    (vllm_flash_attn.SM90, "h200", "vllm_flash_attn3_gather"),
    (vllm_flash_attn.SM100, "b200", "vllm_flash_attn4_segments"),
    (flashinfer.V06, "h200", "flashinfer_in_place"),
    (flashinfer.V07, "h200", "flashinfer_gather"),
    (aiter.CDNA, "mi300x", "aiter_segments"),
    (aiter.RDNA, "strix-halo", "aiter_rdna_segments"),
    (aiter.RDNA_NEW, "strix-halo", "aiter_rdna_gather"),
    (xpu.OLD, "b580", "xpu_segments"),
    (xpu.NEW, "b580", "xpu_gather"),
    (xpu.IPEX, "a770", "ipex_gather"),
    (torch_varlen.V211, "h200", "torch_varlen_gather"),
    (torch_varlen.V212, "h200", "torch_varlen_segments"),
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    module = importlib.import_module("dash_portable.backends.flashinfer")
    module._plan_ragged.cache_clear()
    module._plan_paged.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dispatch.forget()
    yield
    torch.set_num_threads(threads)
    dispatch.forget()


def machine(fake: Fake, name: str) -> Platform:
    """The written-down machine with the fake's distribution, and without Triton: its layer is
    torch.
    """
    packages = (("torch", "2.14.1"), *fake.distributions)
    return replace(MACHINES[name], packages=packages)


def grid() -> Iterator[tuple[Fake, str, str, int, int]]:
    """Every fake, every row that it serves on its own machine, with and without groups."""
    places = {platform.arch: name for name, platform in reversed(MACHINES.items())}
    for fake, file, runners in ADAPTERS:
        place = places[fake.arch]
        for row in BACKENDS:
            ours = row.entry in {f"dash_portable.backends.{file}:{name}" for name in runners}
            platform = machine(fake, place)
            if ours and not compare(row, asked(head_dim=64), platform, Policy(), Facts()):
                yield fake, place, row.name, 4, 2
                yield fake, place, row.name, 3, 3


def rows() -> list[Any]:
    """One row of each fake in every run, with and without groups; with --full the whole grid."""
    few = [(*row, *heads) for row in SERVED for heads in ((4, 2), (3, 3))]
    more = [row for row in grid() if row not in few]
    named = [(row, f"{row[0].name}-{row[2]}-{row[3]}-{row[4]}") for row in (*few, *more)]
    return [
        pytest.param(*row, id=name, marks=[pytest.mark.full] if row in more else [])
        for row, name in named
    ]


def test_the_grid_has_every_library_row_but_those_that_are_refused() -> None:
    served = {row for _, _, row, _, _ in grid()}
    libraries = {row.name for row in BACKENDS if row.check}
    assert libraries - served == {"flashinfer_rocm_gather", "torch_varlen_rocm_gather"}
    assert {row for _, _, row in SERVED} <= served
    assert [fake for fake, _, _ in SERVED] == [fake for fake, _, _ in ADAPTERS]


@pytest.mark.parametrize(("fake", "place", "row", "heads", "kv_heads"), rows())
def test_calls_equal_the_oracle(
    fake: Fake,
    place: str,
    row: str,
    heads: int,
    kv_heads: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    of = document(PROMPTS["pages"][:210], decoded=[0, 0, 2], heads=heads, kv_heads=kv_heads, seed=5)
    length = len(of.prompt)
    exact, ours = (Paged([of], 32, "bfloat16", seed=1) for _ in range(2))
    expected = [exact.prefill([length - 30, 30], "EAGER")]
    expected += [exact.decode([(0, at), None], "EAGER") for at in range(length, length + 3)]
    fake.install(monkeypatch, tmp_path)
    monkeypatch.setattr(dispatch, "platform_for", lambda device, backends: machine(fake, place))
    # A forced library is self-tested before its first call: here where its tensors are.
    monkeypatch.setattr(self_test, "run", functools.partial(self_test.run, device="cpu"))
    got = [ours.prefill([length - 30, 30], row)]
    got += [ours.decode([(0, at), None], row) for at in range(length, length + 3)]
    for mine, theirs in zip(got, expected, strict=True):
        step = torch.finfo(torch.bfloat16).eps * float(theirs.abs().max())
        assert float((mine.float() - theirs.float()).abs().max()) <= 4 * step
        assert bool(mine.isfinite().all())


def test_a_forced_library_that_is_absent_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request, what is not installed, what it would not take if it were, and who would."""
    bare = MACHINES["nvidia-bare"]
    monkeypatch.setattr(dispatch, "platform_for", lambda device, backends: bare)
    request = asked(phase="prefill", dtype="float32", cache_dtype="float32", head_dim=80)
    with pytest.raises(UnsupportedError) as caught:
        dispatch.choice_for(request, backend="FLASHINFER")
    lines = str(caught.value).splitlines()
    text = "\n".join(lines)
    assert "prefill float32 cache=float32 head_dim=80" in text
    at = next(i for i, line in enumerate(lines) if "flashinfer_in_place: rejected" in line)
    reasons = [line.strip() for line in lines[at + 1 : at + 5]]
    assert reasons[0] == "missing: asked flashinfer-python installed, offers nothing"
    assert "dtype: asked float32, offers bfloat16 float16" in reasons
    assert "head_dim: asked 80, offers 64 128 256" in reasons
    assert [line.split()[:2] for line in lines if " ok" in line and "chosen" not in line] == [
        ["triton", "ok,"],
        ["sdpa", "ok"],
        ["eager", "ok"],
    ]
