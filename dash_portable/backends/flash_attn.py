"""The FlashAttention family: generations 2, 3 and 4 as their authors ship them, and vLLM's copy of
all three.

Every query is a run of its own and the call is not causal. Only q, k, v go by position: the order
of what follows differs between these packages.
"""

from __future__ import annotations

import sys
from typing import ClassVar

from torch import Tensor

from dash_portable.backends.imports import function, parameters, reason
from dash_portable.errors import BackendError
from dash_portable.platform.facts import Platform, Vendor
from dash_portable.segments import Addressing, Call, InPlace, Library, OneSegment, Segments

VARLEN = "flash_attn_varlen_func"
FLASH3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
COPY = "vllm.vllm_flash_attn"
TRITON_SWITCH = "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE"


class Flash2(Library):
    """`flash-attn` 2 on CUDA, and both engines behind the same call on ROCm."""

    title = "flash_attn 2"

    def __init__(self, call: Call) -> None:
        self.call = call
        self.function = function("flash_attn", VARLEN, ("return_attn_probs",))
        self.keywords = {
            "cu_seqlens_q": call.starts_q,
            "cu_seqlens_k": call.starts_k,
            "max_seqlen_q": call.queries,
            "max_seqlen_k": call.longest,
            "softmax_scale": call.scale,
            "causal": False,
            "return_attn_probs": call.with_lse,
        }

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        got = self.function(query, key, value, **self.keywords)
        return (got[0], got[1]) if self.call.with_lse else (got, None)


def narrow_values(width: int, head_dim: int) -> int:
    """Value width of generation 3: it has kernels with narrower values for few pairs of widths."""
    return head_dim if 128 < width <= 192 and 96 < head_dim <= 128 else width


class Flash3(Library):
    """FlashAttention 3 built from `hopper/`. Its varlen call has lost and regained the LSE from
    version to version, so segments that need it go through `flash_attn_with_kvcache`, which always
    had it."""

    title = "flash_attn 3"
    addressing = Addressing.PAGED

    @classmethod
    def value_width_for(cls, width: int, head_dim: int) -> int:
        return narrow_values(width, head_dim)

    def __init__(self, call: Call) -> None:
        self.call = call
        shared = {
            "cu_seqlens_q": call.starts_q,
            "max_seqlen_q": call.queries,
            "softmax_scale": call.scale,
            "causal": False,
            "num_splits": 1 if call.deterministic else 0,
        }
        self.keywords: dict[str, object]
        if call.table is None:
            self.function = function(flash3_module(), VARLEN)
            takes = parameters(self.function)
            self.keywords = {
                **shared,
                "cu_seqlens_k": call.starts_k,
                "max_seqlen_k": call.longest,
                # 2.7.4 has these without a default.
                **{name: None for name in ("seqused_q", "seqused_k") if name in takes},
            }
        else:
            self.function = function(flash3_module(), "flash_attn_with_kvcache", ("page_table",))
            self.keywords = {
                **shared,
                "cache_seqlens": call.length,
                "page_table": call.table,
                "window_size": (-1, -1) if call.window is None else (call.window, 0),
                "return_softmax_lse": True,
            }

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        got = self.function(query, key, value, **self.keywords)
        if self.call.table is None:
            return (got[0] if isinstance(got, tuple) else got), None
        return got[0], got[1]


class Flash4(Library):
    """`flash-attn-4`, written in CuTe; compiled by itself at the first call of each
    configuration."""

    title = "flash_attn 4"
    addressing = Addressing.FIXED
    builds = True

    def __init__(self, call: Call) -> None:
        self.call = call
        self.function = function("flash_attn.cute", VARLEN, ("return_lse", "seqused_k"))
        self.keywords = {
            "cu_seqlens_q": call.starts_q,
            "cu_seqlens_k": call.starts_k,
            "seqused_k": call.length,
            "max_seqlen_q": call.queries,
            "max_seqlen_k": call.longest,
            "softmax_scale": call.scale,
            "causal": False,
            "window_size": (None, None),
            "return_lse": call.with_lse,
        }

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        out, lse = self.function(query, key, value, **self.keywords)
        return out, lse


