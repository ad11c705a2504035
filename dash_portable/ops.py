"""store, select and attend as torch operators, for compiled and exported programs.

They are registered when this module is first imported, with `torch.library.Library` (the decorator
costs twenty times as much a call). A step reaches an operator as its tensors and one text for the
rest: an operator may take nothing else.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor

from dash_portable.cache import CacheShape
from dash_portable.config import DashConfig
from dash_portable.layer_form import LayerForm, layer_numbers
from dash_portable.plan import DashStep
from dash_portable.serve import serve, shared_layer
from dash_portable.shared_layer import SharedLayer
from dash_portable.step import Step, Trust

NAMESPACE = "dash_portable"

_STEP = (
    "Tensor row_seq, Tensor row_pos, Tensor slots, Tensor roles, Tensor? positions, "
    "Tensor query_start, Tensor seq_lens, Tensor block_table, Tensor? page_table, "
    "Tensor? prefix_lens, str facts"
)
_TENSORS = (
    "row_seq",
    "row_pos",
    "slots",
    "roles",
    "positions",
    "query_start",
    "seq_lens",
    "block_table",
    "page_table",
    "prefix_lens",
)
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "store(Tensor q, Tensor k, Tensor v, Tensor iq, Tensor ik, Tensor(a!) cache, "
    f"Tensor? head_cls, {_STEP}) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "select(Tensor index_query, Tensor coordinates, Tensor cache, Tensor head_cls, "
    f"float scale, float floor, {_STEP}) -> (Tensor, Tensor)"
)
_library.define(
    f"attend(Tensor query, Tensor cache, Tensor ids, Tensor bias, str backend, {_STEP}) -> Tensor"
)


@functools.lru_cache(maxsize=64)
def _facts(text: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(text)
    config = facts["config"]
    lists = {name: tuple(config[name]) for name in ("scale", "floor")}
    facts["config"] = DashConfig(**{**config, **lists})
    facts["cache_shape"] = CacheShape(**facts.pop("cache"))
    facts["trust"] = Trust(facts["trust"])
    lengths = facts["query_lens"]
    facts["query_lens"] = None if lengths is None else tuple(lengths)
    return facts


def _step(dtype: torch.dtype, tensors: tuple[Tensor | None, ...], text: str) -> Step:
    named: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
    return Step(dtype=dtype, device=named["row_seq"].device, **named, **_facts(text))


def tensors_of(step: Step) -> tuple[Tensor | None, ...]:
    return tuple(getattr(step, name) for name in _TENSORS)


def _store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    cache: Tensor,
    head_cls: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    step = _step(q.dtype, rest[:-1], rest[-1])
    LayerForm.of(step).check(q, k, v, iq, ik, head_cls, cache)
    layer = shared_layer(step)
    query, index_query = layer.store(q, k, v, iq, ik, cache, head_cls)
    return query, index_query, layer.coordinates


def _store_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    cache: Tensor,
    head_cls: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    coordinates = q.new_empty(len(q), 4, dtype=torch.int32)
    return q.new_empty(q.shape), iq.new_empty(iq.shape), coordinates


def _select(
    index_query: Tensor,
    coordinates: Tensor,
    cache: Tensor,
    head_cls: Tensor,
    scale: float,
    floor: float,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    layer: SharedLayer = shared_layer(_step(index_query.dtype, rest[:-1], rest[-1]))
    layer.coordinates.copy_(coordinates)
    ids, bias = layer.select(index_query, cache, head_cls, scale, floor)
    return ids, bias


def _select_fake(
    index_query: Tensor,
    coordinates: Tensor,
    cache: Tensor,
    head_cls: Tensor,
    scale: float,
    floor: float,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    shape = (len(index_query), _facts(rest[-1])["config"].topk)
    ids = index_query.new_empty(shape, dtype=torch.int32)
    return ids, index_query.new_empty(shape, dtype=torch.float32)


def _attend(
    query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, backend: str, *rest: Any
) -> Tensor:
    _, _, runner = serve(_step(query.dtype, rest[:-1], rest[-1]), backend)
    out = torch.empty_like(query)
    runner.run(query, cache, ids, bias, out)
    return out


def _attend_fake(
    query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, backend: str, *rest: Any
) -> Tensor:
    return torch.empty_like(query)


for _name, _implementation, _fake in (
    ("store", _store, _store_fake),
    ("select", _select, _select_fake),
    ("attend", _attend, _attend_fake),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)


def run(
    step: DashStep,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    cache: Tensor,
    head_cls: Tensor,
    layer: int,
) -> Tensor:
    """`step.run` through the operators; what a compiled program records."""
    planned, operators = step.step, torch.ops.dash_portable
    scale, floor = layer_numbers(planned.config, layer)
    rest = (*tensors_of(planned), step.facts)
    query, index_query, coordinates = operators.store(q, k, v, iq, ik, cache, head_cls, *rest)
    ids, bias = operators.select(index_query, coordinates, cache, head_cls, scale, floor, *rest)
    out: Tensor = operators.attend(query, cache, ids, bias, step.backend, *rest)
    return out
