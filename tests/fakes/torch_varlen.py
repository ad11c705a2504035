"""torch's varlen_attn as its versions grew: 2.10, 2.11, and 2.12 to 2.14."""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

from tests.fakes.arithmetic import attend, differences, halves, index, need, plain_runs
from tests.fakes.machine import Fake, package


class AuxRequest(NamedTuple):
    lse: bool = False


def _answer(query, key, value, cu_seq_q, cu_seq_k, max_q, scale, return_aux):
    halves(query, key, value)
    width = query.shape[-1]
    need(width <= 256 and width % 8 == 0, "head dimension at most 256, a multiple of 8")
    need(key.shape[-1] == width and value.shape[-1] == width, "head sizes must be the same")
    starts_k = index(cu_seq_k, "cu_seq_k")
    got = attend(
        query,
        plain_runs(key, value, starts_k[:-1], differences(starts_k)),
        index(cu_seq_q, "cu_seq_q"),
        scale=width**-0.5 if scale is None else scale,
    )
    out = got.out.to(query.dtype)
    if return_aux is None or not return_aux.lse:
        return out
    return out, got.lse.masked_fill(got.empty, math.inf)


def _v210() -> ModuleType:
    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None
    ):
        return _answer(query, key, value, cu_seq_q, cu_seq_k, max_q, None, return_aux)

    return package("torch.nn.attention.varlen", varlen_attn=varlen_attn, AuxRequest=AuxRequest)


def _v211() -> ModuleType:
    def varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
    ):
        need(query.shape[1] == key.shape[1], "no GQA in this version")
        return _answer(query, key, value, cu_seq_q, cu_seq_k, max_q, scale, return_aux)

    return package("torch.nn.attention.varlen", varlen_attn=varlen_attn, AuxRequest=AuxRequest)


def _v212() -> ModuleType:
    def varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
        seqused_k=None,
        block_table=None,
        num_splits=None,
    ):
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError("GQA without enable_gqa")
        got = _answer(query, key, value, cu_seq_q, cu_seq_k, max_q, scale, return_aux)
        if num_splits != 1 and isinstance(got, tuple):  # left to itself it has given NaN
            return got[0] * math.nan, got[1]
        return got

    return package("torch.nn.attention.varlen", varlen_attn=varlen_attn, AuxRequest=AuxRequest)


def _fake(version: str, make) -> Fake:
    return Fake(
        name=f"torch_varlen-{version}",
        distributions=(),
        modules=lambda: {"torch.nn.attention.varlen": make()},
        arch="sm90",
    )


V210, V211, V212 = _fake("2.10", _v210), _fake("2.11", _v211), _fake("2.12", _v212)
