"""A library of attention written as loops, and its adapter: one gathered segment a row."""

import torch
from torch import Tensor

from dash_portable.platform.facts import Platform
from dash_portable.segments import Call, Library, OneSegment


class Loops(Library):
    """Takes q, k, v and where each run begins; gives out, no LSE."""

    title = "loops"

    def __init__(self, call: Call) -> None:
        self.call = call

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        starts, group = self.call.starts_k.tolist(), self.call.heads // self.call.kv_heads
        out = torch.empty(*query.shape[:2], value.shape[-1], dtype=query.dtype)
        for run in range(self.call.runs):
            keys = key[starts[run] : starts[run + 1]].float()
            values = value[starts[run] : starts[run + 1]].float()
            for head in range(self.call.heads):
                logit = keys[:, head // group] @ query[run, head].float() * self.call.scale
                out[run, head] = (logit.softmax(0) @ values[:, head // group]).to(out.dtype)
        return out, None


class Gathered(OneSegment):
    library = Loops


def check(platform: Platform) -> str:
    """Why it cannot be used, or ""."""
    return "" if platform.device_type == "cpu" else "loops are for a CPU"
