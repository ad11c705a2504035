"""After warming up nothing compiles while serving."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dash_portable import document
from dash_portable.plan import DashStep
from dash_portable.serve import serve
from dash_portable.trial.feed import Feed
from dash_portable.trial.inputs import layer_inputs
from dash_portable.trial.warm import CALLS, Server, compilations, warm_up
from tests.device import DEVICE

on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="nothing compiles on a CPU")


def server(heads: int, longest: int, block_size: int = 64) -> Server:
    return Server(
        config=document.model_config(),
        heads=heads,
        kv_heads=heads,
        dtype=torch.bfloat16,
        device=DEVICE,
        block_size=block_size,
        max_model_len=longest,
    )


def test_counting_leaves_triton_as_it_was() -> None:
    knobs = pytest.importorskip("triton.knobs")
    before = knobs.runtime.jit_post_compile_hook
    with compilations() as seen:
        assert knobs.runtime.jit_post_compile_hook is not before
    assert knobs.runtime.jit_post_compile_hook is before
    assert seen == []


def test_what_triton_compiles_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own call of the hook; on a GPU the next test lets it compile."""
    knobs, told = pytest.importorskip("triton.knobs"), []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda *args, **named: told.append(named["repr"])
    )
    with compilations() as seen:
        knobs.runtime.jit_post_compile_hook(repr="store_kernel[num_warps: 4](*bf16)")
    assert seen == [("store_kernel", "[num_warps: 4](*bf16)")]
    assert len(told) == 1  # whoever listened before still hears of it


@pytest.mark.parametrize("longest", [40, 1000])
@pytest.mark.parametrize("block_size", [16, 128])
def test_a_server_may_be_small(longest: int, block_size: int) -> None:
    """Of fewer tokens than the steps that warm it up, and of one row at a time."""
    one = replace(server(2, longest, block_size), device=torch.device("cpu"))
    found = warm_up(one, max_rows=1, calls=CALLS)
    assert set(found.backends) == {"decode", "prefill"}


@on_gpu
def test_warming_up_compiles_and_serving_does_not() -> None:
    made = document.paged(9, answer=5)
    feed = Feed(
        document=made,
        config=document.model_config(),
        heads=4,
        kv_heads=4,
        device=DEVICE,
        copies=17,
    )
    width = feed.block_table.shape[1]
    found = warm_up(server(4, width * 64), max_rows=17, calls=CALLS)
    assert found.compiled
    inputs = layer_inputs(
        made,
        feed.config,
        heads=4,
        kv_heads=4,
        dtype=feed.dtype,
        device=DEVICE,
        seed=0,
    )
    prompt = feed.prompt_len
    with compilations() as seen:
        for first, last in [(0, 100), (100, 1111), (1111, 1112), (1112, prompt)]:
            serve_rows(feed, inputs.rows(first, last), inputs.head_cls, first, last)
        feed.replicate()
        for token, count in zip(range(prompt, len(made)), (17, 16, 15, 2, 1), strict=True):
            row = inputs.rows(token, token + 1)
            serve_rows(feed, row, inputs.head_cls, token, token + 1, count)
    assert seen == []


def serve_rows(
    feed: Feed,
    rows: tuple[torch.Tensor, ...],
    head_cls: torch.Tensor,
    first: int,
    last: int,
    sequences: int | None = None,
) -> None:
    step = feed.describe(first, last, sequences=sequences)
    choice, shared, runner = serve(step, None)
    q, k, v, iq, ik = (x.repeat(step.num_seqs, *[1] * (x.dim() - 1)) for x in rows)
    DashStep(step, choice, shared, runner).run(q, k, v, iq, ik, feed.caches[0], head_cls, 0)
