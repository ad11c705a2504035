"""The contract fakes have the signatures of the real wheels, as `ci/signatures.py` read them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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

RECORD = json.loads(
    (Path(__file__).parent.parent / "ci" / "signatures.json").read_text(encoding="utf-8")
)
_FLASH = "flash_attn_varlen_func"
_VLLM = "vllm/vllm_flash_attn/flash_attn_interface.py"
_WRAPPERS = [
    f"BatchPrefillWith{kind}KVCacheWrapper.{method}"
    for kind in ("Ragged", "Paged")
    for method in ("__init__", "plan", "run")
]
# distribution, file, function, fake, module of the fake
HELD: list[tuple[str, str, str, Fake, str]] = [
    (
        "flash-attn 2.8.3.post2",
        "flash_attn/flash_attn_interface.py",
        _FLASH,
        flash_attn2.CUDA,
        "flash_attn",
    ),
    *(
        (
            "flash-attn 2.8.3.post2",
            "hopper/flash_attn_interface.py",
            name,
            flash_attn3.V283,
            "flash_attn_interface",
        )
        for name in (_FLASH, "flash_attn_with_kvcache")
    ),
    *(
        (
            "flash-attn 2.7.4.post1",
            "hopper/flash_attn_interface.py",
            name,
            flash_attn3.V274,
            "flash_attn_interface",
        )
        for name in (_FLASH, "flash_attn_with_kvcache")
    ),
    (
        "flash-attn-4 4.0.0b36",
        "flash_attn/cute/interface.py",
        _FLASH,
        flash_attn4.B36,
        "flash_attn.cute",
    ),
    *(
        (f"flashinfer-python {version}", "flashinfer/prefill.py", name, fake, "flashinfer")
        for version, fake in (("0.6.4", flashinfer.V06), ("0.7.4", flashinfer.V07))
        for name in _WRAPPERS
    ),
    *(
        (
            f"vllm-xpu-kernels {version}",
            "vllm_xpu_kernels/flash_attn_interface.py",
            _FLASH,
            fake,
            "vllm_xpu_kernels.flash_attn_interface",
        )
        for version, fake in (("0.1.3.1", xpu.OLD), ("0.1.16.2", xpu.NEW))
    ),
    (
        "intel-extension-for-pytorch 2.8.0",
        "intel_extension_for_pytorch/llm/modules/mha_fusion.py",
        "PagedAttention.flash_attn_varlen_func",
        xpu.IPEX,
        "intel_extension_for_pytorch.llm.modules",
    ),
    *(
        (
            f"torch {version}",
            "torch/nn/attention/varlen.py",
            "varlen_attn",
            fake,
            "torch.nn.attention.varlen",
        )
        for version, fake in (
            ("2.10.0", torch_varlen.V210),
            ("2.11.0", torch_varlen.V211),
            ("2.12.0", torch_varlen.V212),
            ("2.14.1", torch_varlen.V212),
        )
    ),
    *(
        ("vllm 0.33.0", _VLLM, name, vllm_flash_attn.SM90, "vllm.vllm_flash_attn")
        for name in (
            _FLASH,
            "is_fa_version_supported",
            "fa_version_unsupported_reason",
            "compile_flash_attn_varlen_func_from_specs",
        )
    ),
    ("amd-aiter 0.1.7.post2.dev18", "aiter/ops/mha.py", _FLASH, aiter.CDNA, "aiter.ops.mha"),
    (
        "amd-aiter 0.1.7.post2.dev18",
        "aiter/ops/triton/mha.py",
        _FLASH,
        aiter.RDNA,
        "aiter.ops.triton.mha",
    ),
]


def written(function: Callable[..., Any]) -> list[str]:
    """Parameters as the record writes them."""
    texts, starred = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            texts.append(f"*{parameter.name}")
            starred = True
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            texts.append("*")
            starred = True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        texts.append(parameter.name + default)
    return texts


@pytest.mark.parametrize(
    ("distribution", "file", "name", "fake", "module"),
    [pytest.param(*row, id=f"{row[0].replace(' ', '-')}-{row[2]}") for row in HELD],
)
def test_fake_has_the_real_signature(
    distribution: str, file: str, name: str, fake: Fake, module: str
) -> None:
    holder: Any = fake.modules()[module]
    for part in name.split("."):
        holder = getattr(holder, part)
    recorded = RECORD[distribution][file][name]
    assert written(holder) == recorded[recorded[0] == "cls" :]  # a class method is held bound


def test_every_recorded_function_that_an_adapter_calls_is_held() -> None:
    held = {(distribution, file, name) for distribution, file, name, _, _ in HELD}
    recorded = {
        (distribution, file, name)
        for distribution, files in RECORD.items()
        for file, names in files.items()
        for name in names
    }
    not_called = {
        ("amd-aiter 0.1.7.post2.dev18", "aiter/ops/mha.py", "mha_batch_prefill_func"),
        (
            "flash-attn 2.8.3.post2",
            "flash_attn/flash_attn_interface.py",
            "flash_attn_with_kvcache",
        ),
    }
    assert recorded - held == not_called


def test_torchs_varlen_is_one_of_its_fakes() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch before 2.10")
    """The torch that runs the tests: by name and order, since annotations say the rest."""
    real = [text.partition("=")[0] for text in written(varlen.varlen_attn)]
    known = [
        [text.partition("=")[0] for text in written(fake.modules()[varlen.__name__].varlen_attn)]
        for fake in (torch_varlen.V210, torch_varlen.V211, torch_varlen.V212)
    ]
    assert real in known
