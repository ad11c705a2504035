"""The ordered table of backends: a new one is a row here and a file beside this one.

Order is data. Where a row was measured on an architecture, the fastest measured one is asked
first; where nothing was measured, this order stands; rows of last resort always come last.
"""

from __future__ import annotations

from dash_portable.backends.spec import Backend, Capability, Code, Rejection
from dash_portable.platform.facts import TRITONS, Platform, Vendor, tokens
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
_BY_16 = frozenset(range(16, 257, 16))
_FLASHINFER_DIMS = frozenset({64, 128, 256})
_GRAPHS = frozenset({"graph"})
_SEGMENTS = frozenset({"graph", "in_place", "lse"})

# Floors: torch's varlen and library calls of 2.8; Intel's build of Triton is one release behind.
_TORCH = ("2.8", None)
_TRITON = ("3.3", None)
_TRITON_SYMBOLS = ("triton:jit", "triton.language:dot")

_BEFORE_AMPERE = tokens("Volta", "Turing")
_HOPPER = tokens("Hopper")
_BIG_BLACKWELL = frozenset({"sm100", "sm103", "sm110"})
_CDNA = tokens("CDNA2", "CDNA3", "CDNA4")
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


def whole_cache_blocks(platform: Platform, request: Request) -> Rejection | None:
    """A page table can start a segment only where a cache block starts."""
    if request.block % request.block_size == 0:
        return None
    asked = f"blocks of {request.block} in cache blocks of {request.block_size}"
    offers = f"cache blocks that divide {request.block}"
    return Rejection(code=Code.COMBINATION, asked=asked, offers=offers)


def _library(
    name: str,
    families: tuple[str, ...],
    runner: str,
    symbol: str,
    *,
    vendors: frozenset[Vendor],
    packages: tuple[str, ...],
    head_dims: frozenset[int] = _BY_8_AND_BIAS,
    archs: frozenset[str] | None = None,
    except_archs: frozenset[str] = frozenset(),
    versions: tuple[str | None, str | None] = (None, None),
    block_sizes: frozenset[int] | None = None,
    in_place: bool = False,
    whole: bool = True,
    generation: int | None = None,
    pending: str = "none in this version",
) -> Backend:
    """A vendor library's row: one gathered segment a row, or in place through a page table.

    runner   "file:Class" below `dash_portable.backends`
    whole    in place, its page table starts segments only where cache blocks start
    """
    paged = (one_dtype, whole_cache_blocks) if whole else (one_dtype,)
    return Backend(
        name=name,
        families=families,
        generation=generation,
        entry=f"dash_portable.backends.{runner}",
        symbols=(symbol,),
        stages=("merge",) if in_place else ("gather",),
        self_test=True,
        pending=pending,
        capability=Capability(
            vendors=vendors,
            archs=archs,
            except_archs=except_archs,
            packages=packages,
            versions=versions,
            dtypes=_HALVES,
            head_dims=head_dims,
            block_sizes=block_sizes,
            features=_SEGMENTS if in_place else _GRAPHS,
            rules=paged if in_place else (one_dtype,),
        ),
    )


_FLASH2 = ("flash_attn2", "flash_attn")
_FLASH3 = ("flash_attn3", "flash_attn")
_FLASH4 = ("flash_attn4", "flash_attn")
_VLLM = ("vllm_flash_attn",)

