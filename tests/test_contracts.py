"""One suite of contracts for a library, run on its fake and, where it can run, on the real one.

What only a fake has confirmed is an assumption, read from the library's source; docs/contracts.md
says which were run on a device. Libraries that are not installed but lie in a folder, as
`benchmarks/vllm_shim.py` takes them: `python -m benchmarks.vllm_shim FOLDER -m pytest ...`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_portable.backends import flashinfer as planned_wrappers
from dash_portable.backends.imports import symbol
from dash_portable.errors import BackendError
from dash_portable.segments import Addressing, Call, Library, normalise
from dash_portable.segments.merge import normalise_lse
from tests.fakes import (
    aiter,
    flash_attn2,
    flash_attn3,
    flash_attn4,
    flashinfer,
    torch_varlen,
    vllm_flash_attn,
    xpu,
)
from tests.fakes.machine import Fake

WITH_LSE: tuple[tuple[Fake | str, str], ...] = (
    (flash_attn2.CUDA, "flash_attn:Flash2"),
    (flash_attn2.CK, "flash_attn:Flash2"),
    (flash_attn2.TRITON, "flash_attn:Flash2"),
    (flash_attn3.V274, "flash_attn:Flash3"),
    (flash_attn3.V283, "flash_attn:Flash3"),
    (flash_attn3.MAIN, "flash_attn:Flash3"),
    (flash_attn4.B36, "flash_attn:Flash4"),
    (vllm_flash_attn.SM80, "flash_attn:Copy2"),
    (vllm_flash_attn.SM90, "flash_attn:Copy3"),
    (vllm_flash_attn.SM100, "flash_attn:Copy4"),
    (aiter.CDNA, "aiter:Aiter"),
    (aiter.RDNA, "aiter:AiterTriton"),
    (xpu.OLD, "xpu:Xpu"),
    (xpu.NEW, "xpu:Xpu"),
    (torch_varlen.V211, "torch_varlen:Varlen"),
    (torch_varlen.V212, "torch_varlen:Varlen"),
    # The real ones, on a machine with the device: what is not installed there is said, not passed.
    ("nvidia", "flash_attn:Flash2"),
    ("nvidia", "flash_attn:Flash3"),
    ("nvidia", "flash_attn:Flash4"),
    ("nvidia", "flash_attn:Copy2"),
    ("nvidia", "flash_attn:Copy3"),
    ("nvidia", "flash_attn:Copy4"),
    ("nvidia", "torch_varlen:Varlen"),
    ("amd", "flash_attn:Flash2"),
    ("amd", "aiter:Aiter"),
    ("amd", "aiter:AiterTriton"),
    ("intel", "xpu:Xpu"),
)


def _id(row: tuple[Fake | str, str]) -> str:
    name = row[0].name if isinstance(row[0], Fake) else f"real-{row[0]}"
    return f"{name}-{row[1].partition(':')[2]}"


def _marks(row: tuple[Fake | str, str]) -> list[Any]:
    return [getattr(pytest.mark, row[0])] if isinstance(row[0], str) else []


@dataclass(frozen=True)
class Subject:
    library: type[Library]
    device: torch.device


@pytest.fixture(params=[pytest.param(row, id=_id(row), marks=_marks(row)) for row in WITH_LSE])
def subject(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Subject]:
    source, path = request.param
    file, _, name = path.partition(":")
    module = importlib.import_module(f"dash_portable.backends.{file}")
    library = getattr(module, name)
    if isinstance(source, Fake):
        source.install(monkeypatch, tmp_path)
        yield Subject(library, torch.device("cpu"))
        return
    kind = "xpu" if source == "intel" else "cuda"
    if not getattr(torch, kind).is_available():
        pytest.skip(f"no {source} device")
    absent = _absent(library)
    if absent:
        pytest.skip(absent)
    yield Subject(library, torch.device(kind))


def _absent(library: type[Library]) -> str:
    """Why the real library cannot be made here."""
    try:
        library(_call(library, torch.device("cuda"), [1], 1, 1)[0])
    except Exception as error:  # whatever it says is the reason
        return f"{type(error).__name__}: {error}"
    return ""


def _call(
    library: type[Library], device: torch.device, lengths: list[int], heads: int, kv_heads: int
) -> tuple[Call, int]:
    """A call of one query a run in slots of 32, addressed as the library wants; and its key
    slots.
    """
    runs, width = len(lengths), 64
    closed = library.addressing is Addressing.CLOSED
    if closed:
        starts = [sum(lengths[:run]) for run in range(runs + 1)]
    else:
        starts = [32 * run for run in range(runs + 1)]
    table = torch.arange(runs, dtype=torch.int32, device=device)[:, None]
    call = Call(
        runs=runs,
        queries=1,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        value_width=width,
        starts_k=torch.tensor(starts, dtype=torch.int32, device=device),
        longest=32,
        scale=0.3,
        dtype=torch.bfloat16,
        device=device,
        length=None if closed else torch.tensor(lengths, dtype=torch.int32, device=device),
        table=table if library.addressing is Addressing.PAGED else None,
        page=32,
        with_lse=True,
    )
    return call, starts[-1]


def _attended(
    subject: Subject, lengths: list[int], heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Raw out and lse of the library, and what they have to be, float64."""
    call, slots = _call(subject.library, subject.device, lengths, heads, kv_heads)
    maker = torch.Generator().manual_seed(3)
    query = torch.randn(len(lengths), heads, 64, generator=maker).bfloat16()
    key = torch.randn(slots, kv_heads, 64, generator=maker).bfloat16()
    value = torch.randn(slots, kv_heads, 64, generator=maker).bfloat16()
    exact = torch.zeros(len(lengths), heads, 64, dtype=torch.float64)
    mass = torch.full((heads, len(lengths)), -math.inf, dtype=torch.float64)
    for run, length in enumerate(lengths):
        start = int(call.starts_k[run])
        keys = key[start : start + length].double().repeat_interleave(heads // kv_heads, 1)
        values = value[start : start + length].double().repeat_interleave(heads // kv_heads, 1)
        if length:
            logit = torch.einsum("hd,thd->ht", query[run].double(), keys) * call.scale
            exact[run] = torch.einsum("ht,thd->hd", logit.softmax(-1), values)
            mass[:, run] = logit.logsumexp(-1)
    given = [tensor.to(subject.device) for tensor in (query, key, value)]
    if call.table is not None:
        given[1:] = [tensor.view(-1, 32, kv_heads, 64) for tensor in given[1:]]
    planned = subject.library(call)
    out, lse = planned.attend(*given)
    assert lse is not None
    lse = normalise_lse(lse, layout=planned.lse_layout, base=planned.lse_base)
    return out.cpu(), lse.cpu(), exact, mass


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)])
def test_out_and_lse(subject: Subject, heads: int, kv_heads: int) -> None:
    """Seven runs and three or four heads: a transposed LSE has another shape."""
    if heads != kv_heads and not subject.library.takes_groups:
        heads = kv_heads
    out, lse, exact, mass = _attended(subject, [1, 31, 32, 7, 15, 16, 3], heads, kv_heads)
    assert out.shape == exact.shape
    assert out.dtype == torch.bfloat16
    assert lse.shape == mass.shape
    assert lse.dtype == torch.float32
    step = torch.finfo(torch.bfloat16).eps
    rounded = (exact.bfloat16().double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 2 * (rounded + step * exact.abs().max())
    assert (lse.double() - mass).abs().max() <= step * mass.abs().max()


def test_empty_runs_are_normalised(subject: Subject) -> None:
    """Whatever a library answers for a run without keys, ours is 0 and -inf, and the others
    stand.
    """
    lengths = [5, 0, 32, 0, 1]
    out, lse, exact, mass = _attended(subject, lengths, 2, 2)
    out, lse = normalise(out, lse, torch.tensor(lengths))
    empty = torch.tensor(lengths) == 0
    assert bool((out[empty] == 0).all())
    assert bool((lse[:, empty] == -math.inf).all())
    assert (out.double() - exact).abs().max() <= 0.02 * exact.abs().max()
    assert torch.allclose(lse[:, ~empty].double(), mass[:, ~empty], rtol=2**-7)
    assert lse.is_contiguous()


def test_other_dtypes_are_refused(subject: Subject) -> None:
    call, slots = _call(subject.library, subject.device, [32, 32], 2, 2)
    query = torch.zeros(2, 2, 64, device=subject.device)
    key = torch.zeros(slots, 2, 64, device=subject.device)
    if call.table is not None:
        key = key.view(-1, 32, 2, 64)
    planned = subject.library(call)
    with pytest.raises((RuntimeError, AssertionError, ValueError, TypeError)):
        planned.attend(query, key, key)


# --- flashinfer, which is planned -----------------------------------------------------------------


@pytest.fixture(
    params=[
        pytest.param(flashinfer.V06, id="flashinfer-0.6"),
        pytest.param(flashinfer.V07, id="flashinfer-0.7"),
        pytest.param("nvidia", id="real", marks=pytest.mark.nvidia),
    ]
)
def where(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> torch.device:
    """The device on which flashinfer, or its fake, is."""
    planned_wrappers._plan_ragged.cache_clear()
    planned_wrappers._plan_paged.cache_clear()
    if isinstance(request.param, Fake):
        request.param.install(monkeypatch, tmp_path)
        return torch.device("cpu")
    try:
        symbol("flashinfer", planned_wrappers.RAGGED)
    except BackendError as error:
        pytest.skip(str(error))
    return torch.device("cuda")


def _shape(device: torch.device, runs: int, width: int) -> planned_wrappers.Shape:
    return planned_wrappers.Shape(
        runs=runs,
        lengths=(32,),
        heads=4,
        kv_heads=2,
        width=width,
        value_width=width,
        scale=0.3,
        dtype=torch.bfloat16,
        device=device,
        deterministic=False,
    )


def test_planned_runs_through_pages_and_a_mask(where: torch.device) -> None:
    """Places of single tokens out of order; runs that see all, nothing, five keys and every other
    one; written into the plan's buffers after it was made."""
    runs, width = 4, 128
    planned = planned_wrappers._plan_paged(_shape(where, runs, width))
    maker = torch.Generator().manual_seed(3)
    query = torch.randn(runs, 4, width, generator=maker).bfloat16()
    key, value = torch.randn(2, runs * 32, 2, width, generator=maker).bfloat16()
    order = torch.randperm(runs * 32, generator=maker)
    seen = torch.zeros(runs, 32, dtype=torch.bool)
    seen[0], seen[2, :5], seen[3, ::2] = True, True, True
    bits = seen.view(-1, 8).int() << torch.arange(8)
    planned.indices.copy_(order.int())
    planned.mask.copy_(bits.sum(1).to(torch.uint8))
    pages = (key.to(where)[:, None], value.to(where)[:, None])
    out, lse = planned.wrapper.run(query.to(where), pages, **planned.keywords)
    lse = normalise_lse(lse, **planned.meaning)
    assert lse.shape == (4, runs)
    out, lse = normalise(out.cpu(), lse.cpu(), seen.sum(1))
    keys = key[order].view(runs, 32, 2, width).double().repeat_interleave(2, 2)
    values = value[order].view(runs, 32, 2, width).double().repeat_interleave(2, 2)
    logit = torch.einsum("rhd,rthd->hrt", query.double(), keys) * 0.3
    logit = logit.masked_fill(~seen, -math.inf)
    live = [0, 2, 3]
    exact = torch.einsum("hrt,rthd->rhd", logit[:, live].softmax(-1), values[live])
    assert (out[live].double() - exact).abs().max() <= 0.02 * exact.abs().max()
    assert torch.allclose(lse[:, live].double(), logit[:, live].logsumexp(-1), rtol=2**-7)
    assert bool((out[1] == 0).all())
    assert bool((lse[:, 1] == -math.inf).all())


def test_planned_runs_of_one_length(where: torch.device) -> None:
    runs, width = 3, 256
    planned = planned_wrappers._plan_ragged(_shape(where, runs, width))
    maker = torch.Generator().manual_seed(3)
    query = torch.randn(runs, 4, width, generator=maker).bfloat16()
    key, value = torch.randn(2, runs * 32, 2, width, generator=maker).bfloat16()
    out = planned.run(*(tensor.to(where) for tensor in (query, key, value))).cpu()
    keys = key.view(runs, 32, 2, width).double().repeat_interleave(2, 2)
    values = value.view(runs, 32, 2, width).double().repeat_interleave(2, 2)
    weight = (torch.einsum("rhd,rthd->hrt", query.double(), keys) * 0.3).softmax(-1)
    exact = torch.einsum("hrt,rthd->rhd", weight, values)
    assert (out.double() - exact).abs().max() <= 0.02 * exact.abs().max()


# --- what only the fakes say, each a fact read in the library's source ---------------------------


def _varlen(fake: Fake, module: str) -> Any:
    return fake.modules()[module].flash_attn_varlen_func


def _plain() -> dict[str, Any]:
    starts = torch.tensor([0, 32, 32, 64], dtype=torch.int32)
    ones = torch.arange(4, dtype=torch.int32)
    return {
        "cu_seqlens_q": ones,
        "cu_seqlens_k": starts,
        "max_seqlen_q": 1,
        "max_seqlen_k": 32,
    }


def _tensors(group: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    maker = torch.Generator().manual_seed(5)
    query = torch.randn(3, 2 * group, 64, generator=maker).bfloat16()
    key = torch.randn(64, 2, 64, generator=maker).bfloat16()
    return query, key, torch.randn(64, 2, 64, generator=maker).bfloat16()


@pytest.mark.parametrize(
    ("fake", "empty"),
    [(flash_attn2.CUDA, math.inf), (flash_attn2.CK, -math.inf), (flash_attn2.TRITON, 0.0)],
    ids=["cuda", "ck", "triton"],
)
def test_flash_attn2_names_an_empty_run_three_ways(fake: Fake, empty: float) -> None:
    out, lse, dropped = _varlen(fake, "flash_attn")(*_tensors(), **_plain(), return_attn_probs=True)
    assert bool((lse[:, 1] == empty).all())
    assert bool((out[1] == 0).all())
    assert dropped.numel() == 0


def test_flash_attn2_pages_are_large_or_ignored() -> None:
    query, key, value = _tensors()
    pages = key.view(-1, 32, 2, 64), value.view(-1, 32, 2, 64)
    table = torch.zeros(3, 1, dtype=torch.int32)
    for fake, rule in ((flash_attn2.CUDA, "by 256"), (flash_attn2.CK, "by 128")):
        with pytest.raises(RuntimeError, match=rule):
            _varlen(fake, "flash_attn")(query, *pages, **_plain(), block_table=table)
    engine = _varlen(flash_attn2.TRITON, "flash_attn")
    ignored = engine(query, key, value, **_plain(), block_table=table)
    assert torch.equal(ignored, engine(query, key, value, **_plain()))


def test_flash_attn2_folds_groups_of_single_queries() -> None:
    """A run without a query breaks the fold; that is why every run here has one."""
    query, key, value = _tensors(group=2)
    arguments = {**_plain(), "cu_seqlens_q": torch.tensor([0, 1, 1, 2], dtype=torch.int32)}
    with pytest.raises(RuntimeError, match="invalid for input"):
        _varlen(flash_attn2.CUDA, "flash_attn")(query[:2], key, value, **arguments)
    _varlen(flash_attn2.CK, "flash_attn")(query[:2], key, value, **arguments)


def test_vllms_copy_wants_one_kind_of_lengths_and_defaults_to_2() -> None:
    query, key, value = _tensors()
    call = _varlen(vllm_flash_attn.SM90, "vllm.vllm_flash_attn")
    used = torch.tensor([32, 1, 32], dtype=torch.int32)
    with pytest.raises(AssertionError, match="not both"):
        call(query, key, value, **_plain(), seqused_k=used, fa_version=3)
    _, lse = call(query, key, value, **_plain(), return_softmax_lse=True)
    assert bool((lse[:, 1] == math.inf).all())  # generation 2's answer
    with pytest.raises(RuntimeError, match="FA3"):
        _varlen(vllm_flash_attn.SM100, "vllm.vllm_flash_attn")(
            query, key, value, **_plain(), fa_version=3
        )


def test_aiter_cannot_page_its_varlen_call() -> None:
    query, key, value = _tensors()
    table = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(UnboundLocalError):
        _varlen(aiter.CDNA, "aiter.ops.mha")(query, key, value, **_plain(), block_table=table)
    triton = _varlen(aiter.RDNA, "aiter.ops.triton.mha")
    ignored = triton(query, key, value, **_plain(), block_table=table)
    assert torch.equal(ignored, triton(query, key, value, **_plain()))


def test_xpu_has_no_lse_beside_a_window() -> None:
    arguments = {**_plain(), "window_size": [127, 0], "return_softmax_lse": True}
    with pytest.raises(RuntimeError, match="window"):
        _varlen(xpu.NEW, "vllm_xpu_kernels.flash_attn_interface")(*_tensors(), **arguments)


@pytest.mark.parametrize("clears", [True, False])
def test_values_behind_a_run(clears: bool) -> None:
    """Generation 2 clears them on load; a NaN there poisons generation 3's contiguous call."""
    query, key, value = _tensors()
    value[32:] = math.nan
    starts = torch.tensor([0, 32], dtype=torch.int32)
    arguments = {
        "cu_seqlens_q": starts.new_tensor([0, 1]),
        "cu_seqlens_k": starts,
        "max_seqlen_q": 1,
        "max_seqlen_k": 32,
    }
    fake = flash_attn2.CUDA if clears else flash_attn3.V283
    out = _varlen(fake, "flash_attn" if clears else "flash_attn_interface")(
        query[:1], key, value, **arguments
    )
    assert bool(out.isfinite().all()) is clears
