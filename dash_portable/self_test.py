"""Does a backend answer right on this machine? A few rows through it, against the oracle in
float64.

Run by `doctor --self-test`, and once before what nobody has verified here is used, a library's
version or our own kernels on a new architecture: only running it shows that an argument was
ignored, a base or a layout has changed, or that a card or a compiler is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_portable import reference
from dash_portable.backends.spec import Backend
from dash_portable.cache import CacheShape
from dash_portable.config import DashConfig
from dash_portable.platform.facts import Platform
from dash_portable.step import Step, row_positions, rows_of

NAN = float("nan")


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
        largest."""
        rounded = self.exact.to(self.query.dtype).double()
        step = torch.finfo(self.query.dtype).eps * float(self.exact.abs().max())
        return 2 * (float((rounded - self.exact).abs().max()) + step)


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


# What is tried: groups and both phases, cache blocks as large as a sparse block and larger. One
# dtype and width, since some libraries compile for minutes for each.
TRIED: tuple[dict[str, Any], ...] = (
    {"phase": "decode", "group": 2, "block_size": 32},
    {"phase": "prefill", "group": 1, "block_size": 64},
)


def run(backend: Backend, platform: Platform, device: str | None = None) -> str:
    """Why a backend is not to be trusted on this machine, or "" when it agrees with the oracle.

    A shared layer stores and selects, any other row attends. `device` is torch's, the platform's
    current one by default. Running out of memory proves nothing and propagates.
    """
    place = device or platform.device_type
    # It is run in the middle of somebody's program, whatever this made torch's default device.
    with torch.device("cpu"):
        test = _run_layer if hasattr(backend.load(), "select") else _run_backend
        return test(backend, place)


def _run_backend(backend: Backend, place: str) -> str:
    offer = backend.capability
    widths = offer.head_dims or frozenset({128})
    head_dim = 128 if 128 in widths else max(widths)
    for tried in TRIED:
        if tried["phase"] not in offer.phases:
            continue
        case = make_case(**tried, dtype=_dtype(backend), head_dim=head_dim, device=place)
        what = f"{tried['phase']} with {tried['group']} query heads a kv head"
        out = torch.full_like(case.query, NAN)
        try:
            backend.load()(case.step).run(case.query, case.cache, case.ids, case.bias, out)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a library raises is its verdict
            return f"{what}: {type(error).__name__}: {error}"
        if not case.error(out) <= case.allowed():
            return (
                f"{what}: found an error of {case.error(out):.2g} against the oracle, "
                f"needed at most {case.allowed():.2g}"
            )
    return ""


def _dtype(backend: Backend) -> torch.dtype:
    offered = backend.capability.dtypes
    return torch.bfloat16 if offered is None or "bfloat16" in offered else torch.float16


def _run_layer(backend: Backend, device: str) -> str:
    from dash_portable.trial.shared import check_layer

    layer: Any = backend.load()
    try:
        checks = check_layer(layer, torch.device(device), _dtype(backend))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler or a card may fail with anything
        return f"store and select: {type(error).__name__}: {error}"
    for check in checks:
        if not check.ok:
            return (
                f"{check.name}: found an error of {check.error:.2g} against the oracle, "
                f"needed at most {check.allowed:.2g}"
            )
    return ""
