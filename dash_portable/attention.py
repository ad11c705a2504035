"""The established calls, under their names, argument order and defaults; all thin over a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dash_portable import dispatch
from dash_portable.backends import sdpa
from dash_portable.cache import CacheShape
from dash_portable.checks import (
    FLOAT,
    INDEX,
    check_backend,
    check_blocks,
    check_integer,
    check_rows,
    check_tensor,
    host_lengths,
    is_tensor,
    on_host,
)
from dash_portable.config import DashConfig
from dash_portable.describe import describe, trust_of
from dash_portable.errors import found_needed
from dash_portable.layer_form import LayerForm, layer_numbers
from dash_portable.pages import check_roles, prompt_positions
from dash_portable.plan import DashStep
from dash_portable.request import Request
from dash_portable.segments.given import attend_given
from dash_portable.serve import dtype_name, shared_layer
from dash_portable.step import Step

__all__ = [
    "cache_dash_prefill",
    "flash_dash_attention",
    "paged_dash_decode",
    "paged_dash_prefill",
    "rebuild_summaries",
]

_CONFIGS: dict[object, DashConfig] = {}
_CONFIGS_KEPT = 64


def config_of(sp: Mapping[str, Any] | DashConfig) -> DashConfig:
    """The configuration behind `sp`; the same values are read and checked once."""
    if isinstance(sp, DashConfig):
        return sp
    if not isinstance(sp, Mapping):
        raise found_needed("sp", type(sp).__name__, "a mapping (sparse_attention_config)")
    # With the types: True and 1.0 equal 1, but are not all right where it is.
    key = tuple(
        (k, tuple(v), tuple(map(type, v))) if isinstance(v, list) else (k, v, type(v))
        for k, v in sp.items()
    )
    try:
        known = _CONFIGS.get(key)
    except TypeError:  # a value that no key can hold: let the reader say which
        return DashConfig.from_model(sp)
    if known is None:
        if len(_CONFIGS) >= _CONFIGS_KEPT:
            _CONFIGS.clear()
        known = _CONFIGS[key] = DashConfig.from_model(sp)
    return known


def cache_dash_prefill(
    k: Tensor,
    v: Tensor,
    ik: Tensor,
    roles: Tensor,
    slots: Tensor,
    cache: Tensor,
    sp: Mapping[str, Any] | DashConfig,
    head_cls: Tensor | None = None,
) -> None:
    """Store one whole prompt of T tokens: rotated keys, values, coordinates, and summaries.

    k, v   [T, H, D]    ik   [T, D]    unrotated, in the cache's type
    roles  [T]          0 text, 1 image, 2 page marker
    slots  [T]          cache block * block_size + offset of each token
    head_cls  [D]       the layer's summary query; None: blocks get no summary, so that
                        `rebuild_summaries` must run before summaries are trusted

    The cache is written; nothing is returned. Reads the roles on the host. Raises ArgumentError for
    wrong shapes, types, devices or values, and for more than 65,535 pages.
    """
    config = config_of(sp)
    shape = CacheShape.of(cache, config)
    positions = prompt_positions(check_roles(roles)).to(cache.device)
    tokens = len(roles)
    check_tensor("slots", slots, ("T",), dtypes=INDEX, device=cache.device, sizes={"T": tokens})
    total = shape.num_blocks * shape.block_size
    if on_host(slots) and not bool(((slots >= 0) & (slots < total)).all()):
        bad = slots[(slots < 0) | (slots >= total)][0]
        raise found_needed("slots", int(bad), f"0 to {total - 1} (a prompt has no padding)")
    step = describe(
        [tokens],
        [tokens],
        (slots[:: shape.block_size] // shape.block_size)[None],
        slots,
        roles.to(cache.device),
        positions,
        config=config,
        cache=cache,
    )
    check_rows(
        {"k": (k, ("T", "H", "D")), "v": (v, ("T", "H", "D")), "ik": (ik, ("T", "D"))},
        dtype=cache.dtype,
        device=cache.device,
        sizes={"T": tokens, "H": shape.kv_heads, "D": shape.head_dim},
    )
    # The shared layer rotates queries too; here the keys stand in for them and the result is
    # dropped.
    LayerForm.of(step).check(k, k, v, ik, ik, head_cls, cache)
    shared_layer(step).store(k, k, v, ik, ik, cache, head_cls)


def paged_dash_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    roles: Tensor,
    positions: Tensor,
    cache: Tensor,
    block_table: Tensor,
    length: int,
    slots: Tensor,
    head_cls: Tensor,
    sp: Mapping[str, Any] | DashConfig,
    layer_idx: int,
    backend: str,
    prefix_lens: Tensor | None = None,
) -> Tensor:
    """A chunk of one prompt: n rows, the last n of its `length` tokens so far; gives `[n, Hq, D]`.

    q [n, Hq, D], k and v [n, H, D], iq and ik [n, D], head_cls [D]: unrotated, in the cache's type
    roles [n]    positions [4, n]    slots [n]    block_table [1, max]

    The result does not depend on how the prompt is cut. Coordinates come from `positions`; a row
    whose row 3 is at least 0 is a decoded token computed again: it writes no counts and has no
    image page. `prefix_lens` as in `paged_dash_decode`, of length 1.
    Raises ArgumentError, UnsupportedError and BackendError as `DashStep.plan`.
    """
    config = config_of(sp)
    CacheShape.of(cache, config)
    device = cache.device
    check_integer("length", length, 0)
    rows, heads = _query_sizes(q)
    sizes = {"n": rows}
    check_tensor("slots", slots, ("n",), dtypes=INDEX, device=device, sizes=sizes)
    if on_host(slots) and rows and int(slots.min()) < 0:
        raise found_needed("slots", int(slots.min()), "at least 0 (a prompt has no padding)")
    # Without them every row would continue from the cache, as a decoded token.
    check_tensor("positions", positions, (4, "n"), dtypes=INDEX, device=device, sizes=sizes)
    step = describe(
        [rows],
        [length],
        block_table,
        slots,
        roles,
        positions,
        config=config,
        cache=cache,
        num_heads=heads,
        trust=trust_of(True, prefix_lens),
        prefix_lens=prefix_lens,
        recomputed=True,
    )
    return DashStep.of(step, backend).run(q, k, v, iq, ik, cache, head_cls, layer_idx)


def paged_dash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    roles: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    head_cls: Tensor,
    sp: Mapping[str, Any] | DashConfig,
    layer_idx: int,
    max_model_len: int,
    prefix_lens: Tensor | None = None,
    backend: str = "AUTO",
    cached_summaries: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """One new token of each of N requests; gives `[N, Hq, D]`, zeros for padding (`slots` below 0).

    q [N, Hq, D], k and v [N, H, D], iq and ik [N, D], head_cls [D]: unrotated, in the cache's type
    roles, seq_lens, slots [N]    block_table [N, max]    seq_lens count the new token

    Coordinates continue from the previous token's state in the cache, or come from `positions [4,
    N]` where its row 3 is negative. `cached_summaries=False` trusts no summary, page range or page
    start in the
    cache (another owner's cache, or `rebuild_summaries` did not run). With it, `prefix_lens [N]`
    limits
    the trust to blocks that end at or before it; None trusts all. Neither changes the result.
    Nothing is copied to the host: capturable in a CUDA or HIP graph.
    Raises ArgumentError, UnsupportedError and BackendError as `DashStep.plan`.
    """
    config = config_of(sp)
    layer_numbers(config, layer_idx)
    CacheShape.of(cache, config)
    device = cache.device
    rows, heads = _query_sizes(q)
    for name, value in (("slots", slots), ("seq_lens", seq_lens)):
        check_tensor(name, value, ("N",), dtypes=INDEX, device=device, sizes={"N": rows})
    step = describe(
        [1] * rows if on_host(slots) else seq_lens,
        seq_lens,
        block_table,
        slots,
        roles,
        positions,
        config=config,
        cache=cache,
        max_model_len=max_model_len,
        num_heads=heads,
        max_query_len=1,
        trust=trust_of(cached_summaries, prefix_lens),
        prefix_lens=prefix_lens,
    )
    return DashStep.of(step, backend).run(q, k, v, iq, ik, cache, head_cls, layer_idx)


def _query_sizes(q: object) -> tuple[int, int]:
    """Rows and heads of `q [N, Hq, D]`, which say how many rows a call has."""
    if not is_tensor(q) or q.dim() != 3:
        found = list(q.shape) if is_tensor(q) else type(q).__name__
        raise found_needed("q", found, "a tensor [N, Hq, D]")
    return q.shape[0], q.shape[1]


def flash_dash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    used: Tensor,
    bias: Tensor,
    backend: str,
    bs: int,
    local: int,
) -> Tensor:
    """Attention over gathered segments; gives `[N, Hq, D]`, zeros for a row without any key.

    q     [N, Hq, D]                        rotated queries
    k, v  [N * (topk * bs + local), H, D]   each row's topk blocks, then its local window
    used  [N * (topk + 1)]                  keys that count in each segment
    bias  [N, topk]                         added to the scaled logits of each block

    Libraries take float16 and bfloat16, EAGER and SDPA float32 too. What lies beyond a segment's
    keys is never looked at. Raises ArgumentError for wrong shapes and unknown backends,
    UnsupportedError where the backend (FLASH_ATTN without a usable version, say) cannot serve.
    """
    rows, heads = _query_sizes(q)
    check_tensor("q", q, (None, None, None), dtypes=FLOAT, device=q.device)
    check_backend(backend)
    width = q.shape[2]
    check_tensor("bias", bias, (rows, None), dtypes=(torch.float32, q.dtype), device=q.device)
    kept = bias.shape[1]
    for name, size in (("bs", bs), ("local", local)):
        if check_integer(name, size) < 8 or size % 8:
            raise found_needed(name, size, f"a multiple of 8, such as {max(8, size // 8 * 8)}")
    slots = rows * (kept * bs + local)
    kv_heads = k.shape[1] if is_tensor(k) and k.dim() == 3 else None
    for name, value in (("k", k), ("v", v)):
        check_tensor(name, value, (slots, kv_heads, width), dtypes=(q.dtype,), device=q.device)
    check_tensor("used", used, (rows * (kept + 1),), dtypes=INDEX, device=q.device)
    if not k.shape[1] or not heads or heads % k.shape[1]:
        raise found_needed("q", f"{heads} heads", f"a multiple of k's {k.shape[1]}")
    request = Request(
        phase="decode",
        dtype=dtype_name(q.dtype),
        cache_dtype=dtype_name(q.dtype),
        head_dim=width,
        group_size=heads // k.shape[1],
        block=bs,
        block_size=bs,
    )
    runner = dispatch.choice_for(request, q.device, backend=backend).required().load()
    library = getattr(runner, "library", None)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if not rows:
        return torch.empty_like(q)
    if library is not None:
        return attend_given(library, q, k, v, used, bias.float(), block=bs, local=local)
    # Eager, sdpa and Triton have no library that wants segments: torch attends them.
    return sdpa.attend_given(q, k, v, used, bias.float(), block=bs, local=local)


def rebuild_summaries(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    head_cls: Tensor,
    sp: Mapping[str, Any] | DashConfig,
) -> None:
    """Fill the free place of sequences that another owner stored: summaries, page ranges, page
    starts.

    block_table [R, max]    seq_lens [R]    head_cls [D]

    Only keys, roles, states and counts are read. Afterwards `cached_summaries=True` is right for
    these sequences. The cache is written; nothing is returned.
    """
    config = config_of(sp)
    CacheShape.of(cache, config)
    device = cache.device
    lengths = host_lengths("seq_lens", seq_lens, device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    step = describe(
        [0] * len(seq_lens), seq_lens, block_table, none, none, None, config=config, cache=cache
    )
    if lengths is not None and on_host(block_table):
        _check_sequences(lengths, block_table, step)
    sizes = {"D": step.head_dim}
    check_tensor("head_cls", head_cls, ("D",), dtypes=FLOAT, device=device, sizes=sizes)
    shared_layer(step).rebuild(cache, head_cls)


def _check_sequences(seq_lens: list[int], block_table: Tensor, step: Step) -> None:
    """Lengths and block ids of sequences without new rows."""
    held = block_table.shape[1] * step.block_size
    for seq, length in enumerate(seq_lens):
        if not 0 <= length <= held:
            needed = f"0 to {held} (what block_table holds)"
            raise found_needed(f"seq_lens[{seq}]", length, needed)
    seqs = torch.arange(len(seq_lens), device=block_table.device)
    check_blocks(block_table, step.seq_lens, seqs, step.cache_shape.num_blocks, step.block_size)
