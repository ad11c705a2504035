"""How each stage is launched, by arch: rows of data, looked up when a step is planned; and the
launch itself.

A row says what was measured or, where nobody has run it, what compiles within every card's limits.
`ticket` and `dependent` are only true on archs where they were run; `dependent` also needs a Triton
that offers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_NOTHING: Mapping[str, Any] = MappingProxyType({})
EVERYWHERE = "*"
COORDINATES_TILE = 128
COORDINATES_WARPS = 4
STORE_WARPS: Mapping[str, int] = {"sm90": 8, EVERYWHERE: 4}  # of a tile of one block
WIDE_STORE_WARPS = 16
STORE_HEADS = 5  # kv heads of one program at most: they share the tile's angles
STORE_ROW_WARPS = 1
STORE_ROW_HEADS = 4  # kv heads of one program
SUMMARY_WARPS = 4
COPY_TILE = 32
PAGES_TILE = 128
GROUP = 16  # blocks whose best key goes to memory together
CHUNK = 256  # most groups that are ranked at once
NARROW = 32  # blocks of a page's run that one program takes at once
JOINT_HEADS = 16  # kv heads of one program that stores beside others that select
WIDE = 128  # columns of a head; a wider one is padded to twice as many, and so are its registers


class SelectRow(NamedTuple):
    """Decode selection for up to `rows` rows whose contexts have up to `blocks` blocks; None: any
    number.

    tile      blocks scored at once: 16 to 256, a power of two
    programs  of one launch at most, spread over the rows: more rows, fewer splits
    ahead     summaries of a scan are asked for before the row's page is known, and of the next tile
              before this one's scores
    """

    rows: int | None = None
    blocks: int | None = None
    tile: int = 64
    programs: int = 1024
    warps: int = 4
    ahead: bool = False
    ticket: bool = False
    dependent: bool = False


class AttendRow(NamedTuple):
    """Decode attention for up to `programs` pairs of row and kv head; None: any number.

    dot     also one query head of a kv head goes by matrix products, as several do: their loads go
            to shared memory without waiting in registers. Not in float32
    stages  of loads under way at once in front of matrix products; None: as the compiler likes
    single  only where a kv head has one query head
    """

    programs: int | None = None
    split: int = 4
    warps: int = 1
    dot_warps: int = 4  # where several query heads of a kv head go by products; not in float32
    dot: bool = False
    stages: int | None = None
    single: bool = False
    ticket: bool = False


# 256 registers a thread and 32 threads a warp: what fits one warp of 64 threads elsewhere needs
# two.
RDNA = (
    "gfx1010",
    "gfx1011",
    "gfx1012",
    "gfx1030",
    "gfx1031",
    "gfx1032",
    "gfx1033",
    "gfx1034",
    "gfx1035",
    "gfx1036",
    "gfx1100",
    "gfx1101",
    "gfx1102",
    "gfx1103",
    "gfx1150",
    "gfx1151",
    "gfx1152",
    "gfx1153",
    "gfx1200",
    "gfx1201",
)
SELECT: Mapping[str, tuple[SelectRow, ...]] = {
    "sm90": (
        SelectRow(rows=2, programs=2048, warps=8, ahead=True, ticket=True, dependent=True),
        SelectRow(rows=8, programs=256, warps=8, ahead=True, ticket=True, dependent=True),
        SelectRow(rows=100, programs=512, ticket=True),
        SelectRow(programs=512, ticket=True, dependent=True),
    ),
    EVERYWHERE: (SelectRow(tile=64),),
}
ATTEND: Mapping[str, tuple[AttendRow, ...]] = {
    "sm90": (
        AttendRow(programs=20, split=16, warps=2, dot=True, stages=2, ticket=True),
        AttendRow(programs=80, split=8, warps=2, dot=True, stages=3, ticket=True),
        AttendRow(programs=160, split=4, warps=4, dot=True, stages=3, ticket=True),
        AttendRow(programs=320, split=2, warps=4, dot=True, stages=3, ticket=True),
        # As many as run at once, five a multiprocessor; of more, the last would run nearly alone.
        AttendRow(programs=660, split=1, warps=4, dot=True, stages=3, ticket=True),
        AttendRow(split=4, single=True),
        AttendRow(split=1, warps=4, dot=True, stages=3, ticket=True),
    ),
    **dict.fromkeys(
        RDNA,
        (
            AttendRow(programs=64, split=8, warps=2, dot_warps=8),
            AttendRow(programs=1280, split=2, warps=2, dot_warps=8),
            AttendRow(split=1, warps=2, dot_warps=8),
        ),
    ),
    EVERYWHERE: (
        AttendRow(programs=64, split=8),
        AttendRow(programs=1280, split=2),
        AttendRow(split=1),
    ),
}
# Triton backends that make another kernel for tensors of less than 2 GB.
BY_SIZE: Mapping[str, bool] = {"hip": True}
FLOAT32_WARPS = 8  # of attention by products of float32: tiles take twice the registers
FLOAT32_WIDE_WARPS = 4  # at least, of one query head of a kv head
# By products; of 64 threads a warp, eight would have too few registers each.
FLOAT32_WIDE_DOT_WARPS: Mapping[str, int] = dict.fromkeys(
    ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"), 4
)
FIXED_SPLIT = 4  # of the deterministic mode: the same for any batch
MERGE_WARPS = 2  # of the second launch of selection


def offered(row: Any) -> Any:
    """A launch row without dependent launches where this Triton has none that compile."""
    if not row.dependent:
        return row
    from .primitives import PDL_OFFERED

    return row if PDL_OFFERED else row._replace(dependent=False)


def select_row(arch: str, rows: int, blocks: int) -> SelectRow:
    for row in SELECT.get(arch, SELECT[EVERYWHERE]):
        if (row.rows is None or rows <= row.rows) and (row.blocks is None or blocks <= row.blocks):
            found: SelectRow = offered(row)
            return found
    raise KeyError(f"no row of SELECT for {arch}, {rows} rows, {blocks} blocks")


def attend_row(
    arch: str,
    programs: int,
    deterministic: bool,
    width: int = WIDE,
    itemsize: int = 2,
    group: int = 1,
) -> AttendRow:
    """The row for heads of `width` columns, numbers of `itemsize` bytes, and `group` query heads of
    a kv head.
    """
    rows = ATTEND.get(arch, ATTEND[EVERYWHERE])
    if deterministic:  # one row for any batch: other warps add up in another order
        return fitted(rows[-1]._replace(split=FIXED_SPLIT), arch, width, itemsize)
    for row in rows:
        if (row.programs is None or programs <= row.programs) and (group == 1 or not row.single):
            return fitted(row, arch, width, itemsize)
    raise KeyError(f"no row of ATTEND for {arch}, {programs} programs")


def fitted(row: AttendRow, arch: str, width: int, itemsize: int) -> AttendRow:
    """A row as heads of `width` columns launch it: of wide ones in float32, memory of 64 KB holds
    the keys and values of one block, not of two, and registers those of four warps.
    """
    if width <= WIDE or itemsize < 4:
        return row
    return row._replace(
        warps=max(row.warps, FLOAT32_WIDE_WARPS),
        dot_warps=FLOAT32_WIDE_DOT_WARPS.get(arch, FLOAT32_WARPS),
        stages=row.stages or 1,
    )


def store_warps(arch: str, width: int) -> tuple[int, int]:
    """Warps of a program that stores a tile of one block, and of one that stores a row; more for
    wide heads.
    """
    tile = STORE_WARPS.get(arch, STORE_WARPS[EVERYWHERE])
    return (WIDE_STORE_WARPS, 2 * STORE_ROW_WARPS) if width > WIDE else (tile, STORE_ROW_WARPS)


def attend_warps(row: AttendRow, group: int, itemsize: int, width: int = WIDE) -> int:
    """Warps of one program of decode attention, for `group` query heads of a kv head."""
    if group == 1:
        return row.warps
    return row.dot_warps if itemsize < 4 or width > WIDE else FLOAT32_WARPS


def power_of_two(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()


def split_of(row: SelectRow, rows: int, blocks: int) -> int:
    """Programs of one row: as many as it has tiles, within the launch's budget; a power of two, so
    that few differ.
    """
    tiles = power_of_two(-(-blocks // row.tile))
    budget = max(1, row.programs // max(rows, 1))
    return min(tiles, power_of_two(budget + 1) // 2)


def turns(theta: float, head_dim: int) -> list[int]:
    """Turns a unit of position of each pair, times 2**64, as int64: `cos_sin` multiplies and drops
    whole turns.

    The last pair turns by one radian a page, as pair 0 does a token.
    """
    pairs = head_dim // 2 - 1
    # 1 / (2 pi) in 128 bits, so that the product with a double keeps all of that double.
    inverse = 0x28BE60DB9391054A7F09D5F47D4D3770
    values = []
    for j in [*range(pairs), 0]:
        top, bottom = (theta ** (-j / pairs)).as_integer_ratio()
        turn = (inverse * top // bottom + (1 << 63)) >> 64
        turn &= (1 << 64) - 1
        values.append(turn - (1 << 64) if turn >> 63 else turn)
    return values


class Launch:
    """One kernel with its grid, its constants and, by name, those of its run-time arguments that
    never change. Called with the others, in the kernel's order.

    A launch through Triton's own door binds and classifies every argument again. Here the compiled
    kernel is kept by what can change between calls: the integers, and types and alignment of the
    tensors. Triton's interpreter compiles nothing, and so do versions without a compiled kernel to
    call: they take the usual door each time.
    """

    __slots__ = (
        "_compiled", "_device", "_direct", "_free", "_grid", "_kernel", "_options", "_plain",
        "_sized", "_stream", "_whole",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Any,
        grid: int,
        consts: tuple[Any, ...],
        *,
        fixed: Mapping[str, Any] = _NOTHING,
        warps: int,
        stages: int = 0,
        **options: Any,
    ) -> None:
        self._kernel = kernel
        self._grid = (grid, 1, 1)
        self._options = {
            "num_warps": warps,
            **({"num_stages": stages} if stages else {}),
            **options,
        }
        names = kernel.arg_names[: len(kernel.arg_names) - len(consts)]
        self._free = tuple(n for n, name in enumerate(names) if name not in fixed)
        self._whole = [*(fixed.get(name) for name in names), *consts]
        self._plain = [*(_plain(fixed.get(name)) for name in names), *consts]
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._direct = hasattr(kernel, "device_caches")  # a function of the interpreter has none
        self._sized = False

    def __call__(self, *args: Any) -> None:
        if not self._direct:
            self._usual(args)
            return
        plain, key, ends = self._plain.copy(), [], 0
        for place, arg in zip(self._free, args, strict=True):
            kind = type(arg)
            if kind is int:  # a kernel may be made for its value
                key.append(arg)
                plain[place] = arg
            elif kind is float:
                plain[place] = arg
            else:
                at = arg.data_ptr()
                ends |= at
                plain[place] = at
                key.append(arg.dtype)
                if self._sized:
                    key.append(arg.untyped_storage().nbytes() < 1 << 31)
        if ends & 15:
            key.append(tuple([arg.data_ptr() & 15 for arg in args if hasattr(arg, "data_ptr")]))
        run = self._compiled.get(tuple(key))
        if run is not None:
            run(*plain, stream=self._stream(self._device))
            return
        compiled = self._usual(args)
        if not hasattr(compiled, "__getitem__"):
            self._direct = False
        elif BY_SIZE.get(compiled.metadata.target.backend, False) and not self._sized:
            self._sized = True  # ask from now on
        else:
            from triton.runtime.driver import driver

            self._stream = driver.active.get_current_stream
            self._device = driver.active.get_current_device()  # the plan's, in every call
            self._compiled[tuple(key)] = compiled[self._grid]

    def _usual(self, args: tuple[Any, ...]) -> Any:
        """By Triton's own launch."""
        whole = self._whole.copy()
        for place, arg in zip(self._free, args, strict=True):
            whole[place] = arg
        return self._kernel[self._grid](*whole, **self._options)


def _plain(arg: Any) -> Any:
    """A tensor as its address, which a compiled kernel takes without asking."""
    return arg.data_ptr() if hasattr(arg, "data_ptr") else arg
