"""The shared pieces alone: keys that sort, the best of many, angles, the direct launch."""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from dash_portable.config import DashConfig
from dash_portable.kernels import launch
from dash_portable.kernels.primitives import (
    EMPTY,
    best_of,
    best_of_rows,
    cos_sin,
    final_score,
    finish_selection,
    pack_score,
    unpack_index,
    unpack_score,
)
from dash_portable.reference import select

NOTHING = -(2**63) + 1


@triton.jit
def best_kernel(key_ptr, out_ptr, M: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr):
    i, w = tl.arange(0, M), tl.arange(0, W)
    keys = tl.load(key_ptr + i)
    if ROWS:
        best = best_of_rows(keys[None, :], M, W)
        tl.store(out_ptr + w[None, :], best)
    else:
        tl.store(out_ptr + w, best_of(keys, M, W))


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("rows", [False, True], ids=["rank", "maxima"])
@pytest.mark.parametrize("real", [0, 1, 7, 16, 1000])
def test_best_of(size, rows, real):
    random = torch.Generator().manual_seed(size + real)
    keys = torch.randint(-(2**62), 2**62, (size,), generator=random)
    gone = torch.randperm(size, generator=random)[min(real, size) :]
    keys[gone] = NOTHING
    out = torch.empty(16, dtype=torch.int64)
    best_kernel[(1,)](keys, out, size, 16, rows)
    assert out.tolist() == sorted(keys.tolist(), reverse=True)[:16]


@triton.jit
def pack_kernel(raw_ptr, key_ptr, score_ptr, index_ptr, factor, D: tl.constexpr, M: tl.constexpr):
    i = tl.arange(0, M)
    key = pack_score(final_score(tl.load(raw_ptr + i), factor, D), i * 1000)
    tl.store(key_ptr + i, key)
    tl.store(score_ptr + i, unpack_score(key))
    tl.store(index_ptr + i, unpack_index(key))


def test_keys_sort_by_score_then_by_lower_block():
    inf, nan = math.inf, math.nan
    raw = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, inf, -inf, nan, 1e30, -1e30, 3.0, 3.0, 2.9999998]
    raw = torch.tensor([*raw, 0.5, -0.5])
    key, index = torch.empty(16, dtype=torch.int64), torch.empty(16, dtype=torch.int32)
    score = torch.empty(16)
    pack_kernel[(1,)](raw, key, score, index, 2.0, 64, 16)
    wanted = (raw / 8).clamp(-1e4, 1e4) * 2
    wanted[raw.isnan()] = -1e4
    assert torch.equal(score, wanted + 0.0)
    assert index.tolist() == [i * 1000 for i in range(16)]
    order = sorted(range(16), key=lambda i: (-float(wanted[i]), i))
    assert key.argsort(descending=True).tolist() == order
    assert (key > EMPTY.value).all()


