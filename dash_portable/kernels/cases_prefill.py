"""Compile cases of the prefill kernels: the types, constants and launch rows of real launches."""

from __future__ import annotations

from typing import Any

from dash_portable.audit.case import EVERYWHERE, Case, Launch

from . import attend_prefill, group_rows, select_prefill, union
from .launch import WIDE, power_of_two
from .launch_prefill import PREFILL, WIDER, WIDER_FLOAT32, PrefillRow, prefill_row

HQ, TOPK, W = 10, 12, 16
RDNA = ("gfx1100", "gfx1151", "gfx1201")
FLOAT32_FEW = dict.fromkeys(
    ("sm86", "sm89", "sm90", "sm100", "sm120"), "two registers, of float32 only"
)
# Arc A has 64 KB, and Intel's Triton 3.3 keeps both tiles; the dispatcher refuses it there.
NO_ROOM = dict.fromkeys(("dg2", "generic"), "keys and values of a block do not fit 64 KB")
FLOAT32_SMALL = dict.fromkeys(("sm86", "sm89"), "float32 has no matrix units of its own there")
FLOAT32_SPILLS = dict.fromkeys(RDNA, "float32 without matrix units: for tests, not for speed")
WIDE_SPILLS = dict.fromkeys(RDNA, "a wide head's operands of 16 x 16 products, 32 threads a warp")
WIDE_FEW = {"sm120": "two registers, of wide heads only"}
UNION_SPILLS = dict.fromkeys(("sm86", "sm89"), "three registers")
TILE_SPILLS = dict.fromkeys(RDNA, "a few registers; 64 rows are the tile of all the kernels")


def _launches(make: Any, dtype: str = "bf16", width: int = 128) -> dict[str, tuple[Launch, ...]]:
    """The launch of every arch that has a row, and of all the others."""
    found = {}
    for arch in WIDER_FLOAT32 if dtype == "fp32" else {**PREFILL, **WIDER}:
        row: PrefillRow = prefill_row(arch, 4 if dtype == "fp32" else 2, width=width)
        one: Launch = make(row)
        consts = {**one.consts, "PDL": row.dependent}
        options = {**one.options, **({"launch_pdl": True} if row.dependent else {})}
        found[EVERYWHERE if arch == "*" else arch] = (one._replace(consts=consts, options=options),)
    return found


def _spills(dtype: str, width: int) -> dict[str, str]:
    """Where kernels that take matrix products may spill."""
    if dtype == "fp32":
        return FLOAT32_SPILLS
    return WIDE_SPILLS if width > WIDE else {}


def _ints(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def _pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}")


def _strides(*names: str) -> dict[str, str]:
    return {f"stride_{name}": "i32:16" for name in names}


def _group_cases() -> dict[str, Case]:
    rows = {"ROWS": group_rows.CHUNK}
    fields = {"FIELDS": group_rows.TILE_FIELDS}
    common = ("page_ptr", "before_ptr")
    return {
        "rows_class": Case(
            group_rows.rows_class_kernel,
            _pointers(
                "i32",
                "seq_ptr",
                "pos_ptr",
                "query_page_ptr",
                "num_pages_ptr",
                "start_ptr",
                "range_ptr",
            )
            | {"cache_ptr": "*bf16"}
            | _pointers("i32", "table_ptr", "first_ptr", "last_ptr", "page_ptr", "part_ptr")
            | _ints("num_rows", "entries", "stride_sr", "stride_rr", "stride_tr")
            | _strides("cb", "ch", "ct"),
            {
                "HEADS": HQ,
                "D": 128,
                "P": 64,
                "BLOCK": 32,
                "LOCAL_BLOCKS": 4,
                "HAS_PAGES": True,
                "GIVEN": False,
            }
            | rows,
        ),
        "rows_count": Case(
            group_rows.rows_count_kernel,
            _pointers("i32", "pos_ptr", "page_ptr", "part_ptr", "before_ptr") | _ints("num_rows"),
            rows,
        ),
        "rows_tiles": Case(
            group_rows.rows_tiles_kernel,
            _pointers("i32", "query_start_ptr", "before_ptr", "seq_tile_ptr")
            | _ints("num_rows", "num_seqs"),
            {"TILE": 64, "SEQS": 256},
        ),
        "rows_order": Case(
            group_rows.rows_order_kernel,
            _pointers(
                "i32",
                "seq_ptr",
                "pos_ptr",
                "query_start_ptr",
                *common,
                "seq_tile_ptr",
                "order_ptr",
                "tile_ptr",
            )
            | _ints("num_rows", "num_seqs", "num_tiles", "row_programs", "steps"),
            {"TILE": 64} | rows | fields,
        ),
    }