class Copy(Library):
    """vLLM's copy; the generation is an argument of the call and 2 unless it is given."""

    generation: ClassVar[int]

    def __init__(self, call: Call) -> None:
        self.call = call
        self.function = function(COPY, VARLEN, ("fa_version", "return_softmax_lse"))
        unsupported = function(COPY, "fa_version_unsupported_reason")(self.generation)
        if unsupported:
            raise BackendError(f"{self.title}: {unsupported}")
        self.keywords = {
            "cu_seqlens_q": call.starts_q,
            "max_seqlen_q": call.queries,
            "max_seqlen_k": call.longest,
            "softmax_scale": call.scale,
            "causal": False,
            "return_softmax_lse": call.with_lse,
            "fa_version": self.generation,
        }
        if self.generation != 2 and call.deterministic:
            self.keywords["num_splits"] = 1
        if call.table is None:
            self.keywords["cu_seqlens_k"] = call.starts_k
            if call.length is not None:
                self.keywords["seqused_k"] = call.length
        else:
            self.keywords["seqused_k"] = call.length
            self.keywords["block_table"] = call.table
        if call.window is not None:
            self.keywords["window_size"] = [call.window, 0]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        got = self.function(query, key, value, **self.keywords)
        return got if self.call.with_lse else (got, None)


class Copy2(Copy):
    title = "vllm flash_attn 2"
    generation = 2
    addressing = Addressing.PAGED


class Copy3(Copy):
    title = "vllm flash_attn 3"
    generation = 3
    addressing = Addressing.PAGED

    @classmethod
    def value_width_for(cls, width: int, head_dim: int) -> int:
        return narrow_values(width, head_dim)

    def attend_into(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        if self.call.value_width == out.shape[-1]:
            self.function(query, key, value, out=out, **self.keywords)
        else:
            super().attend_into(query, key, value, out)


class Copy4(Copy):
    title = "vllm flash_attn 4"
    generation = 4
    addressing = Addressing.FIXED
    builds = True


def flash3_module() -> str:
    """The module under which generation 3 can be imported here; BackendError with both answers when
    there is none."""
    answers = [reason((module, VARLEN, ())) for module in FLASH3_MODULES]
    for module, answer in zip(FLASH3_MODULES, answers, strict=True):
        if not answer:
            return module
    raise BackendError("; ".join(answers))


def flash2_check(platform: Platform) -> str:
    """Why generation 2 cannot be used, or "".

    On AMD it has two engines, and a variable picks the second; set on another vendor's machine, it
    has given wrong numbers there.
    """
    found = reason(("flash_attn", VARLEN, ("return_attn_probs",)))
    if found and platform.vendor is Vendor.AMD:
        return f"{found} (built without CK, it needs {TRITON_SWITCH} when Python starts)"
    interface = sys.modules.get("flash_attn.flash_attn_interface")
    if platform.vendor is not Vendor.AMD and getattr(interface, "USE_TRITON_ROCM", False):
        return f"flash_attn was imported with {TRITON_SWITCH}, its engine for AMD: unset it"
    return found


def flash3_check(platform: Platform) -> str:
    """Why generation 3 cannot be used, or ""."""
    try:
        return reason(
            (flash3_module(), "flash_attn_with_kvcache", ("page_table", "return_softmax_lse"))
        )
    except BackendError as error:
        return str(error)


def flash4_check(platform: Platform) -> str:
    """Why generation 4 cannot be used, or ""."""
    return reason(("flash_attn.cute", VARLEN, ("return_lse", "seqused_k")))


def _copy_check(platform: Platform, generation: int) -> str:
    if platform.vendor is not Vendor.NVIDIA:
        return f"{COPY} is built for CUDA only"
    found = reason(
        (COPY, VARLEN, ("fa_version", "return_softmax_lse")),
        (COPY, "fa_version_unsupported_reason", ()),
    )
    return found or function(COPY, "fa_version_unsupported_reason")(generation) or ""


def copy2_check(platform: Platform) -> str:
    """Why generation 2 of vLLM's copy cannot be used, or ""."""
    return _copy_check(platform, 2)


def copy3_check(platform: Platform) -> str:
    """Why generation 3 of vLLM's copy cannot be used, or ""."""
    return _copy_check(platform, 3)


def copy4_check(platform: Platform) -> str:
    """Why generation 4 of vLLM's copy cannot be used, or ""."""
    return _copy_check(platform, 4)


class Gathered2(OneSegment):
    library = Flash2


class Segmented2(Segments):
    library = Flash2


class Gathered3(OneSegment):
    library = Flash3


class Segmented3(Segments):
    library = Flash3


class Paged3(InPlace):
    library = Flash3


class Gathered4(OneSegment):
    library = Flash4


class Segmented4(Segments):
    library = Flash4


class VllmGathered2(OneSegment):
    library = Copy2


class VllmSegmented2(Segments):
    library = Copy2


class VllmPaged2(InPlace):
    library = Copy2


class VllmGathered3(OneSegment):
    library = Copy3


class VllmSegmented3(Segments):
    library = Copy3


class VllmPaged3(InPlace):
    library = Copy3


class VllmGathered4(OneSegment):
    library = Copy4


class VllmSegmented4(Segments):
    library = Copy4
