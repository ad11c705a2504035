"""The ordered table of backends: a new one is a row here and a file beside this one.

Order is data. Where a row was measured on an architecture, the fastest measured one is asked
first; where nothing was measured, this order stands; rows of last resort always come last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dash_portable.backends.measured import FIGURES, RAN
from dash_portable.backends.spec import Backend, Capability, Code, Rejection, Rule
from dash_portable.platform.facts import TRITON_FLOOR, TRITONS, Platform, Vendor, tokens
from dash_portable.request import FEATURES, Request

_NVIDIA, _AMD, _INTEL = (
    frozenset({vendor}) for vendor in (Vendor.NVIDIA, Vendor.AMD, Vendor.INTEL)
)
_GPUS = _NVIDIA | _AMD | _INTEL
_HALVES = frozenset({"float16", "bfloat16"})
_FLOATS = _HALVES | {"float32"}
_BY_8 = frozenset(range(8, 257, 8))
# Two bias columns and their alignment are added to the keys of a gathered row.
_BY_8_AND_BIAS = frozenset(range(8, 249, 8))
_BY_16 = frozenset(range(16, 1025, 16))
_FLASHINFER_DIMS = frozenset({64, 128, 256})
_GRAPHS = frozenset({"graph"})
_REPEATABLE = frozenset({"graph", "deterministic"})

# Floors: torch's varlen and library calls of 2.8; Intel's build of Triton is one release behind.
_TORCH = ("2.8", None)
_TRITON = (TRITON_FLOOR, None)
_FLASH2_VERSIONS = ("2.5", "3")
_TRITON_SYMBOLS = ("triton:jit", "triton.language:dot")

_VOLTA = tokens("Volta")
_BEFORE_AMPERE = tokens("Volta", "Turing")
_HOPPER = tokens("Hopper")
_BIG_BLACKWELL = frozenset({"sm100", "sm103", "sm110"})
_CDNA = tokens("CDNA2", "CDNA3", "CDNA4", "CDNA5")
_BIG_CDNA = frozenset({"gfx942", "gfx950"})
_RDNA = tokens("RDNA3", "RDNA3.5", "RDNA4")
# The lists of flash-attention's setup.py for ROCm.
_ROCM_FLASH = frozenset(
    {"gfx90a", "gfx942", "gfx950"}
    | {"gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200", "gfx1201"}
)
_XE2 = frozenset({"bmg", "lnl", "pvc"})
_XE3 = tokens("Xe3")


def one_dtype(platform: Platform, request: Request) -> Rejection | None:
    """The library multiplies query and keys as they are."""
    if request.dtype == request.cache_dtype:
        return None
    asked = f"{request.dtype} with a cache of {request.cache_dtype}"
    return Rejection(code=Code.COMBINATION, asked=asked, offers="one dtype for both")


def _wide_on_hopper(widest: int) -> Rule:
    """FlashAttention 4 has heads wider than 128 columns on Hopper only."""

    def rule(platform: Platform, request: Request) -> Rejection | None:
        if platform.arch in _HOPPER or request.head_dim <= widest:
            return None
        asked, offers = f"{request.head_dim} on {platform.arch}", f"up to {widest}, more on sm90"
        return Rejection(code=Code.COMBINATION, asked=asked, offers=offers)

    rule.__doc__ = f"Heads wider than {widest} on Hopper only."
    return rule


_FLASH4_RULES = {"gather": (_wide_on_hopper(120),), "segments": (_wide_on_hopper(128),)}


def no_bfloat16_on_turing(platform: Platform, request: Request) -> Rejection | None:
    """flashinfer's kernels for Turing are float16 only."""
    if platform.arch != "sm75" or request.dtype == "float16":
        return None
    return Rejection(code=Code.COMBINATION, asked=f"{request.dtype} on sm75", offers="float16")


_FLASHINFER_RULES = dict.fromkeys(("gather", "in_place"), (no_bfloat16_on_turing,))

_ROOMY = frozenset({"sm80", "sm87", "sm90", "sm100", "sm103", "sm110"})  # 160 KB and more
_BYTES = {"float32": 4}  # else 2


def a_block_fits(platform: Platform, request: Request) -> Rejection | None:
    """A sparse block's keys and values must fit 32 KB of shared memory, 64 KB on the largest cards.

    Blocks of 32 tokens fit at any width that was compiled, but on Arc A.
    """
    columns = 1 << max(request.head_dim - 1, 15).bit_length()
    held = 2 * request.block * columns * _BYTES.get(request.cache_dtype, 2)
    most = 65536 if platform.arch in _ROOMY else 32768
    if held <= most or (request.block <= 32 and columns <= 256 and platform.arch != "dg2"):
        return None
    asked = f"blocks of {request.block} tokens, {request.head_dim} wide, in {request.cache_dtype}"
    offers = f"up to {most // 1024} KB of keys and values a block on {platform.arch}"
    return Rejection(code=Code.COMBINATION, asked=asked, offers=offers)