def _select_case(dtype: str, width: int, stage: str) -> Case:
    lists = ("first_ptr", "last_ptr", "page_ptr", "pos_ptr", "ids_ptr", "redo_count_ptr")
    types = (
        _pointers(dtype, "query_ptr", "summary_ptr")
        | _pointers("i32", "range_ptr", *lists)
        | {"bias_ptr": "*fp32", "factor": "fp32", "floor": "fp32", "inv_sigma": "fp32"}
        | _strides("sr", "rr")
    )
    few = _pointers("i32", "few_ptr", "best_ptr")
    tiles = _pointers("i32", "tile_ptr", "redo_ptr")
    consts: dict[str, Any] = {
        "D": width,
        "DP": power_of_two(width),
        "BLOCK": 32,
        "TOPK": TOPK,
        "WINDOW": 16,
        "W": W,
        "HAS_PAGES": True,
    }
    fields = {"FIELDS": group_rows.TILE_FIELDS}
    spills = _spills(dtype, width)
    if stage == "redo":
        return Case(
            select_prefill.select_redo_kernel,
            types | tiles | _ints("num_rows"),
            consts | fields,
            _launches(
                lambda r: Launch(r.redo_warps, 0, {"TILE": r.tile, "GROUPS": r.select_groups}),
                dtype,
                width,
            ),
            may_spill=spills,
        )
    if stage == "group":
        return Case(
            select_prefill.select_group_kernel,
            types | few,
            consts,
            _launches(
                lambda r: Launch(
                    r.few_warps, 0, {"TILE": r.few_tile or r.tile, "GROUPS": r.select_groups}
                ),
                dtype,
                width,
            ),
            matrix=dtype != "fp32",
            may_spill=spills
            | (FLOAT32_FEW if dtype == "fp32" else {})
            | (WIDE_FEW if width > WIDE else {}),
        )
    return Case(
        select_prefill.select_tile_kernel,
        types | few | tiles | _pointers("i32", "order_ptr") | _ints("num_rows"),
        consts | fields | {"ALONE": stage in ("alone", "short")},
        _launches(
            lambda r: Launch(
                r.select_warps,
                0,
                {"TILE": r.tile, "STAGES": r.select_stages}
                | {"GROUPS": r.groups_of(1) if stage == "short" else r.select_groups},
                r.select_options,
            ),
            dtype,
            width,
        ),
        matrix=dtype != "fp32",
        wide=dtype != "fp32",
        may_spill=spills | (FLOAT32_SMALL if dtype == "fp32" else {}),
    )


def _union_cases() -> dict[str, Case]:
    fields = {"FIELDS": group_rows.TILE_FIELDS}
    pairs = {"TOPK": TOPK, "W": W} | fields
    ints = ("max_blocks", "keys", "chunk_tiles")
    return {
        "union": Case(
            union.union_kernel,
            _pointers(
                "i32",
                "ids_ptr",
                "tile_ptr",
                "order_ptr",
                "pos_ptr",
                "table_ptr",
                "count_ptr",
                "union_ptr",
                "place_ptr",
            )
            | _pointers("i32", "hist_ptr", "listed_count_ptr", "listed_ptr", "rank_ptr")
            | _pointers("fp32", "bias_ptr", "weight_ptr")
            | _pointers("bf16", "out_ptr")
            | _ints(*ints, "num_rows", "limit", "stride_tr"),
            pairs | {"P": 64, "BLOCK": 32, "LOCAL": 128, "WIDTH": HQ * 128},
            _launches(
                lambda r: Launch(
                    r.union_warps,
                    0,
                    {
                        "TILE": r.tile,
                        "ROOM": r.union_room,
                        "BLOCKS": r.tile_blocks,
                        "SPAN": union.SPAN,
                        "APART": 8,
                    },
                )
            ),
            may_spill=UNION_SPILLS,
        ),
        "invert_sum": Case(
            union.invert_sum_kernel,
            _pointers("i32", "hist_ptr", "part_ptr") | _ints("keys", "parts"),
            {"STEP": union.KEYS, "TILE": 64, "APART": 8},
            _launches(lambda _: Launch(8)),
        ),
        "invert_offset": Case(
            union.invert_offset_kernel,
            _pointers("i32", "hist_ptr", "part_ptr", "offset_ptr", "first_ptr")
            | _ints("keys", "parts"),
            {"STEP": union.KEYS, "TILE": 64, "APART": 8},
            _launches(lambda _: Launch(8)),
        ),
        "invert_place": Case(
            union.invert_place_kernel,
            _pointers(
                "i32",
                "ids_ptr",
                "tile_ptr",
                "order_ptr",
                "count_ptr",
                "rank_ptr",
                "offset_ptr",
                "first_ptr",
            )
            | _pointers("i32", "pair_ptr", "entry_ptr")
            | _ints(*ints, "num_tiles", "chunk_pairs", "entries", "entry_programs", "steps"),
            pairs | {"ENTRIES": union.ENTRIES},
            _launches(lambda r: Launch(4, 0, {"TILE": r.tile, "PAIR_TILE": r.pair_tile})),
        ),
    }


