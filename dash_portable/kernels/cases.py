"""CASES: every kernel as the package launches it, so that it can be compiled where there is no
GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton.language as tl

from dash_portable.audit.case import EVERYWHERE, Case
from dash_portable.audit.case import Launch as Row
from dash_portable.audit.targets import ALL_TARGETS

from . import (
    attend_decode,
    cases_prefill,
    gather,
    launch,
    merge,
    page_table,
    select_decode,
    store,
    store_tiles,
    summaries,
)
from .primitives import NUMBERS

# The model's shapes: 10 heads of 128, blocks of 32, cache blocks of 64.
H, D, P, BS, LOCAL, TOPK, WINDOW = 10, 128, 64, 32, 4, 12, 16
WIDEST = 256  # of a head that a configuration may have
_SIZES = {"H": H, "D": D, "P": P}
_GIVEN = {"POSITIONS": 1, "PAGE_TABLE": False}
_BLOCKS = {"BS": BS, "BT": BS}
_SELECT_TYPES = {"scale": "fp32", "floor": "fp32", "inv_sigma": "fp32"}
_INTS = [
    "row_pos",
    "row_seq",
    "roles",
    "positions",
    "table",
    "pages",
    "ticket",
    "ids",
    "order",
    "live",
    "seq_lens",
    "coords",
    "start",
    "end",
    "tile",
    "prefix",
    "given",
    "range",
    "used",
    "length",
]
_FLOAT32_NAMES = ("bias", "score", "group", "sum", "mass", "lse")
_POINTERS = {f"{name}_ptr": "*i32" for name in _INTS} | {
    "slots_ptr": "*i64",
    "turn_ptr": "*i64",
    **{f"{name}_ptr": "*fp32" for name in _FLOAT32_NAMES},
}
_FLOATS = [
    "q",
    "k",
    "v",
    "iq",
    "ik",
    "query",
    "index",
    "cache",
    "head_cls",
    "side",
    "key",
    "value",
    "out",
    "merged",
    "wide",
]
_NUMBERS = dict.fromkeys((*NUMBERS, "per_block"), "i32")
_ODD_STRIDES = {
    "stride_table",
    "stride_pages",
    "stride_given",
    "stride_ls",
    "stride_kt",
    "stride_kh",
    "stride_vt",
    "stride_vh",
}  # no multiples of 16 in general
_WIDE_TILES = dict.fromkeys(
    ("gfx1100", "gfx1151", "gfx1201"),
    "a key and a value tile in float32 or as operands of 16 x 16 products, 32 threads a warp",
)
_FLOAT32 = dict.fromkeys(("sm86", "sm89", "sm120"), "a register or two, of float32 only")
_TICKETS = "each row is ended by its last program, on a ticket"
_AHEAD = {"sm90": "a register, of float16 only, where the next tile is asked for ahead"}


def _types(kernel: Any, dtype: str, consts: Mapping[str, Any]) -> dict[str, str]:
    """Type texts of a kernel's run-time arguments, by their names: those that are neither constants
    nor among `consts`.
    """
    known = _POINTERS | {f"{name}_ptr": f"*{dtype}" for name in _FLOATS} | _NUMBERS | _SELECT_TYPES
    types = {}
    for name in kernel.arg_names:
        if name in consts or kernel.fn.__annotations__.get(name) is tl.constexpr:
            continue
        if name.startswith("stride_"):
            types[name] = "i32" if name in _ODD_STRIDES else "i32:16"
        else:
            types[name] = known[name]
    return types


def _case(
    kernel: Any, dtype: str, consts: Mapping[str, Any], rows: Mapping[str, tuple[Row, ...]]
) -> Case:
    named = set(consts).union(*(row.consts for group in rows.values() for row in group))
    return Case(kernel, _types(kernel, dtype, dict.fromkeys(named)), consts, rows)


def _warps(number: int) -> Mapping[str, tuple[Row, ...]]:
    return {EVERYWHERE: (Row(warps=number),)}


def _select_rows(*, fused: bool) -> dict[str, tuple[Row, ...]]:
    """The rows of launch.SELECT, each at a context of 32K."""
    table = {}
    for arch, rows in launch.SELECT.items():
        found = []
        for row in rows:
            count, blocks = row.rows or 256, row.blocks or 4096
            groups = max(launch.power_of_two(-(-blocks // row.tile) * row.tile // launch.GROUP), 16)
            consts = {
                "TILE": row.tile,
                "SPLIT": launch.split_of(row, count, blocks),
                "CHUNK": min(groups, launch.CHUNK),
                "TICKET": row.ticket,
                "AHEAD": row.ahead,
                "NARROW": launch.NARROW,
            }
            if fused:
                heads = min(launch.JOINT_HEADS, launch.power_of_two(H))
                consts |= {
                    "HEADS": heads,
                    "PARTS": -(-H // heads),
                    "PDL": launch.offered(row).dependent,
                }
            found.append(Row(warps=row.warps, consts=consts, label=f"{count}x{blocks}"))
        table[arch] = tuple(found)
    return table


def _merge_rows() -> dict[str, tuple[Row, ...]]:
    """Only where a ticket is not allowed; an arch whose rows all have one launches none."""
    table = {}
    for arch, rows in launch.SELECT.items():
        table[arch] = tuple(
            Row(
                warps=launch.MERGE_WARPS,
                consts={"TILE": row.tile, "CHUNK": launch.CHUNK},
                label=str(i),
            )
            for i, row in enumerate(rows)
            if not row.ticket
        )
    return table


def _without(table: Mapping[str, tuple[Row, ...]]) -> list[str]:
    """The targets that a table of rows leaves without any."""
    return [name for name in ALL_TARGETS if not table.get(name, table[EVERYWHERE])]


def _attend_rows(group: int, dtype: str, width: int = D) -> dict[str, tuple[Row, ...]]:
    """The rows of launch.ATTEND, and the one of the deterministic mode."""
    table, itemsize = {}, 4 if dtype == "fp32" else 2
    for arch in {**launch.ATTEND, **launch.FLOAT32_WIDE_DOT_WARPS}:
        rows = launch.ATTEND.get(arch, launch.ATTEND[EVERYWHERE])
        selecting = launch.SELECT.get(arch, launch.SELECT[EVERYWHERE])
        dependent = any(launch.offered(row).dependent for row in selecting)
        named = {
            "single" if row.single else f"{row.programs or 'any'}": launch.fitted(
                row, arch, width, itemsize
            )
            for row in rows
            if group == 1 or not row.single
        } | {"fixed": launch.attend_row(arch, 1, True, width, itemsize)}
        table[arch] = tuple(
            Row(
                warps=launch.attend_warps(row, group, itemsize, width),
                consts={
                    "SPLIT": row.split,
                    "TICKET": row.ticket,
                    "DOT": group > 1 or (row.dot and dtype != "fp32"),
                    "STAGES": row.stages,
                    "PDL": dependent,
                },
                options={"launch_pdl": True} if dependent else {},
                label=label,
            )
            for label, row in named.items()
        )
    return table


def _gather_rows() -> dict[str, tuple[Row, ...]]:
    return {
        arch: (
            Row(
                warps=row.warps,
                consts={"HEADS": row.heads, "QH": row.heads, "PARTS": -(-H // row.heads)}
                | {"LAST": row.last, "TAIL": row.tail or 8},
            ),
        )
        for arch, row in gather.GATHER.items()
    }


def _sized_cases(dtype: str, width: int = D) -> dict[str, Case]:
    """The kernels that a dtype and a head's width make others."""
    sizes, half, block, page = _SIZES | {"D": width}, {"HP": width // 2}, _BLOCKS, {"PAGE_MOD": 2}
    choice = {"LOCAL": LOCAL, "TOPK": TOPK, "WINDOW": WINDOW}
    row_sizes = sizes | {"G": 1} | half | block | page
    stored = {"HEADS": launch.STORE_ROW_HEADS, "PARTS": -(-H // launch.STORE_ROW_HEADS)}
    store_warps = {arch: launch.store_warps(arch, width) for arch in launch.STORE_WARPS}
    fused = row_sizes | _GIVEN | {"HEAD_CLS": True} | choice
    chosen = sizes | half | block | page | _GIVEN | choice
    attend = {"H": H, "D": width, "DP": width, "P": P, "LOCAL": LOCAL, "TOPK": TOPK}
    attend |= block | {"ALONE": True}
    cases = {
        f"store_row_{dtype}": _case(
            store.store_row_kernel,
            dtype,
            row_sizes | _GIVEN | {"HEAD_CLS": True} | stored,
            {arch: (Row(warps=row),) for arch, (_, row) in store_warps.items()},
        ),
        f"store_tile_{dtype}": _case(
            store_tiles.store_tile_kernel,
            dtype,
            row_sizes
            | {"POSITIONS": 1, "HEAD_CLS": True, "HEADS": launch.STORE_HEADS}
            | {"PARTS": -(-H // launch.STORE_HEADS)},
            {arch: (Row(warps=tile),) for arch, (tile, _) in store_warps.items()},
        ),
        f"store_select_{dtype}": _case(
            select_decode.store_select_kernel, dtype, fused, _select_rows(fused=True)
        )._replace(may_spill=_FLOAT32 if dtype == "fp32" else {}),
        f"select_decode_{dtype}": _case(
            select_decode.select_decode_kernel,
            dtype,
            chosen | {"SIDE": False},
            _select_rows(fused=False),
        )._replace(may_spill=_AHEAD if dtype == "fp16" else {}),
        f"summaries_block_{dtype}": _case(
            summaries.summaries_block_kernel,
            dtype,
            sizes | half | block | {"RANGES": True, "PREFIX": False, "WRITE": False},
            _warps(launch.SUMMARY_WARPS),
        ),
        f"summaries_copy_{dtype}": _case(
            summaries.summaries_copy_kernel,
            dtype,
            sizes | half | {"BS": BS, "TILE": launch.COPY_TILE},
            _warps(launch.SUMMARY_WARPS),
        ),
        f"attend_decode_{dtype}": _case(
            attend_decode.attend_decode_kernel,
            dtype,
            attend | {"G": 1, "TILE_H": 16},
            _attend_rows(1, dtype, width),
        ),
        f"attend_decode_group_{dtype}": _case(
            attend_decode.attend_decode_kernel,
            dtype,
            attend | {"G": 8, "TILE_H": 16},
            _attend_rows(8, dtype, width),
        )._replace(
            matrix=dtype != "fp32",
            may_spill=_WIDE_TILES | (_FLOAT32 if dtype == "fp32" else {}),
            absent=cases_prefill.NO_ROOM if dtype == "fp32" and width > launch.WIDE else {},
        ),
        f"gather_{dtype}": _case(
            gather.gather_segments_kernel,
            dtype,
            {"H": H, "G": 1, "D": width, "DP": width, "P": P, "BS": BS}
            | {"LOCAL": LOCAL, "TOPK": TOPK, "WIDE": width + 8},
            _gather_rows(),
        )._replace(may_spill=_FLOAT32 if dtype == "fp32" else {}),
        f"merge_{dtype}": _case(
            merge.merge_segments_kernel,
            dtype,
            {"HQ": H, "D": width, "DP": width, "SEGMENTS": TOPK + 1, "S": 16, "BIAS": True},
            _warps(1),
        ),
    }
    return cases


def _cases() -> dict[str, Case]:
    cases = {}
    for dtype in ("bf16", "fp16", "fp32"):
        cases |= _sized_cases(dtype)
    for dtype in ("bf16", "fp32"):
        found = _sized_cases(dtype, WIDEST)
        if dtype == "fp32":
            del found["gather_fp32"]  # for libraries, whose numbers have 16 bits
        cases |= {f"{name}_d{WIDEST}": case for name, case in found.items()}
    coordinates = _SIZES | _GIVEN | {"TILE": launch.COORDINATES_TILE}
    pages = _SIZES | {"GIVEN": False, "WRITE": False, "TILE": launch.PAGES_TILE}
    sum_up = {"HQ": H, "D": D, "DP": D, "SPLIT": 8}
    merging = _merge_rows()
    merged = {"BS": BS, "TOPK": TOPK, "WINDOW": WINDOW}
    cases |= {
        "store_coordinates": _case(
            store_tiles.store_coordinates_kernel,
            "bf16",
            coordinates,
            _warps(launch.COORDINATES_WARPS),
        ),
        "summaries_pages": _case(
            summaries.summaries_pages_kernel, "bf16", pages, _warps(launch.SUMMARY_WARPS)
        ),
        "select_merge": _case(select_decode.select_merge_kernel, "bf16", merged, merging)._replace(
            absent=dict.fromkeys(_without(merging), _TICKETS)
        ),
        "page_table": _case(
            page_table.page_table_kernel,
            "bf16",
            {
                "P": P,
                "PAGE": BS,
                "BS": BS,
                "WINDOW": LOCAL * BS,
                "TOPK": TOPK,
                "S": 16,
                "C": LOCAL + 1,
            },
            _warps(1),
        ),
        "attend_decode_merge": _case(attend_decode.attend_merge_kernel, "bf16", sum_up, _warps(1)),
        f"attend_decode_merge_d{WIDEST}": _case(
            attend_decode.attend_merge_kernel,
            "bf16",
            sum_up | {"D": WIDEST, "DP": WIDEST},
            _warps(1),
        ),
    }
    return cases


CASES = _cases() | cases_prefill.PREFILL_CASES
