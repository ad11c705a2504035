"""One step held to the eager layer and to attention in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dash_portable.backends.eager import gather_rows
from dash_portable.cache import BYTES_END, summary_at
from dash_portable.eager import EagerLayer
from dash_portable.plan import DashStep
from tests.gpu.served import Rows5, parts_of, same

_FLOAT32 = torch.finfo(torch.float32).eps
_CHUNK = 64


def exact_attention(
    step: DashStep, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of live `rows` in float64, and the same with the values' sizes in their place."""
    of, outs, sizes = step.step, [], []
    for part in rows.split(_CHUNK):
        keys, values, mask = gather_rows(of, cache, ids[part], bias[part], part)
        grouped = query[part].double().unflatten(1, (of.kv_heads, of.group))
        logit = torch.einsum("nhgd,nhtd->nhgt", grouped, keys.double()) / math.sqrt(of.head_dim)
        weight = (logit + mask[:, None, None]).softmax(-1)
        for into, x in ((outs, values.double()), (sizes, values.double().abs())):
            into.append(torch.einsum("nhgt,nhtd->nhgd", weight, x).flatten(1, 2))
    return torch.cat(outs), torch.cat(sizes)


def check_outputs(step: DashStep, query: Tensor, cache: Tensor, out: Tensor) -> None:
    """Rows against float64 on the selection that was made; padding is zero.

    Allowed is what the kernels round: weights or partial results once, the output once, both of the
    size of the weighted values; and float32 logits, whose error multiplies a weight.
    """
    assert step.selection is not None
    ids, bias = step.selection
    live = step.step.row_pos >= 0
    assert bool((out[~live] == 0).all())
    rows = live.nonzero().flatten()
    if not len(rows):
        return
    exact, size = exact_attention(step, query, cache, ids, bias, rows)
    longest = query[rows].double().norm(dim=-1).max() * _longest_key(step, cache)
    logit_error = _FLOAT32 * float(longest)
    allowed = (2 * torch.finfo(out.dtype).eps + 2 * logit_error + 64 * _FLOAT32) * size
    wrong = (out[rows].double() - exact).abs() > allowed
    assert not bool(wrong.any()), f"{int(wrong.any(-1).any(-1).sum())} of {len(rows)} rows"
    assert bool(out[rows].isfinite().all())


def _longest_key(step: DashStep, cache: Tensor) -> float:
    keys = cache[:, :-1, :, : step.step.head_dim]
    return float(torch.linalg.vector_norm(keys.float(), dim=-1).nan_to_num(0.0).max())


def _largest_summary(step: DashStep, cache: Tensor) -> float:
    """A summary is a mean of index keys."""
    return float(cache[:, -1, :, : step.step.head_dim].float().abs().nan_to_num(0.0).max())


def check_cache(ours: Tensor, theirs: Tensor, width: int) -> None:
    """The bytes are equal, blanks are blank; numbers differ by a rounding of float32 arithmetic."""
    assert torch.equal(ours.isnan(), theirs.isnan())
    numbers = slice(width, width + BYTES_END)
    assert same(ours[:, -1, :, numbers].contiguous(), theirs[:, -1, :, numbers].contiguous())
    behind = summary_at(width)
    for mine, other in (
        (ours[:, :-1], theirs[:, :-1]),
        (ours[:, -1, :, :width], theirs[:, -1, :, :width]),
        (ours[:, -1, :, behind:], theirs[:, -1, :, behind:]),
    ):
        mine, other = mine.float().nan_to_num(0.0), other.float().nan_to_num(0.0)
        largest = float(other.abs().max()) if other.numel() else 0.0
        allowed = (torch.finfo(ours.dtype).eps + 2**-19) * largest
        assert float((mine - other).abs().max()) <= allowed


def check_selection(step: DashStep, eager: EagerLayer, cache: Tensor, head_cls: Tensor) -> None:
    """The eager layer's blocks from the same cache; a row may differ where scores are that near."""
    layer, _ = parts_of(step)
    config = step.step.config
    assert step.selection is not None
    ids, bias = step.selection
    theirs, prior = eager.select(
        layer.index_query, cache, head_cls, config.scale[0], config.floor[0]
    )
    live = step.step.row_pos >= 0
    assert bool((ids[~live] == -1).all())
    assert bool((bias[~live] == 0).all())
    off = (ids != theirs).any(1) & live
    # Scores are float32 sums of D products; a prior near the floor turns their error into more.
    largest = float(layer.index_query[live].float().abs().max())
    near = config.scale[0] * _FLOAT32 * largest * _largest_summary(step, cache)
    apart = (bias - prior).abs()[live & ~off]
    allowed = 8 * near / math.sqrt(config.floor[0]) / config.sigma
    assert float(apart.max() if apart.numel() else 0.0) <= allowed
    # Two neighbours in order may have changed places, or the last one in and the first one out.
    assert int(off.sum()) <= max(1, int(live.sum()) // 50), f"{int(off.sum())} rows differ"
    for row in off.nonzero().flatten().tolist():
        mine, other = set(ids[row].tolist()), set(theirs[row].tolist())
        assert len(mine - other) <= 1


def check_step(step: DashStep, rows: Rows5, before: Tensor, after: Tensor, out: Tensor,
               head_cls: Tensor) -> None:  # fmt: skip
    """All of one layer: what it stored, chose and put out. `before`: the cache before it ran."""
    eager, twin = EagerLayer(step.step), before.clone()
    query, index_query = eager.store(*rows, twin, head_cls)
    check_cache(after, twin, step.step.head_dim)
    layer, _ = parts_of(step)
    live = step.step.row_pos >= 0
    if not bool(live.any()):
        check_outputs(step, layer.query, after, out)
        return
    for ours, theirs in ((layer.query, query), (layer.index_query, index_query)):
        ours, theirs = ours[live].float(), theirs[live].float()
        allowed = (torch.finfo(step.step.dtype).eps + 2**-19) * theirs.abs().max()
        assert bool(((ours - theirs).abs() <= allowed).all())
    check_selection(step, eager, after, head_cls)
    check_outputs(step, layer.query, after, out)
