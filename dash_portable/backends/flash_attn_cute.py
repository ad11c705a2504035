"""Warm-up of FlashAttention 4: what to compile before the first real call, as a value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dash_portable.backends.imports import function

if TYPE_CHECKING:
    import torch

MODULE = "vllm.vllm_flash_attn"
COMPILE = "compile_flash_attn_varlen_func_from_specs"


@dataclass(frozen=True)
class FlashAttentionCuTeDSLCompileSpec:
    """One compile-only request: shapes and types of a call, no tensors.

    Two specs ask for the same kernel when their `request_key()` is equal.

    >>> spec = FlashAttentionCuTeDSLCompileSpec(
    ...     (1, 2, 64), (32, 2, 64), (32, 2, 64), "bfloat16", 1, 32, 0.125, False, 4
    ... )
    >>> spec.request_key()[:2]
    ((1, 2, 64), (32, 2, 64))
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    q_dtype: torch.dtype
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    causal: bool
    fa_version: int
    v_stride: tuple[int, ...] | None = None
    cu_seqlens_q_shape: tuple[int, ...] | None = None
    cu_seqlens_k_shape: tuple[int, ...] | None = None
    window_size: tuple[int, int] | None = None
    return_softmax_lse: bool = False
    num_splits: int = 0

    def request_key(self) -> tuple[Any, ...]:
        """All fields in their order, for leaving out what was compiled already."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def compile(self) -> None:
        """Have FlashAttention 4 compile this call; raises BackendError where it is not installed,
        and what the library raises for a call that it does not serve."""
        asked = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.window_size is not None:
            asked["window_size"] = list(self.window_size)
        function(MODULE, COMPILE, asked)(**asked)
