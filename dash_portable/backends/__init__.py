"""The ordered table of backends: a new one is a row here and a file beside this one.

Order is data. Where a row was measured on an architecture, the fastest measured one is asked
first; where nothing was measured, this order stands; rows of last resort always come last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dash_portable.backends.measured import FIGURES
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
_FLASH2 = ("2.5", "3")
_VLLM = ("vllm.vllm_flash_attn:flash_attn_varlen_func",)
_TRITON_SYMBOLS = ("triton:jit", "triton.language:dot")

_BEFORE_AMPERE = tokens("Volta", "Turing")
_HOPPER = tokens("Hopper")
_BIG_BLACKWELL = frozenset({"sm100", "sm103", "sm110"})
_CDNA = tokens("CDNA2", "CDNA3", "CDNA4", "CDNA5")
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

    return rule


_FLASH4_RULES = {"gather": (_wide_on_hopper(120),), "segments": (_wide_on_hopper(128),)}


def no_bfloat16_on_turing(platform: Platform, request: Request) -> Rejection | None:
    """flashinfer's kernels for Turing are float16 only."""
    if platform.arch != "sm75" or request.dtype == "float16":
        return None
    return Rejection(code=Code.COMBINATION, asked=f"{request.dtype} on sm75", offers="float16")


def _library(
    name: str,
    file: str,
    ways: Mapping[str, str],
    *,
    vendors: frozenset[Vendor],
    packages: tuple[str, ...],
    check: str = "check",
    families: tuple[str, ...] = (),
    symbols: tuple[str, ...] = (),
    archs: frozenset[str] | None = None,
    except_archs: frozenset[str] = frozenset(),
    versions: tuple[str | None, str | None] = (None, None),
    head_dims: Mapping[str, frozenset[int]] | None = None,
    block_sizes: frozenset[int] | None = None,
    rules: Mapping[str, tuple[Rule, ...]] | None = None,
    features: frozenset[str] = _GRAPHS,
    generation: int | None = None,
) -> tuple[Backend, ...]:
    """A vendor library's rows, one per way of feeding it, named `<name>_<way>`.

    ways       "gather" one segment a row, bias in extra key columns; "segments" each block and the
               window gathered apart; "in_place" the same through a page table: -> class in `file`
    head_dims  of a way, where it differs from what the way allows; `rules` of a way likewise
    features   of every way; segments and in_place have their own beside them
    """
    widths = {"gather": _BY_8_AND_BIAS, "segments": _BY_8, "in_place": _BY_8, **(head_dims or {})}
    own = {
        "gather": frozenset[str](),
        "segments": frozenset({"lse"}),
        "in_place": frozenset({"lse", "in_place"}),
    }
    stages = {"gather": ("gather",), "segments": ("gather", "merge"), "in_place": ("merge",)}
    module = f"dash_portable.backends.{file}"
    return tuple(
        Backend(
            name=f"{name}_{way}",
            families=(name, *families),
            generation=generation,
            entry=f"{module}:{runner}",
            symbols=symbols,
            check=f"{module}:{check}",
            stages=stages[way],
            self_test=True,
            capability=Capability(
                vendors=vendors,
                archs=archs,
                except_archs=except_archs,
                packages=packages,
                versions=versions,
                dtypes=_HALVES,
                head_dims=widths[way],
                block_sizes=block_sizes if way == "in_place" else None,
                features=features | own[way],
                rules=(one_dtype, *(rules or {}).get(way, ())),
            ),
        )
        for way, runner in ways.items()
    )


