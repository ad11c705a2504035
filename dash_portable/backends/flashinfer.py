"""flashinfer: planned wrappers, base-2 LSE laid out rows by heads unless the version can be asked
for another.

A plan depends on shapes alone: both ways use runs of fixed length, so the plan survives every step
of the same size, and what changes is written into buffers that the wrapper reads when it runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_portable.backends.imports import function, parameters, reason
from dash_portable.platform.detect import is_capturing
from dash_portable.platform.facts import Platform
from dash_portable.segments import Call, Library, OneSegment, cache_pages
from dash_portable.segments.call import counted, planned
from dash_portable.segments.merge import normalise_lse
from dash_portable.segments.places import token_places
from dash_portable.segments.rows import slot_tokens
from dash_portable.segments.ways import Way

RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"
PAGED = "BatchPrefillWithPagedKVCacheWrapper"
WORKSPACE_BYTES = 128 << 20
MOST_RUNS = 1 << 14  # its wrappers keep the lengths of 32,768 runs, and plan in 8 MB
PLANS = 8  # kept, the least recently used goes first
_PINNED: list[object] = []  # wrappers inside captured graphs, which nobody else refers to


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a plan depends on: `runs` runs of one query each; `lengths` are the keys of the runs of
    one row, in order."""

    runs: int
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    width: int
    value_width: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    deterministic: bool

    def starts(self) -> Tensor:
        """Starts of the runs' keys on the host, int32 [runs + 1]."""
        rows = self.runs // len(self.lengths)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device="cpu").repeat(rows)
        return torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(torch.int32)


class Ragged(Library):
    """Gathered runs. Its kernels exist for few head widths, so the bias columns cost the next one
    up."""

    title = "flashinfer"
    widths = (64, 128, 256)

    def __init__(self, call: Call) -> None:
        shape = Shape(
            runs=call.runs,
            lengths=(call.longest,),
            heads=call.heads,
            kv_heads=call.kv_heads,
            width=call.width,
            value_width=call.value_width,
            scale=call.scale,
            dtype=call.dtype,
            device=call.device,
            deterministic=call.deterministic,
        )
        self.wrapper = _kept(_plan_ragged, shape, call.graph)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.wrapper.run(query, key, value), None


class Gathered(OneSegment):
    library = Ragged