BACKENDS: tuple[Backend, ...] = (
    _library(
        "flash_attn3_gather",
        _FLASH3,
        "flash_attn:Gathered3",
        "flash_attn_interface:flash_attn_varlen_func",
        generation=3,
        vendors=_NVIDIA,
        archs=_HOPPER,
        packages=("flash-attn-3",),
    ),
    _library(
        "flash_attn3_in_place",
        _FLASH3,
        "flash_attn:Paged3",
        "flash_attn_interface:flash_attn_with_kvcache",
        generation=3,
        in_place=True,
        vendors=_NVIDIA,
        archs=_HOPPER,
        packages=("flash-attn-3",),
        head_dims=_BY_8,
    ),
    _library(
        "vllm_flash_attn3_gather",
        _VLLM + _FLASH3,
        "flash_attn:VllmGathered3",
        "vllm.vllm_flash_attn:flash_attn_varlen_func",
        generation=3,
        vendors=_NVIDIA,
        archs=_HOPPER,
        packages=("vllm",),
    ),
    _library(
        "vllm_flash_attn3_in_place",
        _VLLM + _FLASH3,
        "flash_attn:VllmPaged3",
        "vllm.vllm_flash_attn:flash_attn_varlen_func",
        generation=3,
        in_place=True,
        vendors=_NVIDIA,
        archs=_HOPPER,
        packages=("vllm",),
        head_dims=_BY_8,
    ),
    _library(
        "flash_attn4_gather",
        _FLASH4,
        "flash_attn:Gathered4",
        "flash_attn.cute:flash_attn_varlen_func",
        generation=4,
        vendors=_NVIDIA,
        except_archs=_BEFORE_AMPERE,
        packages=("flash-attn-4",),
        head_dims=frozenset(range(8, 121, 8)),
    ),
    _library(
        "flash_attn4_in_place",
        _FLASH4,
        "flash_attn:Paged4",
        "flash_attn.cute:flash_attn_varlen_func",
        generation=4,
        in_place=True,
        vendors=_NVIDIA,
        archs=_HOPPER | _BIG_BLACKWELL,
        packages=("flash-attn-4",),
        head_dims=frozenset(range(8, 129, 8)),
    ),
    _library(
        "vllm_flash_attn4_in_place",
        _VLLM + _FLASH4,
        "flash_attn:VllmPaged4",
        "vllm.vllm_flash_attn:flash_attn_varlen_func",
        generation=4,
        in_place=True,
        vendors=_NVIDIA,
        archs=_HOPPER | _BIG_BLACKWELL,
        packages=("vllm",),
        head_dims=frozenset(range(8, 129, 8)),
    ),
    _library(
        "flash_attn2_gather",
        _FLASH2,
        "flash_attn:Gathered2",
        "flash_attn:flash_attn_varlen_func",
        generation=2,
        vendors=_NVIDIA,
        except_archs=_BEFORE_AMPERE,
        packages=("flash-attn",),
        versions=("2.5", "3"),
    ),
    _library(
        "vllm_flash_attn2_gather",
        _VLLM + _FLASH2,
        "flash_attn:VllmGathered2",
        "vllm.vllm_flash_attn:flash_attn_varlen_func",
        generation=2,
        vendors=_NVIDIA,
        except_archs=_BEFORE_AMPERE,
        packages=("vllm",),
    ),
    _library(
        "vllm_flash_attn2_in_place",
        _VLLM + _FLASH2,
        "flash_attn:VllmPaged2",
        "vllm.vllm_flash_attn:flash_attn_varlen_func",
        generation=2,
        in_place=True,
        vendors=_NVIDIA,
        except_archs=_BEFORE_AMPERE,
        packages=("vllm",),
        head_dims=_BY_8,
        block_sizes=_BY_16,
    ),
    _library(
        "flashinfer_gather",
        ("flashinfer",),
        "flashinfer:Gathered",
        "flashinfer:BatchPrefillWithRaggedKVCacheWrapper",
        vendors=_NVIDIA,
        except_archs=tokens("Volta"),
        packages=("flashinfer-python",),
        versions=("0.6", None),
        head_dims=_FLASHINFER_DIMS | {96},
    ),
    _library(
        "flashinfer_in_place",
        ("flashinfer",),
        "flashinfer:Paged",
        "flashinfer:BatchPrefillWithPagedKVCacheWrapper",
        in_place=True,
        vendors=_NVIDIA,
        except_archs=tokens("Volta"),
        packages=("flashinfer-python",),
        versions=("0.6", None),
        head_dims=_FLASHINFER_DIMS,
    ),
    _library(
        "aiter_gather",
        ("aiter",),
        "aiter:Gathered",
        "aiter.ops.mha:flash_attn_varlen_func",
        vendors=_AMD,
        archs=_CDNA,
        packages=("amd-aiter",),
    ),
    _library(
        "aiter_in_place",
        ("aiter",),
        "aiter:Paged",
        "aiter.ops.mha:mha_batch_prefill_func",
        in_place=True,
        whole=False,
        vendors=_AMD,
        archs=_CDNA,
        packages=("amd-aiter",),
        versions=("0.1.10", None),
        head_dims=frozenset({64, 96, 128, 256}),
    ),
    _library(
        "aiter_rdna",
        ("aiter",),
        "aiter:GatheredRdna",
        "aiter.ops.triton.mha:flash_attn_varlen_func",
        vendors=_AMD,
        archs=_RDNA,
        packages=("amd-aiter",),
    ),
    _library(
        "flash_attn2_rocm",
        _FLASH2,
        "flash_attn:GatheredRocm",
        "flash_attn:flash_attn_varlen_func",
        generation=2,
        vendors=_AMD,
        archs=_ROCM_FLASH,
        packages=("flash-attn",),
        versions=("2.5", "3"),
    ),
    _library(
        "flashinfer_rocm",
        ("flashinfer",),
        "flashinfer:GatheredRocm",
        "flashinfer:BatchPrefillWithRaggedKVCacheWrapper",
        vendors=_AMD,
        archs=frozenset({"gfx942", "gfx950"}),
        packages=("amd-flashinfer",),
        head_dims=_FLASHINFER_DIMS,
    ),
    _library(
        "xpu_gather",
        ("xpu",),
        "xpu:Gathered",
        "vllm_xpu_kernels.flash_attn_interface:flash_attn_varlen_func",
        vendors=_INTEL,
        archs=_XE2 | _XE3,
        packages=("vllm-xpu-kernels",),
    ),
    _library(
        "xpu_in_place",
        ("xpu",),
        "xpu:Paged",
        "vllm_xpu_kernels.flash_attn_interface:flash_attn_varlen_func",
        in_place=True,
        vendors=_INTEL,
        archs=_XE2,
        packages=("vllm-xpu-kernels",),
        versions=("0.1.16.2", None),
        head_dims=_BY_8,
        block_sizes=_BY_16,
    ),
    _library(
        "torch_varlen",
        (),
        "torch_varlen:Gathered",
        "torch.nn.attention.varlen:varlen_attn",
        vendors=_NVIDIA | _AMD,
        except_archs=_BEFORE_AMPERE,
        packages=("torch",),
        versions=("2.10", None),
    ),
    Backend(
        name="triton",
        entry="dash_portable.backends.triton:Runner",
        symbols=_TRITON_SYMBOLS,
        capability=Capability(
            vendors=_GPUS,
            packages=TRITONS,
            versions=_TRITON,
            dtypes=_FLOATS,
            features=frozenset({"in_place", "graph", "deterministic"}),
        ),
    ),
    _library(
        "ipex",
        (),
        "ipex:Gathered",
        "intel_extension_for_pytorch.llm.modules:PagedAttention",
        vendors=_INTEL,
        packages=("intel-extension-for-pytorch",),
    ),
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

# The shared layer: who stores, selects, gathers and merges for the backend that attends.
SHARED: tuple[Backend, ...] = (
    Backend(
        name="triton",
        entry="dash_portable.triton_layer:TritonLayer",
        symbols=_TRITON_SYMBOLS,
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
