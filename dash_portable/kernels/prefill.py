"""The launches of a prefill step, planned once and called for every layer. Everything that stays is
bound here; a call queues launches and reads nothing back.
"""

from .attend_prefill import attend_merge_kernel, attend_pair_kernel, attend_tile_kernel
from .group_rows import TILE_FIELDS
from .launch import Launch, power_of_two
from .launch_prefill import LEAST_KEYS
from .select_prefill import (
    LISTED,
    MOST,
    select_group_kernel,
    select_redo_kernel,
    select_tile_kernel,
)
from .union import (
    ENTRIES,
    KEYS,
    SPAN,
    apart,
    invert_offset_kernel,
    invert_place_kernel,
    invert_sum_kernel,
    union_kernel,
)


def launch_of(kernel, grid, consts, fixed, warps, **options):
    """A launch whose constants are given by name; those that the kernel does not know are left."""
    order = tuple(consts[name] for name in kernel.arg_names if name in consts)
    if consts["PDL"]:
        options = options | {"launch_pdl": True}
    return Launch(kernel, grid, order, fixed=fixed, warps=warps, **options)


def select_shapes(num_rows, num_seqs):
    """Shapes of the int32 tensors that SelectPrefill needs besides the groups; nothing in them is
    kept.

    redo_count holds the length of the list `few`, then those of the sequences' parts of `redo`;
    best is the window of the rows in `few`, upper and lower halves of the keys.
    """
    return {
        "redo_count": (num_seqs + 1,),
        "redo": (num_rows,),
        "few": (num_rows, LISTED.value),
        "best": (num_rows, 2 * MOST),
    }


