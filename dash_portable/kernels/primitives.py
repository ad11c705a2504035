"""Pieces of kernel that two stages or more use: keys that sort, the rule after the scores, bytes in
the cache, angles.
"""

import inspect

import triton
import triton.language as tl

# Programmatic dependent launch: only where this Triton offers it, only behind a constexpr. Triton
# 3.4 has the two functions, but its own compiler calls them with an argument that they do not take.
try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    PDL_OFFERED = "_semantic" in inspect.signature(gdc_wait).parameters
except ImportError:  # pragma: no cover - another vendor's Triton
    PDL_OFFERED = False
if not PDL_OFFERED:

    @triton.jit
    def gdc_wait():
        tl.debug_barrier()

    @triton.jit
    def gdc_launch_dependents():
        tl.debug_barrier()


@triton.jit
def follow(PDL: tl.constexpr):
    """With programmatic dependent launch a kernel begins with this: what the launch before stored
    is there, and the next launch may come up. Nothing is read or stored before it.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


# Sizes and strides of index tensors: they change from step to step, and no load gains by knowing
# that one is 1 or a multiple of 16, so kernels take them as they come (`do_not_specialize`).
NUMBERS = (
    "num_rows", "max_blocks", "max_scores", "stride_table", "stride_pages", "stride_given",
)  # fmt: skip
EMPTY = tl.constexpr(-(2**63) + 1)  # a key below every real one
BAD_SCORE = tl.constexpr(-1e4)  # NaN scores, and what fills the window behind the last candidate
CLAMP = tl.constexpr(1e4)
LOG2E = tl.constexpr(1.4426950408889634)
ROLE = tl.constexpr(0)  # elements of an auxiliary row, counted from D
STATE = tl.constexpr(2)
COUNT = tl.constexpr(18)
START = tl.constexpr(22)
RANGE = tl.constexpr(26)


@triton.jit
def widened(x):
    """Numbers in float32, as their own dtype holds them. By way of their bits: Intel's Triton takes
    a rounding that is widened at once for nothing, and the number would be the one before it.
    """
    dtype: tl.constexpr = x.dtype
    if dtype != tl.float32:
        x = x.to(tl.int16, bitcast=True).to(dtype, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def final_score(raw, factor, D: tl.constexpr):
    """The rule's score of raw = iq . kbar; factor is scale / sqrt(D), applied after the clamp."""
    root: tl.constexpr = D**-0.5
    score = tl.minimum(tl.maximum(raw * root, -CLAMP), CLAMP) * factor
    return tl.where(raw != raw, BAD_SCORE, score)  # a clamp may swallow NaN, so raw is asked


@triton.jit
def pack_score(score, index):
    """Finite float32 score and block index >= 0 as one int64: larger is better, ties to the lower
    index.
    """
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # + 0.0 turns -0 into +0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def unpack_score(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def unpack_index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _bit(number: tl.constexpr, bit: tl.constexpr):
    """0 or 1 along the axis of a cube [2] * number that stands for a bit of the index."""
    return tl.reshape(tl.arange(0, 2), [1] * (number - bit - 1) + [2] + [1] * bit)


@triton.jit
def _exchanged(cube, larger_first, number: tl.constexpr, bit: tl.constexpr):
    """Pairs of keys whose indices differ in one bit of the index, in order."""
    other = tl.sum(cube, number - 1 - bit, keep_dims=True) - cube  # wraps, which does no harm
    take_larger = (_bit(number, bit) == 0) == larger_first
    return tl.where((other > cube) == take_larger, other, cube)


@triton.jit
def _merged(cube, number: tl.constexpr, runs: tl.constexpr):
    """Bitonic runs of 2**runs keys of a cube [2] * number, sorted: the first of two best first, the
    second worst first.
    """
    for step in tl.static_range(runs):
        if runs == number:
            cube = _exchanged(cube, True, number, runs - 1 - step)
        else:
            cube = _exchanged(cube, _bit(number, runs) == 0, number, runs - 1 - step)
    return cube


@triton.jit
def best_of(keys, M: tl.constexpr, W: tl.constexpr):
    """The W best of the keys [M], best first, EMPTY behind the last; real keys differ. Both are
    powers of two, W <= 64, M <= 256, W <= M.

    Runs of W keys are sorted, alternately best first and worst first. The larger of each pair of
    two such runs are then the W best of both, and sorted again: a tournament in place.
    """
    # Their logarithms: no function of Python is called in a kernel on every Triton.
    number: tl.constexpr = (
        (M > 1) + (M > 2) + (M > 4) + (M > 8) + (M > 16) + (M > 32) + (M > 64) + (M > 128)
    )
    runs: tl.constexpr = (W > 1) + (W > 2) + (W > 4) + (W > 8) + (W > 16) + (W > 32)
    cube = tl.reshape(keys, [2] * number)
    for i in tl.static_range(1, runs + 1):
        cube = _merged(cube, number, i)
    for left in tl.static_range(number - runs):
        cube = tl.max(cube, number - left - 1 - runs)
        cube = _merged(cube, number - left - 1, runs)
    return tl.reshape(cube, (W,))


@triton.jit
def best_of_rows(keys, M: tl.constexpr, W: tl.constexpr):
    """The W best of each row of keys [R, M], best first, EMPTY behind the last, by W maxima: [R,
    W].
    """
    w = tl.arange(0, W)[None, :]
    best = tl.full((keys.shape[0], W), EMPTY, tl.int64)
    for k in range(W):
        top = tl.max(keys, 1)
        best = tl.where(w == k, top[:, None], best)
        keys = tl.where(keys == top[:, None], EMPTY, keys)
    return best