def _attend_cases(dtype: str, width: int, cache_block: int, group: int = 1) -> dict[str, Case]:
    shape = {"HQ": HQ, "D": width, "DP": power_of_two(width), "FIELDS": group_rows.TILE_FIELDS}
    cached = shape | {"G": group, "P": cache_block, "BLOCK": 32, "LOCAL": 128}
    rows = (
        _pointers(dtype, "query_ptr", "cache_ptr")
        | _pointers("i32", "table_ptr", "tile_ptr", "order_ptr", "pos_ptr")
        | {"scale": "fp32"}
        | _ints("stride_tr")
        | _strides("cb", "ch", "ct")
    )
    name = f"{dtype}_d{width}_p{cache_block}"
    matrix, spills = dtype != "fp32", _spills(dtype, width)
    absent = NO_ROOM if dtype == "fp32" and width > WIDE else {}
    return {
        f"attend_tile_{name}": Case(
            attend_prefill.attend_tile_kernel,
            rows
            | _pointers("i32", "count_ptr", "union_ptr", "place_ptr")
            | _pointers("fp32", "weight_ptr", "mass_ptr")
            | _pointers(dtype, "out_ptr"),
            cached,
            _launches(
                lambda r: Launch(
                    r.tile_warps,
                    0,
                    {
                        "TILE": r.tile,
                        "ROOM": r.union_room,
                        "BLOCKS": r.tile_blocks,
                        "STEP": r.tile_step,
                        "STAGES": r.tile_stages,
                        "LOCAL_STAGES": r.local_stages,
                    },
                    r.tile_options,
                ),
                dtype,
                width,
            ),
            matrix=matrix,
            wide=matrix,
            may_spill=TILE_SPILLS | spills,
            absent=absent,
        ),
        f"attend_pair_{name}": Case(
            attend_prefill.attend_pair_kernel,
            rows
            | _pointers("fp32", "bias_ptr", "part_mass_ptr")
            | _pointers("i32", "first_ptr", "pair_ptr", "entry_ptr")
            | _pointers(dtype, "part_ptr")
            | _ints("keys_total", "chunk_pairs", "entries", "chunk", "chunk_tile"),
            cached | {"TOPK": TOPK},
            _launches(
                lambda r: Launch(
                    r.pair_warps,
                    0,
                    {
                        "PAIR_TILE": r.pair_tile,
                        "HEADS": r.pair_heads,
                        "HEADS_UP": 16,
                        "N": 32,
                        "STAGES": r.pair_stages,
                    },
                    r.pair_options,
                ),
                dtype,
                width,
            ),
            matrix=matrix,
            wide=matrix,
            may_spill=spills | (FLOAT32_SMALL if dtype == "fp32" else {}),
            absent=absent,
        ),
        f"attend_merge_{name}": Case(
            attend_prefill.attend_merge_kernel,
            _pointers("i32", "tile_ptr", "order_ptr", "listed_ptr", "listed_count_ptr", "ids_ptr")
            | _pointers("fp32", "mass_ptr", "part_mass_ptr")
            | _pointers(dtype, "part_ptr", "out_ptr")
            | _ints("chunk", "chunk_tiles"),
            shape | {"TOPK": TOPK, "W": W},
            _launches(
                lambda r: Launch(r.merge_warps, 0, {"TILE": r.tile, "ROWS": r.merge_rows}),
                dtype,
                width,
            ),
            may_spill=spills | (WIDE_FEW if width > WIDE else {}),
        ),
    }


PREFILL_CASES: dict[str, Case] = {
    **_group_cases(),
    **_union_cases(),
    **{
        f"select_{stage}_{dtype}_d{width}": _select_case(dtype, width, stage)
        for stage in ("short", "alone", "tile", "group", "redo")
        for dtype, width in (
            ("bf16", 128),
            ("fp16", 64),
            ("fp32", 128),
            ("bf16", 256),
            ("fp32", 256),
        )
    },
    **_attend_cases("bf16", 128, 64),
    **_attend_cases("fp16", 64, 16),
    **_attend_cases("fp32", 128, 64),
    **_attend_cases("bf16", 256, 64),
    **_attend_cases("fp32", 256, 64),
}
