"""Launch rows of the prefill kernels: tiles, warps and stages by arch. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .launch import RDNA, WIDE, offered

NOTHING: Mapping[str, Any] = MappingProxyType({})
LEAST_GROUPS = 32  # fewer are not worth a kernel of their own


class PrefillRow(NamedTuple):
    """How the prefill kernels are launched on one arch.

    tile            rows of one tile of the grouped order
    select_*        groups (blocks of one step), warps, stages, further options of the first pass
    few_*           of the pass over a row's doubtful groups: warps, most programs, and rows of its
                    matrix products where fewer than a tile give the same bits; 0: a tile
    redo_warps      of the pass over all blocks of a row
    union_limit     largest union of a tile that is walked for all its rows; a tile with more goes
                    by block. 0: all go by block
    union_all       steps whose sequences have no more blocks than this have no tile by block, which
                    saves the launches
    tile_*          the tile kernel: union blocks in one step, local keys in one step, its options
    local_stages    of its loop over the local keys
    budget          bytes for the partial results of one chunk of tiles
    pair_*          the kernel by block: rows of one program, heads that it walks
    beside          lists by block and their attention on a second stream, beside the tiles: the one
                    waits for L2, the other for its own instructions. Where it was run
    dependent       programmatic dependent launch, where it was run
    merge_*         of the merge: rows taken together, warps, and the most programs, which take
                    such rows one after another
    """

    tile: int = 64
    select_groups: int = 64
    select_warps: int = 4
    select_stages: int = 3
    select_options: Mapping[str, Any] = NOTHING
    few_warps: int = 4
    few_programs: int = 4224
    few_tile: int = 0
    redo_warps: int = 4
    union_limit: int = 48
    union_all: int = 96
    union_warps: int = 4
    tile_blocks: int = 1
    tile_step: int = 32
    tile_warps: int = 4
    tile_stages: int = 2
    local_stages: int = 2
    tile_options: Mapping[str, Any] = NOTHING
    budget: int = 1 << 30
    pair_tile: int = 64
    pair_heads: int = 10
    pair_warps: int = 4
    pair_stages: int = 2
    pair_options: Mapping[str, Any] = NOTHING
    beside: bool = False
    dependent: bool = False
    merge_rows: int = 2
    merge_warps: int = 1
    merge_programs: int = 4224

    @property
    def union_room(self) -> int:
        """Entries of one tile's union: its blocks, and what fills up a step of the tile kernel."""
        return max(self.union_limit, self.union_all, 1) + self.tile_blocks - 1

    def groups_of(self, max_blocks: int) -> int:
        """Groups of selection in a step whose longest sequence has max_blocks blocks: half as many
        where they keep all blocks too.
        """
        half = self.select_groups // 2
        few = max_blocks <= self.select_groups and half >= LEAST_GROUPS
        return half if few else self.select_groups

    def limit_of(self, max_blocks: int) -> int:
        """Largest union that is walked in a step whose longest sequence has max_blocks blocks."""
        return max_blocks if 0 < max_blocks <= self.union_all else self.union_limit


_REGISTER_BOUND = PrefillRow(
    select_warps=8, few_warps=1, few_tile=16, redo_warps=8, tile_warps=8, tile_stages=1
)
_REGISTER_BOUND_ARCHS = ("sm80", "sm86", "sm87", "sm88", "sm89", "sm120", "sm121")
_TENSOR_MEMORY_ARCHS = ("sm100", "sm103", "sm110")
_TENSOR_MEMORY = PrefillRow(select_warps=8, few_warps=8, redo_warps=16, tile_warps=8)
_RDNA = _REGISTER_BOUND._replace(select_groups=32, pair_warps=8, pair_stages=1)
PREFILL: dict[str, PrefillRow] = {
    "*": PrefillRow(),
    **dict.fromkeys(_REGISTER_BOUND_ARCHS, _REGISTER_BOUND),
    "sm90": PrefillRow(
        few_warps=1,
        few_tile=16,
        tile_options=MappingProxyType({"maxnreg": 128}),  # four programs at a time
        budget=2 << 30,
        pair_stages=3,
        beside=True,
    ),
    **dict.fromkeys(_TENSOR_MEMORY_ARCHS, _TENSOR_MEMORY),
    **dict.fromkeys(RDNA, _RDNA),
}
# float32 has no matrix units of its own everywhere: small tiles, one row for all
FLOAT32 = PrefillRow(
    tile=16,
    select_groups=16,
    select_warps=2,
    select_stages=1,
    tile_warps=8,
    tile_stages=1,
    pair_tile=16,
    pair_warps=4,
    pair_stages=1,
)


# What is other for heads of more than WIDE columns: keys, values and sums take twice the registers
# and twice the memory, of which many cards have 64 KB. Compiled for all, run on none.
_WIDE_ANY: Mapping[str, Any] = MappingProxyType(
    {
        "select_groups": 32,
        "select_warps": 8,
        "redo_warps": 8,
        "tile_warps": 8,
        "tile_stages": 2,
        "tile_options": NOTHING,
        "pair_warps": 8,
        "pair_stages": 1,
    }
)
_WIDE_RDNA: Mapping[str, Any] = MappingProxyType(
    {
        "select_groups": 16,
        "select_warps": 16,
        "few_warps": 2,
        "redo_warps": 16,
        "tile_warps": 16,
        "local_stages": 1,
        "pair_warps": 16,
    }
)
_WIDE_TENSOR_MEMORY: Mapping[str, Any] = MappingProxyType(
    {**_WIDE_ANY, "redo_warps": 16, "tile_stages": 3}
)
WIDER: dict[str, Mapping[str, Any]] = {
    "*": _WIDE_ANY,
    **dict.fromkeys(_REGISTER_BOUND_ARCHS, MappingProxyType({**_WIDE_ANY, "few_warps": 2})),
    **dict.fromkeys(_TENSOR_MEMORY_ARCHS, _WIDE_TENSOR_MEMORY),
    **dict.fromkeys(RDNA, _WIDE_RDNA),
}
_WIDE_FLOAT32: Mapping[str, Any] = MappingProxyType(
    {"few_warps": 8, "tile_warps": 4, "local_stages": 1, "pair_warps": 8}
)
WIDER_FLOAT32: dict[str, Mapping[str, Any]] = {
    "*": _WIDE_FLOAT32,
    "sm80": MappingProxyType({**_WIDE_FLOAT32, "few_warps": 2}),  # its compiler spills with eight
}


LEAST_KEYS = 16  # of a matrix product


def prefill_row(
    arch: str,
    element: int = 2,
    deterministic: bool = False,
    block: int = 32,
    width: int = WIDE,
) -> PrefillRow:
    """The row of an arch for numbers of `element` bytes, sparse blocks of `block` tokens and heads
    of `width` columns; archs without one take the general row.

    deterministic: every tile goes by block, so that a row's output has the same bits in any batch.
    """
    row = FLOAT32 if element == 4 else PREFILL.get(arch, PREFILL["*"])
    if width > WIDE:
        wider = WIDER_FLOAT32 if element == 4 else WIDER
        row = row._replace(**wider.get(arch, wider["*"]))
    row = offered(row)._replace(
        tile_blocks=max(row.tile_blocks, LEAST_KEYS // block),
        tile_step=max(row.tile_step, block),
    )
    return row._replace(union_limit=0, union_all=0) if deterministic else row
