"""flashinfer-python 0.6 and 0.7: planned wrappers on their graph-mode buffers, fa2 only."""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import torch

from tests.fakes.arithmetic import Answer, Run, attend, differences, halves, need, plain_runs
from tests.fakes.machine import Fake, package

_WIDTHS = (64, 128, 256, 512)


def _bits(mask: torch.Tensor) -> torch.Tensor:
    """Little-endian bits of bytes."""
    return (mask[:, None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).bool().flatten()


class Wrapper:
    """What both wrappers do with their plan."""

    def __init__(self, workspace, backend, use_cuda_graph):
        need(workspace.dtype == torch.uint8 and workspace.numel() >= 1 << 20, "workspace too small")
        assert backend == "fa2", "this fake knows fa2 only"
        assert use_cuda_graph, "this fake knows graph mode only"
        self.planned = None

    def remember(self, **plan):
        need(plan["width"] in _WIDTHS, f"Unsupported head_dim: {plan['width']}")
        assert plan["window_left"] == -1, "this fake knows no window"
        self.planned = plan

    def answer(self, q, runs, starts_q, mask, newer, keywords) -> object:
        halves(q)
        plan = self.planned
        assert plan is not None, "run before plan"
        assert q.shape[1:] == (plan["heads"], plan["width"]), "q is not as planned"
        assert q.dtype == plan["dtype"], "dtype is not as planned"
        bias = None
        if mask is not None:
            bias, at = [], 0
            for run in runs:
                length = len(run.key)
                seen = mask[at : at + length]
                bias.append(torch.where(seen, 0.0, -math.inf)[None])
                at += length
        got: Answer = attend(q, runs, starts_q, scale=plan["scale"], bias=bias)
        out = got.out.to(q.dtype)
        if not keywords.get("return_lse", False):
            return out
        natural = newer and keywords.get("lse_base", "log2") == "ln"
        lse = got.lse if natural else got.lse / math.log(2.0)
        lse = lse.masked_fill(got.empty, -math.inf if newer else -5e4)
        first = newer and keywords.get("lse_layout", "NH") == "HN"
        return out, (lse if first else lse.t().contiguous())


def _ragged_plan(
    self,
    qo_indptr,
    kv_indptr,
    num_qo_heads,
    num_kv_heads,
    head_dim_qk,
    head_dim_vo=None,
    custom_mask=None,
    packed_custom_mask=None,
    causal=False,
    pos_encoding_mode="NONE",
    use_fp16_qk_reduction=False,
    window_left=-1,
    logits_soft_cap=None,
    sm_scale=None,
    rope_scale=None,
    rope_theta=None,
    q_data_type="float16",
    kv_data_type=None,
    o_data_type=None,
    non_blocking=True,
    prefix_len_ptr=None,
    token_pos_in_items_ptr=None,
    token_pos_in_items_len=0,
    max_item_len_ptr=None,
    fixed_split_size=None,
    disable_split_kv=False,
    seq_lens=None,
    seq_lens_q=None,
    max_token_per_sequence=None,
    max_sequence_kv=None,
    v_indptr=None,
    o_indptr=None,
):
    assert len(qo_indptr) == len(self.qo), "batch size is fixed"
    assert len(kv_indptr) == len(self.kv), "batch size is fixed"
    self.qo.copy_(qo_indptr)
    self.kv.copy_(kv_indptr)
    self.remember(
        heads=num_qo_heads,
        width=head_dim_qk,
        window_left=window_left,
        scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale,
        dtype=q_data_type,
    )


def _paged_plan(
    self,
    qo_indptr,
    paged_kv_indptr,
    paged_kv_indices,
    paged_kv_last_page_len,
    num_qo_heads,
    num_kv_heads,
    head_dim_qk,
    page_size,
    head_dim_vo=None,
    custom_mask=None,
    packed_custom_mask=None,
    causal=False,
    pos_encoding_mode="NONE",
    use_fp16_qk_reduction=False,
    sm_scale=None,
    window_left=-1,
    logits_soft_cap=None,
    rope_scale=None,
    rope_theta=None,
    q_data_type="float16",
    kv_data_type=None,
    o_data_type=None,
    non_blocking=True,
    prefix_len_ptr=None,
    token_pos_in_items_ptr=None,
    token_pos_in_items_len=0,
    max_item_len_ptr=None,
    seq_lens=None,
    seq_lens_q=None,
    block_tables=None,
    max_token_per_sequence=None,
    max_sequence_kv=None,
    fixed_split_size=None,
    disable_split_kv=False,
):
    assert packed_custom_mask is None, "its starts would be counted in bits"
    self.qo.copy_(qo_indptr)
    self.kv.copy_(paged_kv_indptr)
    self.indices[: len(paged_kv_indices)].copy_(paged_kv_indices)
    self.last.copy_(paged_kv_last_page_len)
    self.page_size = page_size
    if custom_mask is not None:
        need(custom_mask.dtype == torch.bool, "custom_mask must be bool")
        lengths = self.kv.diff() * page_size
        need(int(lengths.sum()) == len(custom_mask), "one bit for each query and key")
        need(bool((lengths % 8 == 0).all()), "this fake wants whole bytes")
        packed = custom_mask.view(-1, 8) << torch.arange(8, dtype=torch.uint8)
        self.mask[: len(packed)].copy_(packed.sum(1))
    self.remember(
        heads=num_qo_heads,
        width=head_dim_qk,
        window_left=window_left,
        scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale,
        dtype=q_data_type,
    )


def _ragged_runs(self, k, v):
    halves(k, v)
    starts = self.kv.tolist()
    return plain_runs(k, v, starts[:-1], differences(starts))


def _paged_runs(self, cache):
    key, value = cache
    halves(key, value)
    assert key.shape[1] == self.page_size, "page size is not as planned"
    assert key.stride() == value.stride(), "K and V strides must be the same"
    starts, ids = self.kv.tolist(), self.indices.tolist()
    runs = []
    for first, end in itertools.pairwise(starts):
        pages = ids[first:end]
        need(all(0 <= page < len(key) for page in pages), "page id out of range")
        runs.append(
            Run(key[pages].flatten(0, 1), value[pages].flatten(0, 1), value[:0].flatten(0, 1))
        )
    return runs


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        kv_indptr_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        super().__init__(float_workspace_buffer, backend, use_cuda_graph)
        self.qo, self.kv = qo_indptr_buf, kv_indptr_buf

    plan = _ragged_plan

    def run(
        self,
        q,
        k,
        v,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        o_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
    ):
        runs = _ragged_runs(self, k, v)
        return self.answer(q, runs, self.qo.tolist(), None, False, {"return_lse": return_lse})


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        super().__init__(float_workspace_buffer, backend, use_cuda_graph)
        assert kv_layout == "NHD", "this fake knows NHD only"
        self.qo, self.kv, self.indices = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf
        self.last, self.mask = paged_kv_last_page_len_buf, custom_mask_buf

    plan = _paged_plan

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        skip_softmax_threshold_scale_factor=None,
    ):
        runs, mask = _paged_runs(self, paged_kv_cache), _bits(self.mask)
        return self.answer(q, runs, self.qo.tolist(), mask, False, {"return_lse": return_lse})


