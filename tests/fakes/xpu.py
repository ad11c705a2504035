"""vllm-xpu-kernels before and after its LSE changed sides, and IPEX."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from tests.fakes.arithmetic import (
    attend,
    differences,
    halves,
    index,
    need,
    paged_runs,
    plain_runs,
)
from tests.fakes.machine import Fake, package


def _interface(heads_first: bool, compiled: tuple[int, ...]) -> ModuleType:
    noted: set[str] = set()

    def flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        q_v=None,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=None,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
        return_softmax_lse=False,
        out=None,
        scheduler_metadata=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        fa_version=2,
        s_aux=None,
        num_splits_kv=None,
        is_mix_batch=True,
        host_kv_lens=None,
    ):
        assert cu_seqlens_k is not None or seqused_k is not None, "one must be provided"
        assert cu_seqlens_k is None or seqused_k is None, "not both"
        assert block_table is None or seqused_k is not None, "a table needs seqused_k"
        assert block_table is not None or cu_seqlens_k is not None, "no table: cu_seqlens_k"
        if fa_version != 2:
            raise NotImplementedError("not support yet")
        halves(q, k, v)
        need(window_size is None or not return_softmax_lse, "no LSE with a window")
        if q.shape[-1] not in compiled:  # a stand-in computes it, noted once
            noted.add(f"head_dim {q.shape[-1]} is not compiled")
        if block_table is not None:
            runs = paged_runs(k, v, block_table, index(seqused_k, "seqused_k"))
        else:
            starts = index(cu_seqlens_k, "cu_seqlens_k")
            runs = plain_runs(k, v, starts[:-1], differences(starts))
        left, right = window_size or (-1, -1)
        got = attend(
            q,
            runs,
            index(cu_seqlens_q, "cu_seqlens_q"),
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            left=left,
            right=0 if causal else right,
            clears=False,
        )
        result = got.out.to(q.dtype)
        if out is not None:
            result = out.copy_(result)
        lse = got.lse if heads_first else got.lse.t().contiguous()
        return (result, lse) if return_softmax_lse else result

    return package(
        "vllm_xpu_kernels.flash_attn_interface",
        flash_attn_varlen_func=flash_attn_varlen_func,
        FA2_AVAILABLE=True,
        FA2_UNAVAILABLE_REASON=None,
        _warned_missing_configs=noted,
    )


def _old() -> ModuleType:
    """Fewer arguments, and no slow stand-in that would note a missing kernel."""
    newer = _interface(False, WIDTHS).flash_attn_varlen_func

    def flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        q_v=None,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=None,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
        return_softmax_lse=False,
        out=None,
        scheduler_metadata=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        fa_version=2,
        s_aux=None,
        num_splits_kv=None,
    ):
        if num_splits > 1 or scheduler_metadata is not None or q_descale is not None:
            raise NotImplementedError("FA2 does not support it")
        return newer(
            q,
            k,
            v,
            max_seqlen_q,
            cu_seqlens_q,
            max_seqlen_k,
            cu_seqlens_k=cu_seqlens_k,
            seqused_k=seqused_k,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            block_table=block_table,
            return_softmax_lse=return_softmax_lse,
            out=out,
            fa_version=fa_version,
        )

    return package(
        "vllm_xpu_kernels.flash_attn_interface",
        flash_attn_varlen_func=flash_attn_varlen_func,
        FA2_AVAILABLE=True,
        FA2_UNAVAILABLE_REASON=None,
    )


def _fake(version: str, compiled: tuple[int, ...]) -> Fake:
    return Fake(
        name=f"vllm_xpu_kernels-{version}-{len(compiled)}",
        distributions=(("vllm-xpu-kernels", version),),
        modules=lambda: {"vllm_xpu_kernels.flash_attn_interface": _interface(True, compiled)},
        arch="bmg",
    )


WIDTHS = (64, 96, 128, 192, 256, 512)
OLD = Fake(
    name="vllm_xpu_kernels-0.1.3.1",
    distributions=(("vllm-xpu-kernels", "0.1.3.1"),),
    modules=lambda: {"vllm_xpu_kernels.flash_attn_interface": _old()},
    arch="bmg",
)
NEW = _fake("0.1.16.2", WIDTHS)
PARTLY = _fake("0.1.16.2", (64, 128))


def _broken() -> ModuleType:
    module = _interface(True, WIDTHS)
    module.FA2_AVAILABLE = False
    module.FA2_UNAVAILABLE_REASON = "libsycl.so.9: cannot open shared object file"
    return module


BROKEN = Fake(
    name="vllm_xpu_kernels-broken",
    distributions=(("vllm-xpu-kernels", "0.1.16.2"),),
    modules=lambda: {"vllm_xpu_kernels.flash_attn_interface": _broken()},
    arch="bmg",
)


def paged_varlen(
    output,
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    cu_seqlens_kv,
    max_seqlen_q,
    max_seqlen_kv,
    scale,
    is_cusal,
    block_tables,
    alibi_slopes,
    window_size_left=-1,
    window_size_right=-1,
    kv_cache_dtype="auto",
    k_scale=1.0,
    v_scale=1.0,
    softcap=-1.0,
):
    halves(query, key_cache, value_cache)
    need(query.shape[1] == key_cache.shape[2], "its own tests have as many kv heads as heads")
    need(query.shape[-1] in (64, 96, 128, 256), "head size")
    lengths = differences(index(cu_seqlens_kv, "cu_seqlens_kv"))
    runs = paged_runs(key_cache, value_cache, block_tables, lengths)
    starts = index(cu_seqlens_q, "cu_seqlens_q")
    output.copy_(attend(query, runs, starts, scale=scale, clears=False).out.to(query.dtype))


IPEX = Fake(
    name="ipex-2.8",
    distributions=(("intel-extension-for-pytorch", "2.8.0"),),
    modules=lambda: {
        "intel_extension_for_pytorch.llm.modules": package(
            "intel_extension_for_pytorch.llm.modules",
            PagedAttention=SimpleNamespace(flash_attn_varlen_func=paged_varlen),
        )
    },
    arch="bmg",
)
