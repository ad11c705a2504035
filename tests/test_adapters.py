"""Every adapter over its library's fake: the whole attend equals the oracle, and broken ones are
caught."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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
