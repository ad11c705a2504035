"""Intel GPUs through Intel Extension for PyTorch, archived at 2.8: pages, and no log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_portable.backends.imports import reason, symbol
from dash_portable.errors import BackendError
from dash_portable.platform.facts import Platform
from dash_portable.segments import Call, Library, OneSegment

MODULE = "intel_extension_for_pytorch.llm.modules"
PAGE = 32


class Ipex(Library):
    """The gathered run of a row is shown to it as pages of 32 slots. Groups are folded: its own
    tests have none."""

    title = "intel_extension_for_pytorch"
    widths = (64, 96, 128, 256)
    takes_groups = False

    def __init__(self, call: Call) -> None:
        if call.longest % PAGE:
            raise BackendError(
                f"{self.title}: found {call.longest} slots a row, needed a multiple of {PAGE}"
            )
        self.call = call
        self.function = symbol(MODULE, "PagedAttention").flash_attn_varlen_func
        pages = call.runs * (call.longest // PAGE)
        ids = torch.arange(pages, dtype=torch.int32, device=call.device)
        self.table = ids.view(call.runs, call.longest // PAGE)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        call = self.call
        out = torch.empty_like(query)
        self.function(
            out,
            query,
            key.view(-1, PAGE, *key.shape[1:]),
            value.view(-1, PAGE, *value.shape[1:]),
            call.starts_q,
            call.starts_k,
            call.queries,
            call.longest,
            call.scale,
            False,
            self.table,
            None,
        )
        return out, None


class Gathered(OneSegment):
    library = Ipex


def check(platform: Platform) -> str:
    """Why the extension cannot be used, or ""."""
    found = reason((MODULE, "PagedAttention", ()))
    if found or hasattr(symbol(MODULE, "PagedAttention"), "flash_attn_varlen_func"):
        return found
    return f"{MODULE}.PagedAttention has no flash_attn_varlen_func"
