"""Does a backend answer right on this machine? A few rows through it, against the oracle in
float64.

Run by `doctor --self-test`, and once before what nobody has verified here is used, a library's
version or our own kernels on a new architecture: only running it shows that an argument was
ignored, a base or a layout has changed, or that a card or a compiler is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dash_portable import reference
from dash_portable.backends.spec import Backend, Runner, takes
from dash_portable.cache import CacheShape
from dash_portable.config import DashConfig
from dash_portable.errors import BackendError
from dash_portable.platform.facts import Platform
from dash_portable.request import Request
from dash_portable.step import Step, row_positions, rows_of

NAN = float("nan")
SUMS = 2.0**-15  # of the largest number: logits of some tens and their exponentials in float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A step, a layer's inputs, and the exact output [N, Hq, D] float64."""

    step: Step
    query: Tensor
    cache: Tensor
    ids: Tensor
    bias: Tensor
    exact: Tensor

    def error(self, out: Tensor) -> float:
        """Largest deviation from the exact output; NaN and infinity count as infinite."""
        gap = (out.double() - self.exact).abs()
        return float(gap.max()) if bool(gap.isfinite().all()) else float("inf")

    def allowed(self) -> float:
        """Twice the error of rounding the exact output once, plus one step of the dtype at its
        largest, plus what sums in float32 lose, which is seen in float32 alone."""
        rounded = self.exact.to(self.query.dtype).double()
        step = torch.finfo(self.query.dtype).eps * float(self.exact.abs().max())
        sums = SUMS * float(self.exact.abs().max())
        return 2 * (float((rounded - self.exact).abs().max()) + step) + sums


