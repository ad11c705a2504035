"""DASH block-sparse attention on NVIDIA, AMD and Intel GPUs and on a CPU.

Names are imported when they are first used: `import dash_portable` loads neither torch nor Triton
nor a vendor's library, and touches no device.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

# name -> the module that defines it
_HOMES = {
    "ArgumentError": "errors",
    "BackendError": "errors",
    "ConfigError": "errors",
    "DashAttention": "layers",
    "DashConfig": "config",
    "DashError": "errors",
    "DashStep": "plan",
    "FlashAttentionCuTeDSLCompileSpec": "backends.flash_attn_cute",
    "UnsupportedError": "errors",
    "cache_dash_prefill": "attention",
    "current_platform": "platform",
    "empty_cache": "cache",
    "explain": "explanation",
    "flash_dash_attention": "attention",
    "get_flash_attn_version": "backends.flash_versions",
    "is_flash_attn_varlen_func_available": "backends.flash_versions",
    "paged_dash_decode": "attention",
    "paged_dash_prefill": "attention",
    "prompt_positions": "pages",
    "rebuild_summaries": "attention",
}

__all__ = [
    "ArgumentError",
    "BackendError",
    "ConfigError",
    "DashAttention",
    "DashConfig",
    "DashError",
    "DashStep",
    "FlashAttentionCuTeDSLCompileSpec",
    "UnsupportedError",
    "cache_dash_prefill",
    "current_platform",
    "empty_cache",
    "explain",
    "flash_dash_attention",
    "get_flash_attn_version",
    "is_flash_attn_varlen_func_available",
    "paged_dash_decode",
    "paged_dash_prefill",
    "prompt_positions",
    "rebuild_summaries",
]

if TYPE_CHECKING:
    from dash_portable.attention import (
        cache_dash_prefill,
        flash_dash_attention,
        paged_dash_decode,
        paged_dash_prefill,
        rebuild_summaries,
    )
    from dash_portable.backends.flash_attn_cute import FlashAttentionCuTeDSLCompileSpec
    from dash_portable.backends.flash_versions import (
        get_flash_attn_version,
        is_flash_attn_varlen_func_available,
    )
    from dash_portable.cache import empty_cache
    from dash_portable.config import DashConfig
    from dash_portable.errors import (
        ArgumentError,
        BackendError,
        ConfigError,
        DashError,
        UnsupportedError,
    )
    from dash_portable.explanation import explain
    from dash_portable.layers import DashAttention
    from dash_portable.pages import prompt_positions
    from dash_portable.plan import DashStep
    from dash_portable.platform.detect import current_platform

    __version__: str


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.metadata.version("dash-portable")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    from dash_portable.errors import nearest

    near = nearest(name, __all__, likeness=0.6)
    hint = f" (nearest: {near})" if near else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