@triton.jit
def finish_kernel(
    score_ptr, ids_ptr, bias_ptr, count, entries, floor, inv_sigma,
    TOPK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    w = tl.arange(0, 16)
    keys = tl.where(w < count, pack_score(tl.load(score_ptr + w), w * 3), EMPTY)
    many = tl.full((1,), 0, tl.int32) + entries
    ids, bias = finish_selection(keys[None, :], many, floor, inv_sigma, TOPK, WINDOW, 16)
    tl.store(ids_ptr + w[None, :], ids)
    tl.store(bias_ptr + w[None, :], bias)


@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0, 40.0, 9000.0])
@pytest.mark.parametrize("count", [0, 1, 5, 12, 16])
@pytest.mark.parametrize(("topk", "window"), [(12, 16), (3, 7)])
def test_finish_is_the_oracles(spread, count, topk, window):
    config = DashConfig(
        index_dim=64, scale=(1.0,), floor=(1e-4,), topk=topk, window=window, sigma=2.0
    )
    random = torch.Generator().manual_seed(count)
    score = torch.randn(16, generator=random).mul(spread).sort(descending=True).values
    position = torch.tensor([(max(count, 1) + 3) * 32])
    ids, bias = torch.empty(16, dtype=torch.int32), torch.empty(16)
    entries = min(window, int(position) // 32 + 1)
    finish_kernel[(1,)](score, ids, bias, count, entries, 1e-4, 0.5, topk, window)
    blocks = torch.full((1, 48), -torch.inf, dtype=torch.float64)
    blocks[0, : 3 * 16 : 3] = score.double()
    candidate = torch.zeros(1, 48, dtype=torch.bool)
    candidate[0, : 3 * count : 3] = True
    wanted = select(blocks, candidate, position, config, 1e-4)
    assert ids[:topk].tolist() == wanted.ids[0].tolist()
    assert (ids[topk:] == -1).all()
    torch.testing.assert_close(bias[:topk].double(), wanted.bias[0], rtol=0, atol=2e-3)


@triton.jit
def angle_kernel(position_ptr, turn_ptr, cos_ptr, sin_ptr, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    c, s = cos_sin(tl.load(position_ptr + i), tl.load(turn_ptr + j))
    tl.store(cos_ptr + i * N + j, c)
    tl.store(sin_ptr + i * N + j, s)


def test_angles_of_late_tokens():
    numbers = [0, 1, 2, 3, 1000, 65536, 99_991, 131_072, 999_983, 1_000_000, 2**31 - 1]
    position = torch.tensor(numbers + list(range(4, 9)), dtype=torch.int32)
    turns = torch.tensor(launch.turns(10000.0, 128))
    cos, sin = torch.empty(16, 64), torch.empty(16, 64)
    angle_kernel[(1,)](position, turns, cos, sin, 16, 64)
    frequency = torch.tensor([10000.0 ** (-j / 63) for j in range(63)] + [1.0], dtype=torch.float64)
    angle = position.double()[:, None] * frequency
    # A float64 product of 2**31 is itself off by 2**-22; of a million by 2**-33.
    bound = torch.where(position > 1 << 24, 3e-6, 3e-7)[:, None]
    assert ((cos.double() - angle.cos()).abs() <= bound).all()
    assert ((sin.double() - angle.sin()).abs() <= bound).all()


class Compiled:
    """A compiled kernel as Triton gives it: indexed by a grid, called with every argument."""

    def __init__(self, calls, vendor):
        self.calls = calls
        self.metadata = SimpleNamespace(target=SimpleNamespace(backend=vendor))

    def __getitem__(self, grid):
        return lambda *args, stream: self.calls.append(("direct", grid, args, stream))


class Kernel:
    device_caches = None

    def __init__(self, *names, vendor="cuda"):
        self.arg_names, self.calls, self.vendor = names, [], vendor

    def __getitem__(self, grid):
        def run(*args, **options):
            self.calls.append(("usual", grid, options))
            return Compiled(self.calls, self.vendor)

        return run


@pytest.fixture
def streams(monkeypatch):
    """A driver whose current streams are these, by device."""
    found = {3: 11}
    active = SimpleNamespace(get_current_stream=found.get, get_current_device=lambda: 3)
    module = importlib.import_module("triton.runtime.driver")
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    return found


def test_a_launch_is_direct_only_where_nothing_differs(streams):
    kernel = Kernel("x", "number", "factor", "y", "rows", "WIDTH", "FLAG")
    x, y = torch.zeros(64), torch.zeros(3)
    run = launch.Launch(kernel, 7, (64, True), fixed={"y": y, "rows": 9}, warps=2, launch_pdl=True)
    run(x, 3, 0.5)
    run(x, 3, 0.25)
    options = {"num_warps": 2, "launch_pdl": True}
    assert kernel.calls == [
        ("usual", (7, 1, 1), options),
        ("direct", (7, 1, 1), (x.data_ptr(), 3, 0.25, y.data_ptr(), 9, 64, True), 11),
    ]
    streams[3] = 12
    run(x, 3, 0.5)
    assert kernel.calls[-1][0::3] == ("direct", 12)
    for other in ((x[1:], 3, 0.5), (x, 4, 0.5), (x.half(), 3, 0.5)):
        run(*other)
        assert kernel.calls[-1][0] == "usual"


def test_fixed_arguments_stand_by_name_between_the_others(streams):
    kernel = Kernel("a", "b", "c", "d", "ONE")
    x, y = torch.zeros(4), torch.zeros(4)
    run = launch.Launch(kernel, 1, (1,), fixed={"b": y, "d": 0.5, "of_another": 7}, warps=1)
    run(x, 2)
    run(x, 2)
    assert kernel.calls[-1][2] == (x.data_ptr(), y.data_ptr(), 2, 0.5, 1)


def test_amd_makes_another_kernel_for_tensors_beyond_2_gb(streams):
    kernel = Kernel("x", vendor="hip")
    run = launch.Launch(kernel, 1, (), warps=1)
    small, large = torch.zeros(4), torch.empty(4)
    large.untyped_storage = lambda: SimpleNamespace(nbytes=lambda: 1 << 31)
    for x in (small, small, small, large, large, small):
        run(x)
    ways = [call[0] for call in kernel.calls]
    assert ways == ["usual", "usual", "direct", "usual", "direct", "direct"]


def test_every_row_of_attention_is_compiled_for_the_audit():
    """Also where two have no limit: for one query head of a kv head, and for several."""
    from dash_portable.kernels.cases import CASES

    for arch, rows in launch.ATTEND.items():
        for case, taken in {
            "attend_decode_bf16": rows,
            "attend_decode_group_bf16": [row for row in rows if not row.single],
        }.items():
            compiled = CASES[case].rows(arch if arch != "*" else "sm80")
            assert len(compiled) == len({one.label for one in compiled}) == len(taken) + 1


def test_rows_are_found_and_splits_fit():
    for arch in (*launch.SELECT, "unknown"):
        for rows in (1, 8, 9, 300):
            for blocks in (1, 64, 1024, 4096, 100_000):
                row = launch.select_row(arch, rows, blocks)
                split = launch.split_of(row, rows, blocks)
                assert split & (split - 1) == 0
                assert split == 1 or (
                    split * rows <= row.programs and (split // 2) * row.tile < blocks
                )
    for arch in (*launch.ATTEND, "unknown"):
        fixed = {launch.attend_row(arch, n, True).split for n in (1, 100, 1000, 10_000)}
        assert fixed == {launch.FIXED_SPLIT}
        for programs in (1, 1000):
            row = launch.attend_row(arch, programs, False)
            assert row == launch.attend_row(arch, programs, False, width=128, itemsize=4)
            assert row == launch.attend_row(arch, programs, False, width=256, itemsize=2)
            wide = launch.attend_row(arch, programs, False, width=144, itemsize=4)
            assert wide == row._replace(
                warps=max(row.warps, 4), dot_warps=8, stages=row.stages or 1
            )
            assert not launch.attend_row(arch, programs, False, group=4).single
        assert not launch.attend_row(arch, 1000, True).single  # one row for any batch and group