_LIBRARIES = (
    *_library(
        "flash_attn3",
        "flash_attn",
        {"gather": "Gathered3", "segments": "Segmented3", "in_place": "Paged3"},
        check="flash3_check",
        families=("flash_attn",),
        generation=3,
        vendors=_NVIDIA,
        archs=_HOPPER,
        packages=("flash-attn-3",),
        features=_REPEATABLE,
    ),
    *_library(
        "vllm_flash_attn3",
        "flash_attn",
        {"gather": "VllmGathered3", "segments": "VllmSegmented3", "in_place": "VllmPaged3"},
        check="copy3_check",
        families=("flash_attn3", "flash_attn", "vllm_flash_attn"),
        symbols=_VLLM,
        generation=3,
        vendors=_NVIDIA,
        archs=_HOPPER,
        packages=("vllm",),
        features=_REPEATABLE,
    ),
    *_library(
        "flash_attn4",
        "flash_attn",
        {"gather": "Gathered4", "segments": "Segmented4"},
        check="flash4_check",
        families=("flash_attn",),
        symbols=("flash_attn.cute:flash_attn_varlen_func",),
        generation=4,
        vendors=_NVIDIA,
        except_archs=_BEFORE_AMPERE,
        packages=("flash-attn-4",),
        rules=_FLASH4_RULES,
    ),
    *_library(
        "vllm_flash_attn4",
        "flash_attn",
        {"gather": "VllmGathered4", "segments": "VllmSegmented4"},
        check="copy4_check",
        families=("flash_attn4", "flash_attn", "vllm_flash_attn"),
        symbols=_VLLM,
        generation=4,
        vendors=_NVIDIA,
        archs=_HOPPER | _BIG_BLACKWELL,
        packages=("vllm",),
        rules=_FLASH4_RULES,
    ),
    *_library(
        "flash_attn2",
        "flash_attn",
        {"gather": "Gathered2", "segments": "Segmented2"},
        check="flash2_check",
        families=("flash_attn",),
        symbols=("flash_attn:flash_attn_varlen_func",),
        generation=2,
        vendors=_NVIDIA,
        except_archs=_BEFORE_AMPERE,
        packages=("flash-attn",),
        versions=_FLASH2,
    ),
    *_library(
        "vllm_flash_attn2",
        "flash_attn",
        {"gather": "VllmGathered2", "segments": "VllmSegmented2", "in_place": "VllmPaged2"},
        check="copy2_check",
        families=("flash_attn2", "flash_attn", "vllm_flash_attn"),
        symbols=_VLLM,
        generation=2,
        vendors=_NVIDIA,
        except_archs=_BEFORE_AMPERE,
        packages=("vllm",),
        block_sizes=_BY_16,
    ),
    *_library(
        "flashinfer",
        "flashinfer",
        {"gather": "Gathered", "in_place": "Paged"},
        symbols=("flashinfer:BatchPrefillWithPagedKVCacheWrapper",),
        vendors=_NVIDIA,
        except_archs=tokens("Volta"),
        packages=("flashinfer-python",),
        versions=("0.6", None),
        head_dims={"in_place": _FLASHINFER_DIMS},
        rules=dict.fromkeys(("gather", "in_place"), (no_bfloat16_on_turing,)),
        features=_REPEATABLE,
    ),
    *_library(
        "aiter",
        "aiter",
        {"gather": "Gathered", "segments": "Segmented"},
        symbols=("aiter.ops.mha:flash_attn_varlen_func",),
        vendors=_AMD,
        archs=_CDNA,
        packages=("amd-aiter",),
    ),
    *_library(
        "aiter_rdna",
        "aiter",
        {"gather": "GatheredRdna", "segments": "SegmentedRdna"},
        families=("aiter",),
        vendors=_AMD,
        archs=_RDNA,
        packages=("amd-aiter",),
    ),
    *_library(
        "flash_attn2_rocm",
        "flash_attn",
        {"gather": "Gathered2", "segments": "Segmented2"},
        check="flash2_check",
        families=("flash_attn2", "flash_attn"),
        symbols=("flash_attn:flash_attn_varlen_func",),
        generation=2,
        vendors=_AMD,
        archs=_ROCM_FLASH,
        packages=("flash-attn",),
        versions=_FLASH2,
    ),
    *_library(
        "flashinfer_rocm",
        "flashinfer",
        {"gather": "Gathered"},
        families=("flashinfer",),
        vendors=_AMD,
        archs=frozenset({"gfx942", "gfx950"}),
        packages=("amd-flashinfer",),
        features=frozenset(),
    ),
    *_library(
        "xpu",
        "xpu",
        {"gather": "Gathered", "segments": "Segmented"},
        symbols=("vllm_xpu_kernels.flash_attn_interface:flash_attn_varlen_func",),
        vendors=_INTEL,
        archs=_XE2 | _XE3,
        packages=("vllm-xpu-kernels",),
        head_dims={"gather": _BY_8},
    ),
    *_library(
        "torch_varlen",
        "torch_varlen",
        {"gather": "Gathered", "segments": "Segmented"},
        symbols=("torch.nn.attention.varlen:varlen_attn",),
        vendors=_NVIDIA,
        except_archs=_BEFORE_AMPERE,
        packages=("torch",),
        versions=("2.11", None),
    ),
)

# Behind Triton: a gate that nobody has tested, and a library that is archived.
_LATER = (
    *_library(
        "torch_varlen_rocm",
        "torch_varlen",
        {"gather": "Gathered"},
        families=("torch_varlen",),
        symbols=("torch.nn.attention.varlen:varlen_attn",),
        vendors=_AMD,
        packages=("torch",),
        versions=("2.11", None),
    ),
    *_library(
        "ipex",
        "ipex",
        {"gather": "Gathered"},
        symbols=("intel_extension_for_pytorch.llm.modules:PagedAttention",),
        vendors=_INTEL,
        packages=("intel-extension-for-pytorch",),
        features=frozenset(),
    ),
)

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
    replace(row, measured=FIGURES.get(row.name, ())) for row in _ROWS
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