_FEATURES = {
    "gather": frozenset[str](),
    "segments": frozenset({"lse"}),
    "in_place": frozenset({"lse", "in_place"}),
}
_STAGES = {"gather": ("gather",), "segments": ("gather", "merge"), "in_place": ("merge",)}
_CLASSES = {"gather": "Gathered", "segments": "Segmented", "in_place": "Paged"}
_WIDTHS = {"gather": _BY_8_AND_BIAS, "segments": _BY_8, "in_place": _BY_8}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _library(
    name: str,
    ways: str,
    vendor: frozenset[Vendor],
    package: str,
    adapter: str,
    *,
    check: str = "check",
    families: str = "",
    symbol: str = "",
    archs: frozenset[str] | None = None,
    not_on: frozenset[str] = frozenset(),
    versions: tuple[str | None, str | None] = (None, None),
    widths: Mapping[str, frozenset[int]] = _NOTHING,
    pages: frozenset[int] | None = None,
    rules: Mapping[str, tuple[Rule, ...]] = _NOTHING,
    features: frozenset[str] = _GRAPHS,
    generation: int | None = None,
) -> tuple[Backend, ...]:
    """A vendor library's rows, one per way of feeding it, named `<name>_<way>`.

    ways      of "gather" (one segment a row, bias in extra key columns), "segments" (each block and
              the window gathered apart) and "in_place" (the same through a page table)
    adapter   "file:Pattern": a way's class is the pattern with Gathered, Segmented or Paged in it;
              `check` is a function of the same file
    symbol    what the library must have; widths and rules of a way, where it has its own; pages:
              cache block sizes that are read in place
    features  of every way; segments and in_place have their own beside them
    """
    file, _, pattern = adapter.partition(":")
    module = f"dash_portable.backends.{file}"
    return tuple(
        Backend(
            name=f"{name}_{way}",
            families=(name, *families.split()),
            generation=generation,
            entry=f"{module}:{pattern.format(_CLASSES[way])}",
            symbols=(symbol,) if symbol else (),
            check=f"{module}:{check}",
            stages=_STAGES[way],
            self_test=True,
            capability=Capability(
                vendors=vendor,
                archs=archs,
                except_archs=not_on,
                packages=(package,),
                versions=versions,
                dtypes=_HALVES,
                head_dims=widths.get(way, _WIDTHS[way]),
                block_sizes=pages if way == "in_place" else None,
                features=features | _FEATURES[way],
                rules=(one_dtype, *rules.get(way, ())),
            ),
        )
        for way in ways.split()
    )


_ALL, _COPIED = "gather segments in_place", "gather segments"
_FLASH2 = "flash_attn:flash_attn_varlen_func"
_FLASH4 = "flash_attn.cute:flash_attn_varlen_func"
_VLLM = "vllm.vllm_flash_attn:flash_attn_varlen_func"
_FLASHINFER = "flashinfer:BatchPrefillWithPagedKVCacheWrapper"
_AITER = "aiter.ops.mha:flash_attn_varlen_func"
_XPU = "vllm_xpu_kernels.flash_attn_interface:flash_attn_varlen_func"
_VARLEN = "torch.nn.attention.varlen:varlen_attn"
_IPEX = "intel_extension_for_pytorch.llm.modules:PagedAttention"

