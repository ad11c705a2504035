"""AMD's aiter: CK and assembly kernels on CDNA, Triton kernels on RDNA.

Only its gathered calls are used. Its varlen function takes a page table and ignores it or fails on
it; its paged one, `mha_batch_prefill_func`, wants one head a page and was tested by its authors
with long sequences only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dash_portable.backends.imports import function, reason
from dash_portable.errors import BackendError
from dash_portable.platform.facts import Platform, tokens
from dash_portable.segments import Call, Library, OneSegment, Segments

VARLEN = "flash_attn_varlen_func"
LEAF = "aiter.ops.mha"  # the package on PyPI called aiter has no such module
TRITON_LEAVES = ("aiter.ops.triton.attention.mha", "aiter.ops.triton.mha")
NEEDED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "return_lse")


class Aiter(Library):
    """The CDNA call. Builds itself with hipcc at the first call of each variant: minutes."""

    title = "aiter"
    builds = True

    def __init__(self, call: Call) -> None:
        self.call = call
        self.function = function(self.module(), VARLEN, NEEDED)
        self.keywords = {
            "cu_seqlens_q": call.starts_q,
            "cu_seqlens_k": call.starts_k,
            "max_seqlen_q": call.queries,
            "max_seqlen_k": call.longest,
            "softmax_scale": call.scale,
            "causal": False,
            "return_lse": call.with_lse,
        }

    @classmethod
    def module(cls) -> str:
        return LEAF

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():  # with gradients on it asserts that no LSE is wanted
            got = self.function(query, key, value, **self.keywords)
        return (got[0], got[1]) if self.call.with_lse else (got, None)


class AiterTriton(Aiter):
    """The RDNA call; its LSE is rows by heads, whatever its docstring says."""

    title = "aiter triton"
    lse_layout = "NH"

    @classmethod
    def module(cls) -> str:
        answers = [reason((leaf, VARLEN, NEEDED)) for leaf in TRITON_LEAVES]
        for leaf, answer in zip(TRITON_LEAVES, answers, strict=True):
            if not answer:
                return leaf
        raise BackendError("; ".join(answers))


class Gathered(OneSegment):
    library = Aiter


class Segmented(Segments):
    library = Aiter


class GatheredRdna(OneSegment):
    library = AiterTriton


class SegmentedRdna(Segments):
    library = AiterTriton


def check(platform: Platform) -> str:
    """Why aiter cannot be used on this architecture, or ""."""
    if platform.arch in tokens("CDNA2", "CDNA3", "CDNA4", "CDNA5"):
        return reason((LEAF, VARLEN, NEEDED))
    try:
        return reason((AiterTriton.module(), VARLEN, NEEDED))
    except BackendError as error:
        return str(error)
