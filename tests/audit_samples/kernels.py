"""Sample kernels and their cases. Imports triton only, so that every environment compiles them."""

import time

import triton
import triton.language as tl

from dash_portable.audit.case import EVERYWHERE, Case, Launch


@triton.jit
def scale_kernel(x_ptr, y_ptr, stride_x, scale, TILE: tl.constexpr):
    """y = x * scale, one row a program, widened to f32 and addressed in 64 bits."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    x = tl.load(x_ptr + row * stride_x + at).to(tl.float32)
    tl.store(y_ptr + row * stride_x + at, x * scale)


@triton.jit
def narrow_add_kernel(x_ptr, y_ptr, stride_x, scale, TILE: tl.constexpr):
    """Adds before it widens."""
    at = tl.program_id(0).to(tl.int64) * stride_x + tl.arange(0, TILE)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, (x + x).to(tl.float32) * scale)


@triton.jit
def narrow_offset_kernel(x_ptr, y_ptr, stride_x, scale, TILE: tl.constexpr):
    """Multiplies a stride in 32 bits, and widens too late."""
    at = (tl.program_id(0) * stride_x).to(tl.int64) + tl.arange(0, TILE)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(tl.float32) * scale)


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, n, TILE: tl.constexpr, D: tl.constexpr):
    """c = sum of a @ b^T over n tiles of D, staged in shared memory."""
    rows, columns = tl.arange(0, TILE), tl.arange(0, D)
    total = tl.zeros((TILE, TILE), tl.float32)
    for i in range(n):
        at = rows[:, None] * (n * D) + (i * D + columns)[None, :]
        a = tl.load(a_ptr + at)
        b = tl.load(b_ptr + at)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * TILE + rows[None, :], total)


@triton.jit
def top_kernel(x_ptr, y_ptr, N: tl.constexpr, K: tl.constexpr):
    """tl.topk, which Intel's Triton 3.3 does not have."""
    best = tl.topk(tl.load(x_ptr + tl.arange(0, N)), K)
    tl.store(y_ptr + tl.arange(0, K), best)


@triton.jit
def refused_kernel(x_ptr, y_ptr, N: tl.constexpr):
    """`break`, which the interpreter runs and every compiler refuses."""
    total = 0.0
    for i in range(N):
        total += tl.load(x_ptr + i)
        if total > 1.0:
            break
    tl.store(y_ptr, total)


class SlowKernel:
    """Stands for a kernel whose compile does not end, though it has a processor for itself."""

    @property
    def arg_names(self) -> list[str]:
        end = time.process_time() + 60
        while time.process_time() < end:
            pass
        return []


class WaitingKernel:
    """Stands for a kernel whose compile waits, for a processor or for ever."""

    @property
    def arg_names(self) -> list[str]:
        time.sleep(3)
        return []


_SCALE = {"x_ptr": "*bf16", "y_ptr": "*fp32", "stride_x": "i32:16", "scale": "fp32"}
_PRODUCT = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "n": "i32"}
_TILE = {"TILE": 128}

CASES = {
    "scale": Case(scale_kernel, _SCALE, _TILE),
    "scale_rows": Case(
        scale_kernel,
        _SCALE,
        _TILE,
        launch={
            EVERYWHERE: (Launch(warps=2),),
            "sm90": (Launch(warps=1, label="few"), Launch(warps=8, consts={"TILE": 1024})),
        },
    ),
    "product": Case(product_kernel, _PRODUCT, {"TILE": 64, "D": 64}, matrix=True, wide=True),
    "narrow_add": Case(narrow_add_kernel, _SCALE, _TILE),
    "narrow_offset": Case(narrow_offset_kernel, _SCALE, _TILE),
    "many_warps": Case(scale_kernel, _SCALE, _TILE, launch={EVERYWHERE: (Launch(warps=64),)}),
    "big_tile": Case(
        product_kernel,
        _PRODUCT,
        {"TILE": 128, "D": 256},
        launch={EVERYWHERE: (Launch(8, stages=3),)},
    ),
    "not_wide": Case(  # 16 rows are too few for wgmma
        product_kernel, _PRODUCT, {"TILE": 16, "D": 64}, matrix=True, wide=True
    ),
    "not_matrix": Case(scale_kernel, _SCALE, _TILE, matrix=True),
    "top": Case(top_kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"N": 256, "K": 16}),
    "top_declared": Case(
        top_kernel,
        {"x_ptr": "*fp32", "y_ptr": "*fp32"},
        {"N": 256, "K": 16},
        absent={"intel": "tl.topk came after Triton 3.3", "gfx90a": "an example"},
    ),
    "refused": Case(refused_kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"N": 4}),
    "slow": Case(SlowKernel(), {}),
    "waiting": Case(WaitingKernel(), {}),
}