class Paged(Way):
    """S + 1 runs a row, read in place as pages of one token; a bit mask cuts what a run does not
    hold.

    Unused slots name the row's own token: masked, and surely finite, which an arbitrary place of
    the cache is not.
    """

    library = Ragged

    def _row_bytes(self) -> int:
        return (self.kept + 1) * self.step.heads * self.step.head_dim * self.step.dtype.itemsize * 2

    def _most_rows(self) -> int:
        return MOST_RUNS // (self.kept + 1)

    def _plan(self, rows: int) -> None:
        step = self.step
        shape = Shape(
            runs=rows * (self.kept + 1),
            lengths=(*[self.block] * self.kept, self.local),
            heads=step.heads,
            kv_heads=step.kv_heads,
            width=step.head_dim,
            value_width=step.head_dim,
            scale=self.scale,
            dtype=step.dtype,
            device=step.device,
            deterministic=step.deterministic,
        )
        self.planned: Planned = planned(
            self.library.title, lambda: _kept(_plan_paged, shape, step.graph)
        )
        self.query = torch.zeros(
            shape.runs, step.heads, step.head_dim, dtype=step.dtype, device=step.device
        )

    def _attend(
        self, part: slice, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor
    ) -> None:
        step, paged = self.step, self.planned
        pages = cache_pages(cache, size=1)
        where = self._spans(part, ids)
        token, used = slot_tokens(where, block=self.block, local=self.local)
        own = step.row_pos[part].clamp(min=0).long()[:, None]
        live = (where.length > 0).any(dim=1)[:, None]
        token = torch.where(used, token, own)
        block, place = token_places(
            token,
            live.expand_as(token),
            step.row_seq[part],
            step.block_table,
            block_size=step.block_size,
        )
        paged.indices.copy_((block * pages.per_block + place).flatten())
        bits = used.view(-1, 8).to(torch.uint8) << torch.arange(
            8, dtype=torch.uint8, device=used.device
        )
        paged.mask.copy_(bits.sum(dim=1, dtype=torch.uint8))
        wide = self.query
        wide.view(len(out), self.kept + 1, *query.shape[1:]).copy_(query[:, None])
        got, lse = paged.wrapper.run(wide, (pages.key, pages.value), **paged.keywords)
        self._merge(out, got, normalise_lse(lse, **paged.meaning), where.length, bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A planned paged wrapper and the buffers through which it is steered.

    indices  int32 [runs' slots]      mask  uint8 [slots / 8], little endian bits
    meaning  layout and base of the LSE that `keywords` ask for
    """

    wrapper: Any
    indices: Tensor
    mask: Tensor
    keywords: dict[str, Any]
    meaning: dict[str, Any]


def _kept(plan: Any, shape: Shape, graph: bool) -> Any:
    """A plan from the small cache; one that a graph will hold is made for it alone and never
    dropped. A call that is captured without having been announced pins the plan that it meets."""
    made = plan.__wrapped__(shape) if graph else plan(shape)
    if graph or (is_capturing() and not any(made is one for one in _PINNED)):
        _PINNED.append(made)
    return made


@functools.lru_cache
def _workspace(device: torch.device) -> Tensor:
    """Scratch that all wrappers of a device share: they run one after another on its stream."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=PLANS)
def _plan_ragged(shape: Shape) -> Any:
    wrapper = function("flashinfer", RAGGED)(
        _workspace(shape.device),
        kv_layout="NHD",
        use_cuda_graph=True,
        qo_indptr_buf=counted(shape.runs, 1, shape.device),
        kv_indptr_buf=shape.starts().to(shape.device),
        backend="fa2",
    )
    wrapper.plan(
        qo_indptr=counted(shape.runs, 1, torch.device("cpu")),
        kv_indptr=shape.starts(),
        **_model(shape),
    )
    return wrapper


@functools.lru_cache(maxsize=PLANS)
def _plan_paged(shape: Shape) -> Planned:
    starts, device = shape.starts(), shape.device
    slots = int(starts[-1])
    indices = torch.zeros(slots, dtype=torch.int32, device=device)
    mask = torch.zeros(slots // 8, dtype=torch.uint8, device=device)
    last = torch.ones(shape.runs, dtype=torch.int32, device="cpu")
    wrapper = function("flashinfer", PAGED)(
        _workspace(device),
        kv_layout="NHD",
        use_cuda_graph=True,
        qo_indptr_buf=counted(shape.runs, 1, device),
        paged_kv_indptr_buf=starts.to(device),
        paged_kv_indices_buf=indices,
        paged_kv_last_page_len_buf=last.to(device),
        custom_mask_buf=mask,
        mask_indptr_buf=torch.zeros(shape.runs + 1, dtype=torch.int32, device=device),
        backend="fa2",
    )
    # The mask goes in unpacked: a packed one would leave its starts counted in bits where the
    # kernel adds bytes.
    wrapper.plan(
        qo_indptr=counted(shape.runs, 1, device),
        paged_kv_indptr=starts.to(device),
        paged_kv_indices=indices,
        paged_kv_last_page_len=last.to(device),
        page_size=1,
        custom_mask=torch.ones(slots, dtype=torch.bool, device=device),
        **_model(shape),
    )
    newer = "lse_base" in parameters(wrapper.run)
    return Planned(
        wrapper=wrapper,
        indices=indices,
        mask=mask,
        keywords={"return_lse": True} | ({"lse_base": "ln", "lse_layout": "HN"} if newer else {}),
        meaning={"layout": "HN", "base": "e"} if newer else {"layout": "NH", "base": "2"},
    )


def _model(shape: Shape) -> dict[str, Any]:
    return {
        "num_qo_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim_qk": shape.width,
        "head_dim_vo": shape.value_width,
        "causal": False,
        "sm_scale": shape.scale,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
        "disable_split_kv": shape.deterministic,
    }


def check(platform: Platform) -> str:
    """Why flashinfer cannot be used, or "". AMD's port of the same import name is refused: which
    base its LSE has where it goes through aiter has not been seen."""
    if platform.version("amd-flashinfer") is not None:
        return "amd-flashinfer: the base of its log-sum-exp is not known"
    return reason(("flashinfer", RAGGED, ()), ("flashinfer", PAGED, ()))
