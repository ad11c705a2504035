"""torch's own `varlen_attn`: no installation, FlashAttention 2 inside, arguments that came one
version at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dash_portable.backends.imports import function, parameters, reason, symbol
from dash_portable.platform.facts import Platform
from dash_portable.segments import Addressing, Call, Library, OneSegment, Segments

MODULE = "torch.nn.attention.varlen"
NEEDED = ("cu_seq_q", "cu_seq_k", "max_q", "max_k", "return_aux", "scale")


class Varlen(Library):
    """Groups are folded into rows, since only later versions take them; `num_splits` stays 1 where
    it exists: left to itself it has given NaN."""

    title = "torch varlen_attn"
    takes_groups = False
    addressing = Addressing.CLOSED

    def __init__(self, call: Call) -> None:
        self.call = call
        self.function = function(MODULE, "varlen_attn", NEEDED)
        self.keywords: dict[str, Any] = {
            "cu_seq_q": call.starts_q,
            "cu_seq_k": call.starts_k,
            "max_q": call.queries,
            "max_k": call.longest,
            "scale": call.scale,
        }
        if call.with_lse:
            self.keywords["return_aux"] = symbol(MODULE, "AuxRequest")(lse=True)
        if "num_splits" in parameters(self.function):
            self.keywords["num_splits"] = 1

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        got = self.function(query, key, value, **self.keywords)
        return got if self.call.with_lse else (got, None)


class Gathered(OneSegment):
    library = Varlen


class Segmented(Segments):
    library = Varlen


def check(platform: Platform) -> str:
    """Why `varlen_attn` cannot be used, or ""; 2.10 has it without a scale."""
    return reason((MODULE, "varlen_attn", NEEDED), (MODULE, "AuxRequest", ()))
