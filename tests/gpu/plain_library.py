"""An attention library in plain torch, so that gather, page table and merge run on any machine."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from dash_portable.segments import Addressing, Call, InPlace, Library, OneSegment, Segments


class Plain(Library):
    """Every run's keys as the call tells them, in float32; what is not a run's is never used."""

    title = "plain torch"
    ways: ClassVar[dict[str, type]] = {}

    def __init__(self, call: Call) -> None:
        self.call = call

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        call = self.call
        at = torch.arange(call.longest, device=query.device)
        if call.table is not None:
            key, value = key.flatten(0, 1), value.flatten(0, 1)
            pages = call.table.long()[:, at.div(call.page, rounding_mode="floor")]
            place = pages * call.page + at % call.page
        else:
            place = call.starts_k[:-1, None].long() + at
        count = (call.starts_k[1:] - call.starts_k[:-1]) if call.length is None else call.length
        seen = at < count[:, None]
        if call.window is not None:
            seen &= at >= count[:, None] - 1 - call.window
        place = torch.where(seen, place, 0)
        group = call.heads // call.kv_heads
        keys, values = (
            torch.where(seen[..., None, None], x[place].float(), 0.0).repeat_interleave(group, 2)
            for x in (key, value)
        )
        rows = query.float().unflatten(0, (call.runs, call.queries))
        logit = torch.einsum("bqhd,bthd->bqht", rows, keys) * call.scale
        logit = logit.masked_fill(~seen[:, None, None], -torch.inf)
        lse = logit.logsumexp(-1)
        weight = (logit - lse[..., None]).exp().nan_to_num(0.0)
        out = torch.einsum("bqht,bthd->bqhd", weight, values).flatten(0, 1).to(query.dtype)
        return out, lse.flatten(0, 1).T.contiguous() if call.with_lse else None


class Fixed(Plain):
    addressing = Addressing.FIXED


class Paged(Plain):
    addressing = Addressing.PAGED


class OneRun(OneSegment):
    library = Plain


class Runs(Segments):
    library = Fixed


class PagedRuns(Segments):
    library = Paged


class Pages(InPlace):
    library = Paged


WAYS = (OneRun, Runs, PagedRuns, Pages)
