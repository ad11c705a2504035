"""The public calls through every library's fake, on its vendor's machine: prefill, decode,
oracle's answer.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dash_portable import dispatch
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
from tests.machines import MACHINES
from tests.paged import Paged
from tests.prompts import PROMPTS, document

SERVED: tuple[tuple[Fake, str, str], ...] = (
    (flash_attn2.CUDA, "a100", "flash_attn2_gather"),
    (flash_attn2.CK, "mi250", "flash_attn2_rocm_segments"),
    (flash_attn2.TRITON, "rx7900", "flash_attn2_rocm_gather"),
    (flash_attn3.V283, "h200", "flash_attn3_in_place"),
    (flash_attn4.B36, "b200", "flash_attn4_segments"),
    (vllm_flash_attn.SM80, "a100", "vllm_flash_attn2_in_place"),
    (vllm_flash_attn.SM90, "h200", "vllm_flash_attn3_gather"),
    (flashinfer.V06, "h200", "flashinfer_in_place"),
    (flashinfer.V07, "h200", "flashinfer_gather"),
    (aiter.CDNA, "mi300x", "aiter_segments"),
    (aiter.RDNA_NEW, "strix-halo", "aiter_rdna_gather"),
    (xpu.OLD, "b580", "xpu_segments"),
    (xpu.IPEX, "a770", "ipex_gather"),
    (torch_varlen.V211, "h200", "torch_varlen_gather"),
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


@pytest.mark.parametrize(
    ("fake", "place", "row"), [pytest.param(*row, id=f"{row[0].name}-{row[2]}") for row in SERVED]
)
def test_calls_equal_the_oracle(
    fake: Fake, place: str, row: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of = document(PROMPTS["pages"][:210], decoded=[0, 0, 2], heads=4, kv_heads=2, seed=5)
    length = len(of.prompt)
    exact, ours = (Paged([of], 32, "bfloat16", seed=1) for _ in range(2))
    expected = [exact.prefill([length - 30, 30], "EAGER")]
    expected += [exact.decode([(0, at), None], "EAGER") for at in range(length, length + 3)]
    fake.install(monkeypatch, tmp_path)
    monkeypatch.setattr(dispatch, "platform_for", lambda device, backends: machine(fake, place))
    got = [ours.prefill([length - 30, 30], row)]
    got += [ours.decode([(0, at), None], row) for at in range(length, length + 3)]
    for mine, theirs in zip(got, expected, strict=True):
        step = torch.finfo(torch.bfloat16).eps * float(theirs.abs().max())
        assert float((mine.float() - theirs.float()).abs().max()) <= 4 * step
        assert bool(mine.isfinite().all())


def test_a_forced_library_that_is_absent_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = MACHINES["nvidia-bare"]
    monkeypatch.setattr(dispatch, "platform_for", lambda device, backends: bare)
    of = document(PROMPTS["pages"][:40], seed=5)
    with pytest.raises(dispatch.UnsupportedError) as caught:
        Paged([of], 32, "bfloat16").prefill([40], "FLASHINFER")
    text = str(caught.value)
    assert "prefill bfloat16" in text
    assert "flashinfer-python installed" in text
    assert "sdpa" in text
