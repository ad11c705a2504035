"""The gather of one NVIDIA GPU: candidate launch rows, alone and with FA3's call behind them.
`benchmarks/vendor_h200.py --gather` runs it.

Each candidate is compared bitwise with a gather by torch. Times: medians of CUDA-graph replays in
us, L2 warm, bf16, 10 heads of 128, cache blocks of 32; "GB/s" counts what is read and written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dash_portable.kernels.gather import GatherRow, gather_row
from dash_portable.platform.detect import current_platform
from dash_portable.segments import Call, Library, Room, gather_one_segment, spans
from dash_portable.segments.call import counted
from dash_portable.segments.fused import Gather
from dash_portable.step import Step

Timer = Callable[[Callable[[], object]], float]
MEMORY = 4.3e12  # bytes read and written a second, measured by a copy
TAIL = 8
CANDIDATES = (
    GatherRow(heads=2, warps=4),
    GatherRow(heads=1, warps=8),
    GatherRow(heads=2, warps=8),
    GatherRow(heads=4, warps=8),
    GatherRow(heads=2, warps=8, last=True),
    GatherRow(heads=2, warps=4, tail=16),
    GatherRow(heads=1, warps=8, tail=16),
    GatherRow(heads=2, warps=8, tail=16),
    GatherRow(heads=4, warps=8, tail=16),
    GatherRow(heads=2, warps=8, tail=16, last=True),
)


def room_for(step: Step, tail: int = TAIL) -> Room:
    """Scratch of one segment a row; `tail` columns from a head's keys to the next head."""
    heads, width = step.kv_heads, step.head_dim
    keys = step.num_rows * (step.config.topk * step.config.block + step.config.local)
    options = {"dtype": step.dtype, "device": step.device}
    query = torch.zeros(step.num_rows, step.heads, width + TAIL, **options)
    query[..., width : width + 2] = 1.0
    return Room(
        query=query,
        key=torch.zeros(keys, heads, width + tail, **options)[..., : width + TAIL],
        value=torch.zeros(keys, heads, width, **options),
    )


def call_for(step: Step, room: Room, value_width: int, *, deterministic: bool = False) -> Call:
    slots = len(room.key) // step.num_rows
    return Call(
        runs=step.num_rows,
        queries=1,
        heads=step.heads,
        kv_heads=step.kv_heads,
        width=room.key.shape[-1],
        value_width=value_width,
        starts_k=counted(step.num_rows, slots, step.device),
        longest=slots,
        scale=step.head_dim**-0.5,
        dtype=step.dtype,
        device=step.device,
        graph=True,
        deterministic=deterministic,
    )


def exact_room(step: Step, inputs: tuple[Tensor, ...]) -> Room:
    """What torch gathers, in passes that fit."""
    query, cache, ids, bias, _ = inputs
    whole = room_for(step)
    slots = len(whole.key) // step.num_rows
    for start in range(0, step.num_rows, 16):
        part = slice(start, min(start + 16, step.num_rows))
        keys = slice(part.start * slots, part.stop * slots)
        into = Room(query=whole.query[part], key=whole.key[keys], value=whole.value[keys])
        block, local = step.config.block, step.config.local
        where = spans(step.row_pos[part], ids[part], block=block, local=local)
        gather_one_segment(
            query[part],
            cache,
            where,
            bias[part],
            step.row_seq[part],
            step.block_table,
            block=block,
            local=local,
            into=into,
        )
    return whole


def differs(room: Room, exact: Room) -> str:
    """Keys, values and queries bitwise; the two bias columns by their sum, since the high part may
    be rounded either way."""
    width = room.value.shape[-1]
    # Torch masks with both columns, the kernel with one: both are far below any prior here.
    told, wanted = (x.key[..., width:].float().sum(-1).clamp(min=-1e4) for x in (room, exact))
    same = {
        "keys": torch.equal(room.key[..., :width], exact.key[..., :width]),
        "values": torch.equal(room.value, exact.value),
        "queries": torch.equal(room.query, exact.query),
        "priors": torch.allclose(told, wanted, rtol=2**-13, atol=1e-5),
    }
    return " ".join(name for name, equal in same.items() if not equal)


def tune(
    shapes: tuple[tuple[int, int], ...],
    decode_step: Callable[[int, int], tuple[Step, Any]],
    microseconds: Timer,
    third: type[Library] | None,
) -> None:
    """Print every candidate at every shape; `third`: FA3, whose call follows the gather."""
    for count, tokens in shapes:
        step, inputs = decode_step(count, tokens)
        exact = exact_room(step, inputs)
        shipped = gather_row(current_platform(step.device).arch)
        print(f"\n{count} rows, {tokens} tokens; shipped {shipped}", flush=True)
        for row in CANDIDATES:
            print(candidate(step, inputs, exact, row, third, microseconds), row, flush=True)
        torch.cuda.empty_cache()


def candidate(
    step: Step,
    inputs: tuple[Tensor, ...],
    exact: Room,
    row: GatherRow,
    third: type[Library] | None,
    microseconds: Timer,
) -> str:
    """Right or not, time, rate, share of the floor, and the time with FA3's call behind it."""
    room = room_for(step, row.tail or TAIL)
    gather = Gather(step, step.num_rows, room, tail=row.tail or TAIL, row=row)
    alone = partial(gather, step, slice(0, step.num_rows), *inputs[:4])
    alone()
    wrong = differs(room, exact)
    time = microseconds(alone)
    moved = 2 * (2 * exact.value.numel() + exact.key.numel() + exact.value.numel())
    share = moved / MEMORY * 1e6 / time
    text = f"{time:7.1f} us {moved / time / 1e3:5.0f} GB/s, {share:4.0%} of 4.3 TB/s"
    if third is not None:
        planned = third(call_for(step, room, step.head_dim))

        def both() -> None:
            alone()
            planned.attend_into(room.query, room.key, room.value, inputs[4])

        text += f"; with FA3 {microseconds(both):6.1f}"
    return f"{text}{'  WRONG: ' + wrong if wrong else ''} "
