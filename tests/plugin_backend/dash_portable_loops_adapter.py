"""How `loops_attention` is called."""

from torch import Tensor

from dash_portable.backends.imports import function, reason
from dash_portable.platform.facts import Platform
from dash_portable.segments import Call, Library, OneSegment

NEEDED = ("loops_attention", "varlen_attention", ("cu_seqlens_k", "softmax_scale"))


class Loops(Library):
    title = "loops_attention"
    widths = ()  # head widths it has, ascending; (): every multiple of 8
    takes_groups = True  # several query heads for a kv head

    def __init__(self, call: Call) -> None:
        """Once a step, before a graph is captured: look up, plan."""
        self.call = call
        self.function = function(*NEEDED)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Once a layer: no checks, no host sync."""
        out = self.function(
            query,
            key,
            value,
            cu_seqlens_k=self.call.starts_k,
            softmax_scale=self.call.scale,
        )
        return out, None  # or out and its log-sum-exp


class Gathered(OneSegment):
    library = Loops


def check(platform: Platform) -> str:
    """Why it cannot be used here, or ""."""
    if platform.device_type != "cpu":
        return "loops_attention is for a CPU"
    return reason(NEEDED)
