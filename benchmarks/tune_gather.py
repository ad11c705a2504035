"""The gather of one NVIDIA GPU: candidate launch rows, and what a library's call costs over each
order of memory. `benchmarks/vendor_h200.py --gather` runs it.

Each candidate is compared bitwise with a gather by torch. Times: medians of CUDA-graph replays in
us, L2 warm, bf16, 10 heads of 128, cache blocks of 32; "GB/s" counts what is read and written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dash_portable.backends.flash_attn import Copy2, Copy3
from dash_portable.backends.torch_varlen import Varlen
from dash_portable.kernels.gather import GatherRow, gather_row
from dash_portable.platform.detect import current_platform
from dash_portable.segments import Call, Library, Room, gather_one_segment, spans
from dash_portable.segments.call import counted
from dash_portable.segments.fused import Gather
from dash_portable.step import Step

Timer = Callable[[Callable[[], object]], float]
MEMORY = 4.3e12  # bytes read and written a second, measured by a copy
TAIL = 8
WIDTH_OF_SECTORS = 144  # columns whose bytes are whole sectors of the memory
CANDIDATES = (
    GatherRow(heads=1, warps=1),
    GatherRow(heads=1, warps=2),
    GatherRow(heads=1, warps=4),
    GatherRow(heads=1, warps=8),
    GatherRow(heads=2, warps=2),
    GatherRow(heads=2, warps=4),
    GatherRow(heads=2, warps=8),
    GatherRow(heads=4, warps=4),
    GatherRow(heads=4, warps=8),
    GatherRow(heads=1, warps=4, last=True),
    GatherRow(heads=1, warps=4, evict="evict_first"),
    GatherRow(heads=1, warps=4, last=True, evict="evict_first"),
    GatherRow(heads=2, warps=4, last=True, evict="evict_first"),
)


def room_for(step: Step, *, heads_first: bool, pitch: int = 0) -> Room:
    """Scratch of one segment a row; `pitch` columns between keys, by default none to spare."""
    heads, width = step.kv_heads, step.head_dim
    keys = step.num_rows * (step.config.topk * step.config.block + step.config.local)

    def zeros(width: int) -> Tensor:
        shape = (heads, keys, width) if heads_first else (keys, heads, width)
        made = torch.zeros(shape, dtype=step.dtype, device=step.device)
        return made.transpose(0, 1) if heads_first else made

    query = torch.zeros(step.num_rows, step.heads, width + TAIL, dtype=step.dtype)
    query[..., width : width + 2] = 1.0
    return Room(
        query=query.to(step.device),
        key=zeros(pitch or width + TAIL)[..., : width + TAIL],
        value=zeros(width),
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
    whole = room_for(step, heads_first=True)
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
    libraries: dict[str, type[Library]],
) -> None:
    """Print every candidate at every shape, then the libraries' calls over both orders."""
    for count, tokens in shapes:
        step, inputs = decode_step(count, tokens)
        exact = exact_room(step, inputs)
        shipped = gather_row(current_platform(step.device).arch)
        print(f"\n{count} rows, {tokens} tokens; shipped {shipped}", flush=True)
        third = libraries.get("fa3")
        for row in CANDIDATES:
            room = room_for(step, heads_first=True)
            print(candidate(step, inputs, exact, room, row, third, microseconds), row, flush=True)
        for layout in ({"heads_first": False}, {"heads_first": True, "pitch": WIDTH_OF_SECTORS}):
            room = room_for(step, **layout)
            told = candidate(step, inputs, exact, room, shipped, third, microseconds)
            print(told, f"shipped, {layout}", flush=True)
        try:
            for name, library in libraries.items():
                compare_orders(name, step, exact, library, microseconds)
            if third is not None:
                dense_call(step, exact, microseconds)
        except RuntimeError as error:  # a library that refuses an order: the gather goes on
            print(f"  {type(error).__name__}: {error}", flush=True)
        torch.cuda.empty_cache()


def candidate(
    step: Step,
    inputs: tuple[Tensor, ...],
    exact: Room,
    room: Room,
    row: GatherRow,
    third: type[Library] | None,
    microseconds: Timer,
) -> str:
    """Right or not, time, rate, share of the floor, and the time with FA3's call behind it."""
    spare = room.key.stride(0) - step.head_dim  # columns that may be written behind a head's
    tail = spare if spare == 2 * TAIL else TAIL
    gather = Gather(step, step.num_rows, room, tail=tail, row=row)
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


def compare_orders(
    name: str, step: Step, exact: Room, library: type[Library], microseconds: Timer
) -> None:
    """A library's call alone, heads first and tokens first, and whether both agree."""
    width = library.value_width_for(exact.key.shape[-1], step.head_dim)
    value = torch.nn.functional.pad(exact.value, (0, width - step.head_dim))
    orders = {
        "heads first": Room(
            query=exact.query,
            key=exact.key,
            value=value.transpose(0, 1).contiguous().transpose(0, 1),
        ),
        "tokens first": Room(
            query=exact.query, key=exact.key.contiguous(), value=value.contiguous()
        ),
    }
    for deterministic in (False, True) if name == "fa3" else (False,):
        planned = library(call_for(step, exact, width, deterministic=deterministic))
        out = torch.empty_like(exact.query[..., : step.head_dim]).contiguous()
        answers, told = list[Tensor](), list[str]()
        for order, room in orders.items():
            run = partial(planned.attend_into, room.query, room.key, room.value, out)
            run()
            answers.append(out.clone())
            told.append(f"{order} {microseconds(run):.1f}")
        same = torch.allclose(answers[0], answers[1], rtol=2**-7, atol=2**-9)
        split = ", one split" if deterministic else ""
        print(f"  {name} call{split}: {', '.join(told)}, same: {same}", flush=True)


def dense_call(step: Step, room: Room, microseconds: Timer) -> None:
    """FA3's call as a batch of equal runs, which needs no lengths: is it worth a way of its own?"""
    rows, slots = step.num_rows, len(room.key) // step.num_rows
    key, value = (x.view(rows, slots, *x.shape[1:]) for x in (room.key, room.value))
    query = room.query[:, None]
    for splits in (0, 1):

        def once(splits: int = splits) -> None:
            torch.ops._vllm_fa3_C.fwd(
                *(query, key, value, None, None, None, None, None, None, None, None, None, None),
                *(None, None, None, None, None, None, None, None, None, None),
                *(step.head_dim**-0.5, False, -1, -1, 0.0, True, None, splits, None),
                *(0, None, 1, 0, None),
            )

        print(f"  fa3 as a dense batch, {splits} splits: {microseconds(once):.1f}")


LIBRARIES: dict[str, type[Library]] = {"fa3": Copy3, "fa2": Copy2, "torch": Varlen}
