"""What we ran: per backend the figures that put it first on an architecture.

A figure also says that the library's version was run and found right on that architecture; any
other version or architecture must pass the self-test first. `bench` prints rows to paste. What ran
without a figure is told, and tested all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from dash_portable.backends.spec import Measured, Ran

_H200 = "2026-11-30"
_TORCH = "torch 2.11.0"


def _decode(figure: float, versions: str) -> Measured:
    """64 rows, 32K tokens of context each, the attend stage alone in a captured graph."""
    return Measured(arch="sm90", phase="decode", figure=figure, versions=versions, date=_H200)


def _prefill(figure: float, versions: str) -> Measured:
    """One prompt of 32K tokens whose rows choose at random, the attend stage alone."""
    return Measured(arch="sm90", phase="prefill", figure=figure, versions=versions, date=_H200)


# benchmarks/vendor_h200.py, decode_candidates.py and tune_prefill.py; bf16, 10 heads of 128.
FIGURES: Mapping[str, tuple[Measured, ...]] = {
    "triton": (
        _decode(44.4, f"{_TORCH}, triton 3.6.0"),
        _prefill(1064.0, f"{_TORCH}, triton 3.6.0"),
    ),
    "vllm_flash_attn2_gather": (_decode(247.3, f"{_TORCH}, vllm 0.33.0"),),
    "vllm_flash_attn3_gather": (_decode(151.0, f"{_TORCH}, vllm 0.33.0"),),
    "vllm_flash_attn3_segments": (_decode(262.2, f"{_TORCH}, vllm 0.33.0"),),
    "vllm_flash_attn3_in_place": (_decode(283.6, f"{_TORCH}, vllm 0.33.0"),),
    "flash_attn4_gather": (_decode(228.4, f"{_TORCH}, flash-attn-4 4.0.0b36"),),
    "flash_attn4_segments": (_decode(574.7, f"{_TORCH}, flash-attn-4 4.0.0b36"),),
    "torch_varlen_gather": (_decode(254.4, _TORCH),),
    "torch_varlen_segments": (_decode(1314.8, _TORCH),),
}


def _right(versions: str) -> tuple[Ran, ...]:
    return (Ran(arch="sm90", versions=versions, date=_H200),)


# benchmarks/results/2026-11-30-h200-library-checks.txt and -libraries.json.
RAN: Mapping[str, tuple[Ran, ...]] = {
    "flashinfer_gather": _right(f"{_TORCH}, flashinfer-python 0.6.4"),
    "flashinfer_in_place": _right(f"{_TORCH}, flashinfer-python 0.6.4"),
    "sdpa": _right(_TORCH),
}