@triton.jit
def finish_selection(
    keys, entries, floor, inv_sigma, TOPK: tl.constexpr, WINDOW: tl.constexpr, W: tl.constexpr
):
    """Best keys [R, W] -> block ids int32 [R, W], -1 unused, and biases [R, W], 0 unused; only
    columns < TOPK are kept.

    entries [R] is min(WINDOW, p // block + 1): so many values enter entmax, those without a
    candidate as -1e4.
    """
    w = tl.arange(0, W)[None, :]
    real = (keys > EMPTY) & (w < WINDOW)
    counted = real | (w < entries[:, None])
    value = tl.where(real, unpack_score(keys), BAD_SCORE)
    first = tl.sum(tl.where(w == 0, value, 0.0), 1)
    x = tl.where(counted, (value - first[:, None]) * 0.5, 0.0)
    many = w + 1
    i = many.to(tl.float32)
    mean = tl.cumsum(x, 1) / i
    square = tl.cumsum(x * x, 1) / i
    tau = mean - tl.sqrt(tl.maximum((1.0 - i * (square - mean * mean)) / i, 0.0))
    support = tl.maximum(tl.sum(((tau <= x) & counted).to(tl.int32), 1), 1)
    cut = tl.sum(tl.where(many == support[:, None], tau, 0.0), 1)
    prior = tl.maximum(x - cut[:, None], 0.0)
    kept = real & (w < TOPK)
    logp = tl.where(kept, tl.log(tl.maximum(prior * prior, floor)), 0.0)
    number = tl.maximum(tl.sum(kept.to(tl.int32), 1), 1).to(tl.float32)
    bias = (logp - (tl.sum(logp, 1) / number)[:, None]) * inv_sigma
    return tl.where(kept, unpack_index(keys), -1), tl.where(kept, bias, 0.0)


@triton.jit
def token_at(table_ptr, token, ok, stride_cb, stride_ct, P: tl.constexpr):
    """Offset (int64) of tokens of one sequence in the cache, head 0; table_ptr is the sequence's
    row of the table.
    """
    place = tl.load(table_ptr + token // P, mask=ok, other=0).to(tl.int64)
    return place * stride_cb + (token % P).to(tl.int64) * stride_ct


@triton.jit
def slot_at(slot, stride_cb, stride_ct, P: tl.constexpr):
    """Offset (int64) of a slot >= 0 in the cache, head 0."""
    slot = slot.to(tl.int64)
    return (slot // P) * stride_cb + (slot % P) * stride_ct


@triton.jit
def head_at(head, stride_ch):
    """Offset (int64) of a head; head is a number or a constant."""
    return (tl.zeros((), tl.int64) + head) * stride_ch


@triton.jit
def read_int32(ptr, ok):
    """One int32 from four byte values; ptr and ok are scalars. 0 where not ok."""
    byte = tl.arange(0, 4)
    value = tl.load(ptr + byte, mask=ok & (byte < 4), other=0.0).to(tl.float32).to(tl.int32)
    return tl.sum(value << (byte * 8), 0)


@triton.jit
def read_int32s(ptr, ok):
    """int32 [M] from four byte values each; ptr [M] pointers, ok [M]. 0 where not ok."""
    byte = tl.arange(0, 4)[None, :]
    value = tl.load(ptr[:, None] + byte, mask=ok[:, None] & (byte < 4), other=0.0)
    return tl.sum(value.to(tl.float32).to(tl.int32) << (byte * 8), 1)


@triton.jit
def write_int32(ptr, value, ok):
    """One int32 as four byte values; ptr, value and ok are scalars."""
    byte = tl.arange(0, 4)
    part = (value >> (byte * 8)) & 255
    tl.store(ptr + byte, part.to(tl.float32).to(ptr.dtype.element_ty), mask=ok & (byte < 4))


@triton.jit
def write_int32s(ptr, value, ok):
    """int32 [M] as four byte values each; ptr [M] pointers, ok [M]."""
    byte = tl.arange(0, 4)[None, :]
    part = (value[:, None] >> (byte * 8)) & 255
    mask = ok[:, None] & (byte < 4)
    tl.store(ptr[:, None] + byte, part.to(tl.float32).to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def cos_sin(position, turn):
    """cos and sin of position * turn / 2**64 turns, as exact as float32 holds them for any
    position.

    position int32 and turn int64 broadcast. The product wraps, which drops whole turns and nothing
    else; the rest is integer until an angle of at most an eighth of a turn is left for a
    polynomial.
    """
    fraction = ((position.to(tl.int64) * turn) >> 32).to(tl.int32)  # a turn is 2**32
    quarter = ((fraction >> 28) + 2) >> 2  # nearest quarter turn, -2 to 2; no overflow on the way
    rest = fraction - (quarter << 30)
    a = rest.to(tl.float32) * 1.4629180792671596e-09  # pi / 2 / 2**30
    z = a * a
    sin = a + a * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    cos = (
        1.0
        - 0.5 * z
        + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    )
    odd = (quarter & 1) != 0
    c = tl.where(odd, sin, cos)
    s = tl.where(odd, cos, sin)
    c = tl.where(((quarter + 1) & 2) != 0, -c, c)
    s = tl.where((quarter & 2) != 0, -s, s)
    return c, s