# name, ways, vendor, package, adapter; then where it runs; then what else there is to say of it
# fmt: off
_LIBRARIES = (
    *_library("flash_attn3", _ALL, _NVIDIA, "flash-attn-3", "flash_attn:{}3",
              archs=_HOPPER, features=_REPEATABLE,
              generation=3, families="flash_attn", check="flash3_check"),
    *_library("vllm_flash_attn3", _ALL, _NVIDIA, "vllm", "flash_attn:Vllm{}3",
              archs=_HOPPER, features=_REPEATABLE, symbol=_VLLM,
              generation=3, families="flash_attn3 flash_attn vllm_flash_attn", check="copy3_check"),
    *_library("flash_attn4", _COPIED, _NVIDIA, "flash-attn-4", "flash_attn:{}4",
              not_on=_BEFORE_AMPERE, rules=_FLASH4_RULES, symbol=_FLASH4,
              generation=4, families="flash_attn", check="flash4_check"),
    *_library("vllm_flash_attn4", _COPIED, _NVIDIA, "vllm", "flash_attn:Vllm{}4",
              archs=_HOPPER | _BIG_BLACKWELL, rules=_FLASH4_RULES, symbol=_VLLM,
              generation=4, families="flash_attn4 flash_attn vllm_flash_attn", check="copy4_check"),
    *_library("flash_attn2", _COPIED, _NVIDIA, "flash-attn", "flash_attn:{}2",
              not_on=_BEFORE_AMPERE, versions=_FLASH2_VERSIONS, symbol=_FLASH2,
              generation=2, families="flash_attn", check="flash2_check"),
    *_library("vllm_flash_attn2", _ALL, _NVIDIA, "vllm", "flash_attn:Vllm{}2",
              not_on=_BEFORE_AMPERE, pages=_BY_16, symbol=_VLLM,
              generation=2, families="flash_attn2 flash_attn vllm_flash_attn", check="copy2_check"),
    *_library("flashinfer", "gather in_place", _NVIDIA, "flashinfer-python", "flashinfer:{}",
              not_on=_VOLTA, versions=("0.6", None), symbol=_FLASHINFER,
              widths={"in_place": _FLASHINFER_DIMS}, rules=_FLASHINFER_RULES,
              features=_REPEATABLE),
    *_library("aiter", _COPIED, _AMD, "amd-aiter", "aiter:{}", archs=_CDNA, symbol=_AITER),
    *_library("aiter_rdna", _COPIED, _AMD, "amd-aiter", "aiter:{}Rdna",
              archs=_RDNA, families="aiter"),
    *_library("flash_attn2_rocm", _COPIED, _AMD, "flash-attn", "flash_attn:{}2",
              archs=_ROCM_FLASH, versions=_FLASH2_VERSIONS, symbol=_FLASH2,
              generation=2, families="flash_attn2 flash_attn", check="flash2_check"),
    *_library("flashinfer_rocm", "gather", _AMD, "amd-flashinfer", "flashinfer:{}",
              archs=_BIG_CDNA, features=frozenset(), families="flashinfer"),
    *_library("xpu", _COPIED, _INTEL, "vllm-xpu-kernels", "xpu:{}",
              archs=_XE2 | _XE3, symbol=_XPU, widths={"gather": _BY_8}),
    *_library("torch_varlen", _COPIED, _NVIDIA, "torch", "torch_varlen:{}",
              not_on=_BEFORE_AMPERE, versions=("2.11", None), symbol=_VARLEN),
)

# Behind Triton: a gate that nobody has tested, and a library that is archived.
_LATER = (
    *_library("torch_varlen_rocm", "gather", _AMD, "torch", "torch_varlen:{}",
              versions=("2.11", None), symbol=_VARLEN, families="torch_varlen"),
    *_library("ipex", "gather", _INTEL, "intel-extension-for-pytorch", "ipex:{}",
              symbol=_IPEX, features=frozenset()),
)
# fmt: on

_ROWS = (
    *(row for row in _LIBRARIES if row.stages == ("gather",)),
    Backend(
        name="triton",
        entry="dash_portable.backends.triton:Runner",
        symbols=_TRITON_SYMBOLS,
        self_test=True,
        capability=Capability(
            vendors=_GPUS,
            packages=TRITONS,
            versions=_TRITON,
            dtypes=_FLOATS,
            features=frozenset({"in_place", "graph", "deterministic"}),
            rules=(a_block_fits,),
        ),
    ),
    *_LATER,
    # A call for each of a row's segments costs two to four times a call for the whole row (measured
    # on sm90), so these serve when they are asked for by name, or when nothing before them can.
    *(row for row in _LIBRARIES if "merge" in row.stages),
    Backend(
        name="sdpa",
        entry="dash_portable.backends.sdpa:Runner",
        fallback=True,
        capability=Capability(
            packages=("torch",),
            versions=_TORCH,
            dtypes=_FLOATS,
            features=frozenset({"deterministic"}),
        ),
    ),
    Backend(
        name="eager",
        entry="dash_portable.backends.eager:Runner",
        fallback=True,
        capability=Capability(
            packages=("torch",),
            versions=_TORCH,
            features=frozenset(FEATURES) - {"graph"},
        ),
    ),
)

BACKENDS: tuple[Backend, ...] = tuple(
    replace(row, measured=FIGURES.get(row.name, ()), ran=RAN.get(row.name, ())) for row in _ROWS
)

# The shared layer: who stores, selects, gathers and merges for the backend that attends.
SHARED: tuple[Backend, ...] = (
    Backend(
        name="triton",
        entry="dash_portable.triton_layer:TritonLayer",
        symbols=_TRITON_SYMBOLS,
        self_test=True,
        measured=FIGURES["triton"],
        capability=Capability(
            vendors=_GPUS,
            packages=TRITONS,
            versions=_TRITON,
            dtypes=_FLOATS,
            features=frozenset(FEATURES),
        ),
    ),
    Backend(
        name="eager",
        entry="dash_portable.eager:EagerLayer",
        fallback=True,
        capability=Capability(
            packages=("torch",),
            versions=_TORCH,
            features=frozenset(FEATURES),
        ),
    ),
)