def make_case(
    *,
    phase: str = "decode",
    dtype: torch.dtype = torch.bfloat16,
    group: int = 1,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 32,
    seed: int = 0,
    strided: bool = False,
    graph: bool = False,
    device: str = "cpu",
) -> Case:
    """Sequences with many, few and no remote blocks, a window that a block reaches into, padding
    rows between.

    Unused places of the cache, the auxiliary head and all of a padding row hold NaN.
    """
    maker = torch.Generator().manual_seed(seed)
    config = DashConfig(index_dim=head_dim, scale=(1.0,), floor=(1e-4,))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=maker, dtype=torch.float32)

    seq_lens = [700, 5, 143, 168, 40, 301]
    # The fifth sequence has only a padding row; prefill rows are the last of their sequences.
    query_lens = [1] * 6 if phase == "decode" else [3, 5, 2, 1, 1, 2]
    padding = {4} if phase == "decode" else {1, 11}
    row_seq, query_start = rows_of(query_lens, torch.device("cpu"))
    rows = len(row_seq)
    needed = [-(-length // block_size) for length in seq_lens]
    blocks = sum(needed) + 3
    order = torch.randperm(blocks, generator=maker)
    table = torch.full((len(seq_lens), max(needed) + 1), 2**30, dtype=torch.int32)
    width = 2 * head_dim
    if strided:  # a slice of a wider buffer whose token stride is not its width
        cache = torch.full((blocks, kv_heads + 2, block_size, width + 16), NAN, dtype=dtype)
        cache = cache[:, : kv_heads + 1, :, :width]
    else:
        cache = torch.full((blocks, kv_heads + 1, block_size, width), NAN, dtype=dtype)
    dense, first = [], 0
    for seq, length in enumerate(seq_lens):
        mine = order[first : first + needed[seq]]
        first += needed[seq]
        table[seq, : needed[seq]] = mine.int()
        both = normal(length, kv_heads, width).to(dtype)
        token = torch.arange(length)
        cache[mine[token // block_size], :kv_heads, token % block_size] = both
        dense.append(both.double())
    slots = torch.tensor([-1 if row in padding else row for row in range(rows)])
    row_pos = row_positions(slots, row_seq, query_start, torch.tensor(seq_lens))
    query = normal(rows, kv_heads * group, head_dim).to(dtype)
    ids = torch.full((rows, config.topk), -1, dtype=torch.int32)
    bias = torch.zeros(rows, config.topk, dtype=torch.float32)
    exact = torch.zeros(rows, kv_heads * group, head_dim, dtype=torch.float64)
    for row in range(rows):
        position = int(row_pos[row])
        if position < 0:
            query[row] = NAN
            ids[row], bias[row] = 7, NAN
            continue
        remote = max(position // config.block - config.local_blocks + 1, 0)
        kept = min(remote, config.topk - row % 3)
        chosen = torch.randperm(remote, generator=maker)[:kept]
        if remote and row % 2 == 0 and remote - 1 not in chosen:
            chosen[-1] = remote - 1  # the nearest one, which may reach into the window
        ids[row, :kept] = chosen.int()
        bias[row, :kept] = 3 * normal(kept)
        both = dense[int(row_seq[row])]
        exact[row] = reference.attend(
            query[row : row + 1].double(),
            both[..., :head_dim],
            both[..., head_dim:],
            ids[row : row + 1],
            bias[row : row + 1].double(),
            torch.tensor([position]),
            config,
        )[0]
    place = torch.device(device)
    cache = cache.to(place)
    step = Step(
        config=config,
        cache_shape=CacheShape.of(cache, config),
        heads=kv_heads * group,
        dtype=dtype,
        device=place,
        row_seq=row_seq.to(place),
        row_pos=row_pos.to(place),
        slots=slots.to(place),
        roles=torch.zeros(rows, dtype=torch.int32, device=place),
        positions=None,
        query_start=query_start.to(place),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=place),
        block_table=table.to(place),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens=tuple(query_lens),
        graph=graph,
    )
    return Case(
        step=step,
        query=query.to(place),
        cache=cache,
        ids=ids.to(place),
        bias=bias.to(place),
        exact=exact.to(place),
    )


# What is tried of what a row declares: each of these once, not each with each, since some libraries
# compile for minutes for each dtype and width.
DTYPES = ("bfloat16", "float16", "float32")
GROUPS = (1, 2, 4)
WIDTHS = range(64, 257, 16)  # that a configuration may have
_USUAL, _PAGES = (64, 128), (32, 64)  # cache blocks as large as a sparse block, and larger


def _first_of(sizes: frozenset[int] | None, usual: tuple[int, ...]) -> list[int]:
    """The usual sizes that are offered, or the smallest one that a cache can have."""
    if sizes is None:
        return list(usual)
    found = [size for size in usual if size in sizes]
    return found or [size for size in sorted(sizes) if size % 32 == 0 or 32 % size == 0][:1]


def _widths(offered: frozenset[int] | None) -> list[int]:
    """64 and 128, the smallest and the largest of the head widths that can be asked; 128 first,
    then the widest, so that the rarest dtype meets the least of them.
    """
    able = [width for width in WIDTHS if offered is None or width in offered]
    found = {*able[:1], *able[-1:], *(width for width in _USUAL if width in able)}
    return sorted(found, key=lambda width: (width != 128, -width))


def tried(backend: Backend, platform: Platform) -> list[Request]:
    """Requests that have every dtype and width which the row takes here, and every group, in each
    of its phases; a few, each a small call.
    """
    offer = backend.capability
    sizes = _first_of(offer.block_sizes, _PAGES)

    def ask(phase: str, dtype: str, width: int, turn: int) -> Request:
        return Request(
            phase=phase,
            dtype=dtype,
            cache_dtype=dtype,
            head_dim=width,
            group_size=GROUPS[turn % len(GROUPS)],
            block=32,
            block_size=sizes[turn % len(sizes)],
        )

    found = list[Request]()
    for phase in (one for one in ("decode", "prefill") if sizes and one in offer.phases):
        pairs = [
            (dtype, width)
            for dtype in DTYPES
            for width in _widths(offer.head_dims)
            if takes(backend, platform, ask(phase, dtype, width, 0))
        ]
        missing: set[object] = {one for pair in pairs for one in pair}
        used = list[tuple[str, int]]()
        while missing:
            used.append(max(pairs, key=lambda pair: len(missing.intersection(pair))))
            missing.difference_update(used[-1])
        first = 0 if phase == "decode" else 1  # so that a pair does not meet the same group twice
        turns = range(max(len(used), len(GROUPS))) if used else ()
        asked = (ask(phase, *used[turn % len(used)], first + turn) for turn in turns)
        found += [one for one in asked if takes(backend, platform, one)]
    return found


def run(backend: Backend, platform: Platform, device: str | None = None) -> str:
    """Why a backend is not to be trusted on this machine, or "" when it agrees with the oracle.

    A shared layer stores and selects, any other row attends. `device` is torch's, the platform's
    current one by default. Running out of memory proves nothing and propagates.
    """
    place = device or platform.device_type
    # It is run in the middle of somebody's program, whatever this made torch's default device.
    with torch.device("cpu"):
        if not hasattr(backend.load(), "select"):
            return _run_backend(backend, platform, place)
        # What a layer is held to is reckoned as it is written.
        kind = torch.device(place).type
        with torch.autocast("cpu", enabled=False), torch.autocast(kind, enabled=False):
            return _run_layer(backend, place)


def _planned(backend: Backend, step: Step) -> Runner | str:
    """The step's runner, or why the library refuses to plan it: no verdict, since a step that it
    refuses asks another backend.
    """
    try:
        return backend.load()(step)
    except BackendError as error:
        return str(error)


def _run_backend(backend: Backend, platform: Platform, place: str) -> str:
    requests = tried(backend, platform)
    if not requests:
        return "nothing to test: no dtype, head width and cache block of its row can be asked here"
    refused = list[str]()
    for asked in requests:
        case = make_case(
            phase=asked.phase,
            dtype=getattr(torch, asked.dtype),
            group=asked.group_size,
            head_dim=asked.head_dim,
            block_size=asked.block_size,
            device=place,
        )
        what = f"{asked.phase} of {asked.dtype}, heads of {asked.head_dim}, {asked.group_size} "
        what += "query heads a kv head"
        out = torch.full_like(case.query, NAN)
        try:
            runner = _planned(backend, case.step)
            if isinstance(runner, str):
                refused.append(f"{what}: {runner}")
                continue
            runner.run(case.query, case.cache, case.ids, case.bias, out)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a library raises is its verdict
            if type(error).__name__ == "OutOfResources":  # Triton's: this card is too small for it
                refused.append(f"{what}: {error}")
                continue
            return f"{what}: {type(error).__name__}: {error}"
        if not case.error(out) <= case.allowed():
            return (
                f"{what}: found an error of {case.error(out):.2g} against the oracle, "
                f"needed at most {case.allowed():.2g}"
            )
    return refused[0] if len(refused) == len(requests) else ""


def _run_layer(backend: Backend, device: str) -> str:
    from dash_portable.trial.shared import check_layer

    layer, place = cast("Any", backend.load()), torch.device(device)
    for dtype in DTYPES:
        if backend.capability.dtypes is not None and dtype not in backend.capability.dtypes:
            continue
        what = f"store and select of {dtype}"
        try:
            checks = check_layer(layer, place, getattr(torch, dtype))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler or a card may fail with anything
            return f"{what}: {type(error).__name__}: {error}"
        for check in checks:
            if not check.ok:
                return (
                    f"{what}, {check.name}: found an error of {check.error:.2g} against the "
                    f"oracle, needed at most {check.allowed:.2g}"
                )
    return ""