class RaggedV07(BatchPrefillWithRaggedKVCacheWrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        kv_indptr_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
    ):
        super().__init__(
            float_workspace_buffer,
            use_cuda_graph=use_cuda_graph,
            qo_indptr_buf=qo_indptr_buf,
            kv_indptr_buf=kv_indptr_buf,
            backend=backend,
        )

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        fixed_split_size=None,
        disable_split_kv=False,
        seq_lens=None,
        seq_lens_q=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        v_indptr=None,
        o_indptr=None,
        qo_indptr_cpu=None,
        kv_indptr_cpu=None,
        uniform_q_len=None,
        use_token_head_sf=False,
    ):
        super().plan(
            qo_indptr,
            kv_indptr,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            window_left=window_left,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
        )

    def run(
        self,
        q,
        k,
        v,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        o_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        kv_cache_sf=None,
    ):
        wants = {"return_lse": return_lse, "lse_base": lse_base, "lse_layout": lse_layout}
        return self.answer(q, _ragged_runs(self, k, v), self.qo.tolist(), None, True, wants)


class PagedV07(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
        max_total_num_rows=None,
    ):
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph=use_cuda_graph,
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            custom_mask_buf=custom_mask_buf,
            backend=backend,
        )

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
        use_token_head_sf=False,
    ):
        super().plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            window_left=window_left,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
        )

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        runs, mask = _paged_runs(self, paged_kv_cache), _bits(self.mask)
        wants = {"return_lse": return_lse, "lse_base": lse_base, "lse_layout": lse_layout}
        return self.answer(q, runs, self.qo.tolist(), mask, True, wants)


def _module(ragged: type, paged: type) -> ModuleType:
    return package(
        "flashinfer",
        BatchPrefillWithRaggedKVCacheWrapper=ragged,
        BatchPrefillWithPagedKVCacheWrapper=paged,
    )


V06 = Fake(
    name="flashinfer-0.6.4",
    distributions=(("flashinfer-python", "0.6.4"),),
    modules=lambda: {
        "flashinfer": _module(
            BatchPrefillWithRaggedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
        )
    },
    arch="sm90",
)
V07 = Fake(
    name="flashinfer-0.7.4",
    distributions=(("flashinfer-python", "0.7.4"),),
    modules=lambda: {"flashinfer": _module(RaggedV07, PagedV07)},
    arch="sm90",
)
