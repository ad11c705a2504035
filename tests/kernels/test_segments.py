"""Libraries fed by kernels instead of torch: gather, page tables, merge, over contract fakes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from dash_portable.kernels import gather
from dash_portable.segments import fused
from dash_portable.self_test import make_case
from tests.device import DEVICE
from tests.fakes import flash_attn2, flash_attn3, vllm_flash_attn, xpu
from tests.fakes.machine import Fake

ROWS = [
    (flash_attn2.CUDA, "flash_attn:Gathered2"),
    (flash_attn2.CUDA, "flash_attn:Segmented2"),
    (flash_attn3.MAIN, "flash_attn:Gathered3"),
    (flash_attn3.MAIN, "flash_attn:Segmented3"),
    (flash_attn3.MAIN, "flash_attn:Paged3"),
    (vllm_flash_attn.SM90, "flash_attn:VllmPaged3"),
    (xpu.NEW, "xpu:Gathered"),
]


@pytest.mark.parametrize(("phase", "block_size"), [("decode", 16), ("prefill", 64)])
@pytest.mark.parametrize(
    ("fake", "entry"), [pytest.param(*row, id=f"{row[0].name}-{row[1]}") for row in ROWS]
)
def test_kernels_feed_libraries(
    fake: Fake,
    entry: str,
    block_size: int,
    phase: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fake.install(monkeypatch, tmp_path)
    monkeypatch.setattr(fused, "available", lambda device_type: True)
    shape = {"phase": phase, "block_size": block_size, "strided": block_size == 16}
    with torch.device("cpu"):  # it is made there, and moved
        case = make_case(group=2, head_dim=64, device=str(DEVICE), **shape)
    file, _, name = entry.partition(":")
    runner = getattr(importlib.import_module(f"dash_portable.backends.{file}"), name)(case.step)
    out = torch.full_like(case.query, float("nan"))
    for _ in range(2):  # scratch of the first layer is there in the second
        runner.run(case.query, case.cache, case.ids, case.bias, out)
    assert case.error(out) <= case.allowed()
    assert bool((out[case.step.row_pos < 0] == 0).all())


@pytest.mark.parametrize(
    ("fake", "entry"),
    [
        (flash_attn2.CUDA, "flash_attn:Gathered2"),
        (flash_attn3.MAIN, "flash_attn:Gathered3"),
        (vllm_flash_attn.SM90, "flash_attn:VllmGathered3"),
    ],
    ids=lambda x: str(getattr(x, "name", x)),
)
@pytest.mark.parametrize(
    "row",
    [
        gather.GATHER["sm90"],
        gather.GatherRow(warps=8, tail=16),
        gather.GatherRow(heads=1, last=True, tail=16),
    ],
    ids=str,
)
def test_launch_rows_feed_libraries(
    row: gather.GatherRow,
    fake: Fake,
    entry: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Hopper's; columns to spare between keys, so that they end where sectors do; the last row
    first.
    """
    monkeypatch.setattr(gather, "GATHER", {"*": row})
    test_kernels_feed_libraries(fake, entry, 16, "decode", monkeypatch, tmp_path)