class SelectPrefill:
    """The blocks of a step's rows, grouped by group_rows: one launch, or, where a row may have more
    blocks than it keeps, three and a fill.

    summaries [R, blocks, D] and ranges int32 [R, blocks, 2] (None when no row has a page), each
    sequence contiguous; row_pos int32 [N]; groups: what group_rows fills; scratch: tensors of
    select_shapes; ids int32 [N, topk] and bias float32 [N, topk] are written; launch: a row of
    launch_prefill (select_*, few_*, redo_warps).
    """

    def __init__(
        self,
        summaries,
        ranges,
        row_pos,
        groups,
        scratch,
        ids,
        bias,
        *,
        sigma,
        block,
        window,
        launch,
    ):
        num_rows, topk = ids.shape
        width = summaries.shape[2]
        self._empty, self._root = num_rows == 0, width**-0.5
        self._counts = scratch["redo_count"]
        paged = ranges is not None
        tiles = groups["tiles"]
        num_tiles = tiles.shape[0]
        blocks = summaries.shape[1]
        alone = blocks <= 2 * launch.select_groups
        consts = {
            "D": width,
            "DP": power_of_two(max(width, 16)),
            "BLOCK": block,
            "TOPK": topk,
            "WINDOW": window,
            "W": power_of_two(max(window, 2)),
            "TILE": launch.tile,
            "GROUPS": launch.groups_of(blocks),
            "HAS_PAGES": paged,
            "PDL": launch.dependent,
        }
        tiled = {"FIELDS": TILE_FIELDS}
        fixed = {
            "summary_ptr": summaries,
            "range_ptr": ranges if paged else row_pos,
            "tile_ptr": tiles,
            "order_ptr": groups["order"],
            "first_ptr": groups["first"],
            "last_ptr": groups["last"],
            "page_ptr": groups["page"],
            "pos_ptr": row_pos,
            "ids_ptr": ids,
            "bias_ptr": bias,
            "redo_count_ptr": scratch["redo_count"],
            "redo_ptr": scratch["redo"],
            "few_ptr": scratch["few"],
            "best_ptr": scratch["best"],
            "num_rows": num_rows,
            "inv_sigma": 1.0 / sigma,
            "stride_sr": summaries.stride(0),
            "stride_rr": ranges.stride(0) if paged else 0,
        }
        self.first = launch_of(
            select_tile_kernel,
            num_tiles,
            consts | tiled | {"STAGES": launch.select_stages, "ALONE": alone},
            fixed,
            launch.select_warps,
            **launch.select_options,
        )
        self.few = self.redo = None
        if alone:
            return
        self.few = launch_of(
            select_group_kernel,
            min(num_rows, launch.few_programs),
            consts | {"TILE": launch.few_tile or launch.tile},
            fixed,
            launch.few_warps,
        )
        self.redo = launch_of(
            select_redo_kernel,
            max(num_tiles, -(-num_rows // launch.tile)),
            consts | tiled,
            fixed,
            launch.redo_warps,
        )

    def __call__(self, index_query, scale, floor):
        """ids and bias of the rows of index_query [N, D], rotated, contiguous."""
        if self._empty:
            return
        factor = scale * self._root
        if self.redo is None:
            self.first(index_query, factor, floor)
            return
        self._counts.zero_()
        self.first(index_query, factor, floor)
        self.few(index_query, factor, floor)
        self.redo(index_query, factor, floor)


def attend_chunks(num_tiles, heads, width, element, topk, tile, budget):
    """(chunks, tiles of a chunk) so that a chunk's partial results take at most `budget` bytes, one
    tile at least.
    """
    one = tile * topk * heads * (width * element + 4)
    chunk_tiles = -(-num_tiles // -(-num_tiles // max(1, min(num_tiles, budget // one))))
    return -(-num_tiles // chunk_tiles), chunk_tiles


def attend_shapes(
    num_rows, num_seqs, num_tiles, max_blocks, heads, width, element, topk, *, budget, launch
):
    """{name: (dtype, shape)} of the scratch of AttendPrefill; nothing in it is kept. dtype "query"
    is the query's.

    num_tiles: rows of the list of tiles; max_blocks: sparse blocks of the longest sequence;
    element: bytes of one number of the query's dtype; budget: bytes for the partial results of one
    chunk.
    """
    tile = launch.tile
    by_block = max_blocks > launch.limit_of(max_blocks)
    chunks, chunk_tiles = 1, num_tiles
    if by_block:
        chunks, chunk_tiles = attend_chunks(num_tiles, heads, width, element, topk, tile, budget)
    keys, pairs = num_seqs * max_blocks, chunk_tiles * tile * topk
    room = num_tiles * launch.union_room
    shapes = {
        "count": ("int32", (num_tiles, 2)),
        "listed": ("int32", (chunks * chunk_tiles,)),
        "union": ("int32", (room,)),
        "place": ("int32", (room,)),
        "weight": ("float32", (room, tile)),
        "mass": ("float32", (num_rows, heads)),
        "hist": ("int32", (chunks * (keys * apart(keys) + 1),)),
        "rank": ("int32", (num_rows, topk)),
    }
    if not by_block:  # no lists, and no partial results, which are nearly all of the memory
        return shapes
    entries = pairs // launch.pair_tile + min(keys, pairs)
    return shapes | {
        "runs": ("int32", (chunks, -(-keys // KEYS), 2)),
        "offset": ("int32", (chunks, keys + 1)),
        "first": ("int32", (chunks, keys + 1)),
        "pair": ("int32", (chunks, pairs)),
        "entry": ("int32", (chunks, entries, 4)),
        "part": ("query", (pairs, heads, width)),
        "part_mass": ("float32", (pairs, heads)),
    }


class AttendPrefill:
    """Attention of a step's rows, grouped by group_rows, to their blocks and local windows.

    heads: query heads; width: of a head; kv_heads, cache_block: of the cache; block_table int32 [R,
    blocks]; row_pos int32 [N]; groups: what group_rows fills; scratch: the tensors of
    attend_shapes; launch: the row of launch_prefill that gave the shapes; max_blocks: sparse blocks
    of the longest sequence; beside: a `with` for what may run beside the tiles, until its `join`.
    Where no tile can have too many blocks: two launches. Else a fill, four or five, and two for
    each chunk.
    """

    def __init__(
        self,
        block_table,
        row_pos,
        groups,
        scratch,
        *,
        heads,
        width,
        kv_heads,
        cache_block,
        block,
        local,
        max_blocks,
        launch,
        beside,
    ):
        num_rows, topk = scratch["rank"].shape
        self._beside = beside
        self._empty = num_rows == 0
        tiles = groups["tiles"]
        num_tiles = tiles.shape[0]
        limit = launch.limit_of(max_blocks)
        self._by_block = max_blocks > limit
        self._chunks = scratch["offset"].shape[0] if self._by_block else 1
        chunks, self._chunk_tiles = self._chunks, -(-num_tiles // self._chunks)
        self._hist = scratch["hist"]
        keys = block_table.shape[0] * max_blocks
        consts = {
            "HQ": heads,
            "G": heads // kv_heads,
            "D": width,
            "DP": power_of_two(max(width, 16)),
            "P": cache_block,
            "BLOCK": block,
            "LOCAL": local,
            "TOPK": topk,
            "W": power_of_two(max(topk, 2)),
            "TILE": launch.tile,
            "APART": apart(keys),
            "FIELDS": TILE_FIELDS,
            "PDL": launch.dependent,
        }
        fixed = {
            "tile_ptr": tiles,
            "order_ptr": groups["order"],
            "pos_ptr": row_pos,
            "table_ptr": block_table,
            "stride_tr": block_table.stride(0),
            "scale": width**-0.5,
            "max_blocks": max_blocks,
            "keys": keys,
            "keys_total": keys,
            "num_rows": num_rows,
            "num_tiles": num_tiles,
            "limit": limit,
            "chunk_tiles": self._chunk_tiles,
            "listed_count_ptr": scratch["hist"][chunks * keys * apart(keys) :],
        } | {f"{name}_ptr": tensor for name, tensor in scratch.items()}
        room = {"ROOM": launch.union_room, "BLOCKS": launch.tile_blocks}

        def made(kernel, grid, warps, more, also=fixed, **options):
            return launch_of(kernel, grid, consts | more, also, warps, **options)

        self.union = made(
            union_kernel,
            num_tiles,
            launch.union_warps,
            room | {"WIDTH": heads * width, "SPAN": SPAN},
        )
        self.tile = made(
            attend_tile_kernel,
            heads * num_tiles,
            launch.tile_warps,
            room
            | {
                "STEP": launch.tile_step,
                "STAGES": launch.tile_stages,
                "LOCAL_STAGES": launch.local_stages,
            },
            **launch.tile_options,
        )
        self.sum = self.offset = self.place = self.pair = self.merge = None
        if not self._by_block:
            return
        entries = scratch["entry"].shape[1]
        entry_programs = -(-entries // ENTRIES)
        runs = scratch["runs"].shape[1]
        walked = max(h for h in range(1, launch.pair_heads + 1) if heads % h == 0)
        fixed |= {"chunk_pairs": scratch["pair"].shape[1], "entries": entries}
        inverted = {"STEP": KEYS, "TILE": launch.pair_tile}
        counted = {
            "hist_ptr": scratch["hist"],
            "part_ptr": scratch["runs"],
            "offset_ptr": scratch["offset"],
            "first_ptr": scratch["first"],
            "keys": keys,
            "parts": runs,
        }
        if runs > 1:
            self.sum = made(invert_sum_kernel, runs * chunks, 8, inverted, counted)
        self.offset = made(invert_offset_kernel, runs * chunks, 8, inverted, counted)
        self.place = made(
            invert_place_kernel,
            num_tiles + chunks * entry_programs,
            4,
            {"PAIR_TILE": launch.pair_tile, "ENTRIES": ENTRIES},
            fixed | {"entry_programs": entry_programs, "steps": keys.bit_length()},
        )
        self.pair = made(
            attend_pair_kernel,
            entries * (heads // walked),
            launch.pair_warps,
            {
                "PAIR_TILE": launch.pair_tile,
                "HEADS": walked,
                "HEADS_UP": power_of_two(walked),
                "N": max(block, LEAST_KEYS),
                "STAGES": launch.pair_stages,
            },
            **launch.pair_options,
        )
        items = heads * self._chunk_tiles * (launch.tile // launch.merge_rows)
        self.merge = made(
            attend_merge_kernel,
            min(items, launch.merge_programs),
            launch.merge_warps,
            {"ROWS": launch.merge_rows},
        )

    def __call__(self, query, cache, ids, bias, out):
        """out [N, Hq, D] of query [N, Hq, D], rotated; padding rows get 0.

        cache [NB, H + 1, P, 2 D]; ids int32 [N, topk], -1 unused; bias float32 [N, topk]; all but
        the cache contiguous.
        """
        if self._empty:
            return
        strides = cache.stride()[:3]
        if not self._by_block:
            self.union(ids, bias, out)
            self.tile(query, cache, out, *strides)
            return
        self._hist.zero_()
        self.union(ids, bias, out)
        with self._beside:
            if self.sum is not None:
                self.sum()
            self.offset()
            self.place(ids)
            self.pair(query, cache, bias, 0, 0, *strides)
        try:
            self.tile(query, cache, out, *strides)
        finally:
            self._beside.join()
        self.merge(ids, out, 0)
        for chunk in range(1, self._chunks):
            self.pair(query, cache, bias, chunk, chunk * self._chunk_tiles, *strides)
            self.merge(ids, out, chunk)
