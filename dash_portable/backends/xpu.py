"""Intel GPUs through `vllm-xpu-kernels`."""

from __future__ import annotations

import importlib
from importlib import metadata

from torch import Tensor

from dash_portable.backends.imports import function, reason
from dash_portable.backends.spec import release
from dash_portable.errors import BackendError
from dash_portable.platform.facts import Platform
from dash_portable.segments import Call, Library, OneSegment, Segments

MODULE = "vllm_xpu_kernels.flash_attn_interface"
DISTRIBUTION = "vllm-xpu-kernels"
VARLEN = "flash_attn_varlen_func"
NEEDED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "return_softmax_lse")
HEADS_FIRST_SINCE = (0, 1, 12)


class Xpu(Library):
    """Where the kernel of a configuration is missing, the library would run a slow PyTorch stand-in
    that reads lengths on the host: planning makes one tiny call and refuses the configuration if
    that happened."""

    title = DISTRIBUTION
    widths = (64, 96, 128, 192, 256, 512)

    def __init__(self, call: Call) -> None:
        self.call = call
        unavailable = check_extension()
        if unavailable:
            raise BackendError(unavailable)
        self.function = function(MODULE, VARLEN, NEEDED)
        heads_first = release(metadata.version(DISTRIBUTION)) >= HEADS_FIRST_SINCE
        self.lse_layout = "HN" if heads_first else "NH"
        self.keywords = {
            "cu_seqlens_q": call.starts_q,
            "cu_seqlens_k": call.starts_k,
            "max_seqlen_q": call.queries,
            "max_seqlen_k": call.longest,
            "softmax_scale": call.scale,
            "causal": False,
            "return_softmax_lse": call.with_lse,
        }
        self._refuse_stand_in()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        got = self.function(query, key, value, **self.keywords)
        return got if self.call.with_lse else (got, None)

    def _refuse_stand_in(self) -> None:
        """One run of one query through the same configuration; the library notes each missing
        kernel once, by text."""
        module = importlib.import_module(MODULE)
        noted = getattr(module, "_warned_missing_configs", None)
        if noted is None:
            if hasattr(module, "_fallback_varlen_attn"):
                raise BackendError(f"{self.title}: its stand-in is here, and no note of its use")
            return  # versions without the stand-in raise by themselves
        before = set(noted)
        noted.clear()
        call, longest = self.call, self.call.longest
        starts_q = call.starts_q[:2]
        starts_k = starts_q.new_tensor([0, longest])
        query = starts_q.new_zeros(call.queries, call.heads, call.width, dtype=call.dtype)
        key = starts_q.new_zeros(longest, call.kv_heads, call.width, dtype=call.dtype)
        value = starts_q.new_zeros(longest, call.kv_heads, call.value_width, dtype=call.dtype)
        keywords = {**self.keywords, "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
        self.function(query, key, value, **keywords)
        missing = sorted(noted)
        noted.update(before)
        if missing:
            raise BackendError(f"{self.title}: {missing[0]}")


class Gathered(OneSegment):
    library = Xpu


class Segmented(Segments):
    library = Xpu


def check_extension() -> str:
    """Why the library's compiled part is not there, or ""; it swallows that error and keeps the
    text."""
    found = reason((MODULE, VARLEN, NEEDED))
    if found:
        return found
    module = importlib.import_module(MODULE)
    if getattr(module, "FA2_AVAILABLE", True):
        return ""
    return f"{MODULE}: {getattr(module, 'FA2_UNAVAILABLE_REASON', 'unavailable')}"


def check(platform: Platform) -> str:
    """Why the library cannot be used, or ""."""
    return check_extension()
