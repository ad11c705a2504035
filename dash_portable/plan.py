"""A serving step: described once, run once per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dash_portable.cache import CacheShape, check_strides
from dash_portable.checks import (
    FLOAT,
    INDEX,
    StepValues,
    check_backend,
    check_flag,
    check_integer,
    check_rows,
    check_tensor,
    fits,
    host_lengths,
    on_host,
)
from dash_portable.config import DashConfig
from dash_portable.errors import ArgumentError, found_needed
from dash_portable.serve import deterministic as wanted_deterministic
from dash_portable.serve import serve
from dash_portable.step import Step, Trust, facts_text, row_positions, rows_of

if TYPE_CHECKING:
    from dash_portable.backends.spec import Runner
    from dash_portable.choice import Choice

Lengths = Sequence[int] | Tensor


class SharedLayer(Protocol):
    """Store and select: written once in Triton and once in torch, for all backends."""

    coordinates: Tensor

    def __init__(self, step: Step) -> None: ...

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        cache: Tensor,
        head_cls: Tensor,
        scale: float,
        floor: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store the rows; rotated queries, selected blocks and their biases."""

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        cache: Tensor,
        head_cls: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Write the rows' tokens; the rotated queries and index queries."""

    def select(
        self, index_query: Tensor, cache: Tensor, head_cls: Tensor, scale: float, floor: float
    ) -> tuple[Tensor, Tensor]:
        """Blocks of every row, and their biases."""

    def rebuild(self, cache: Tensor, head_cls: Tensor) -> None:
        """Summaries, page ranges and page starts of whole sequences that another owner stored."""

    def refresh(self) -> None:
        """Take over what was changed in place in the step's tensors."""


class DashStep:
    """One step of a batch, for all layers; made by `DashStep.plan`."""

    def __init__(self, step: Step, choice: Choice, shared: SharedLayer, runner: Runner) -> None:
        self.step = step
        self.choice = choice
        self.backend = choice.required().name
        self.selection: tuple[Tensor, Tensor] | None = None
        self.facts = ""
        self._shared = shared
        self._runner = runner

    @classmethod
    def plan(
        cls,
        query_lens: Lengths,
        seq_lens: Lengths,
        block_table: Tensor,
        slots: Tensor,
        roles: Tensor,
        positions: Tensor | None = None,
        *,
        config: DashConfig,
        cache: Tensor,
        backend: str | None = None,
        max_model_len: int | None = None,
        num_heads: int | None = None,
        max_query_len: int | None = None,
        page_table: Tensor | None = None,
        cached_summaries: bool = True,
        prefix_lens: Tensor | None = None,
        deterministic: bool | None = None,
        graph: bool = False,
    ) -> DashStep:
        """Describe a step of R sequences with N new rows in all.

        query_lens    [R]          new rows of each sequence: whole prompts, chunks and decodes
                                   mixed
        seq_lens      [R]          tokens of each sequence, the new ones included
        block_table   [R, max]     cache blocks of each sequence
        slots         [N]          cache place of each new token; below 0: padding, not counted
                                   anywhere
        roles         [N]          0 text, 1 image, 2 page marker
        positions     [4, N]       `prompt_positions` of prompt rows; row 3 of at least 0 marks a
                                   decoded
                                   row, which continues from the token before it. None: all are
                                   decoded
        page_table    [R, pages, 2]  first token and count of each page, for sequences that share
                                   cache blocks; used instead of what the cache holds
        num_heads     query heads; as many as the cache has kv heads if not given
        cached_summaries, prefix_lens   as in `paged_dash_decode`
        graph         the step will be captured; its tensors become copies that `update` refills

        Lengths are host lists or CPU tensors; on the cache's GPU they may be tensors there, with
        `max_query_len` (1 for a decode step) given. Index tensors are int32 or int64.
        Raises ArgumentError for wrong arguments, UnsupportedError when no backend (or not the
        forced one) serves the request, BackendError when the forced one fails to plan.
        """
        step = describe(
            query_lens,
            seq_lens,
            block_table,
            slots,
            roles,
            positions,
            config=config,
            cache=cache,
            max_model_len=max_model_len,
            num_heads=num_heads,
            max_query_len=max_query_len,
            page_table=page_table,
            trust=trust_of(cached_summaries, prefix_lens),
            prefix_lens=prefix_lens,
            deterministic=deterministic,
            graph=graph,
        )
        planned = cls.of(step, backend)
        planned.facts = facts_text(step)  # made here: a compiled program may only read it
        return planned

    @classmethod
    def of(cls, step: Step, backend: str | None) -> DashStep:
        """Choose who serves a described step, and let it plan."""
        check_backend(backend)
        choice, shared, runner = serve(step, backend)
        return cls(step, choice, shared, runner)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        cache: Tensor,
        head_cls: Tensor,
        layer: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """Store the new tokens of one layer and attend; gives `[N, Hq, D]`, zeros for padding.

        q [N, Hq, D], k and v [N, H, D], iq and ik [N, D], head_cls [D]: unrotated, in the cache's
        type. The cache is written. `out`, if given, is contiguous; it is filled and returned.
        No gradient flows through it.
        """
        step = self.step
        if head_cls is None:
            raise found_needed("head_cls", None, "a tensor [D]: without it nothing can be selected")
        check_inputs(step, q, k, v, iq, ik, head_cls, cache)
        scale, floor = layer_numbers(step.config, layer)
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            check_rows(
                {"out": (out, ("N", "Hq", "D"))},
                dtype=step.dtype,
                device=step.device,
                sizes=_sizes(step),
            )
            if not out.is_contiguous():
                raise found_needed("out", f"strides {list(out.stride())}", "a contiguous tensor")
        query, ids, bias = self._shared.prepare(q, k, v, iq, ik, cache, head_cls, scale, floor)
        self.selection = (ids, bias)
        self._runner.run(query, cache, ids, bias, out)
        return out

    def update(
        self,
        seq_lens: Tensor,
        block_table: Tensor,
        slots: Tensor,
        roles: Tensor,
        positions: Tensor | None = None,
        page_table: Tensor | None = None,
        prefix_lens: Tensor | None = None,
    ) -> None:
        """Refill a planned decode step in place, for the next replay of a graph that captured it.

        Every tensor has the shape it had in the plan; nothing is allocated that the graph reads.
        ArgumentError unless the step was planned with `graph=True`, if a tensor comes or goes, and
        as `plan` for wrong ones. The step is then as it was.
        """
        step = self.step
        if not step.graph:
            raise ArgumentError("update: found a step planned with graph=False, needed graph=True")
        new = {
            "seq_lens": (seq_lens, step.seq_lens),
            "block_table": (block_table, step.block_table),
            "slots": (slots, step.slots),
            "roles": (roles, step.roles),
            "positions": (positions, step.positions),
            "page_table": (page_table, step.page_table),
            "prefix_lens": (prefix_lens, step.prefix_lens),
        }
        for name, (value, own) in new.items():
            if (value is None) != (own is None):
                planned = "without" if own is None else "with"
                raise found_needed(
                    name, "None" if value is None else "a tensor", f"as planned, {planned} it"
                )
            if value is not None and own is not None:
                where = own.device
                if isinstance(value, Tensor) and on_host(value):
                    where = value.device
                check_tensor(name, value, tuple(own.shape), dtypes=INDEX, device=where)
        if on_host(step.slots):
            lengths = seq_lens.clamp(-(2**31), 2**31 - 1)
            row_pos = row_positions(slots, step.row_seq, step.query_start, lengths)
            _check_values(step, slots, row_pos, roles, positions, seq_lens, block_table, page_table)
        for value, own in new.values():
            if value is not None and own is not None:
                own.copy_(value)
        step.row_pos.copy_(row_positions(step.slots, step.row_seq, step.query_start, step.seq_lens))
        self._shared.refresh()
        self._runner.refresh()


def trust_of(cached_summaries: bool, prefix_lens: Tensor | None) -> Trust:
    if not check_flag("cached_summaries", cached_summaries):
        return Trust.NONE
    return Trust.CACHED if prefix_lens is None else Trust.PREFIX


def layer_numbers(config: DashConfig, layer: int) -> tuple[float, float]:
    """Scale and floor of one layer."""
    if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < config.num_layers:
        raise found_needed("layer", repr(layer), f"0 to {config.num_layers - 1}")
    return config.scale[layer], config.floor[layer]


def _sizes(step: Step) -> dict[str, int]:
    return {"N": step.num_rows, "Hq": step.heads, "H": step.kv_heads, "D": step.head_dim}


def check_inputs(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    head_cls: Tensor | None,
    cache: Tensor,
) -> None:
    """The tensors of one layer fit the planned step."""
    check_tensor("cache", cache, _cache_shape(step), dtypes=(step.dtype,), device=step.device)
    check_strides(cache.shape, cache.stride())
    rows, width, of = step.num_rows, step.head_dim, (step.dtype, step.device)
    if not (
        fits(q, (rows, step.heads, width), *of)
        and fits(k, (rows, step.kv_heads, width), *of)
        and fits(v, (rows, step.kv_heads, width), *of)
        and fits(iq, (rows, width), *of)
        and fits(ik, (rows, width), *of)
    ):
        given = {
            "q": (q, ("N", "Hq", "D")),
            "k": (k, ("N", "H", "D")),
            "v": (v, ("N", "H", "D")),
            "iq": (iq, ("N", "D")),
            "ik": (ik, ("N", "D")),
        }
        check_rows(given, dtype=step.dtype, device=step.device, sizes=_sizes(step))
    if head_cls is not None:
        check_tensor(
            "head_cls",
            head_cls,
            ("D",),
            dtypes=FLOAT,
            device=step.device,
            sizes=_sizes(step),
        )


def _cache_shape(step: Step) -> torch.Size:
    shape = step.cache_shape
    return torch.Size((shape.num_blocks, shape.kv_heads + 1, shape.block_size, 2 * shape.head_dim))


def describe(
    query_lens: Lengths,
    seq_lens: Lengths,
    block_table: Tensor,
    slots: Tensor,
    roles: Tensor,
    positions: Tensor | None,
    *,
    config: DashConfig,
    cache: Tensor,
    max_model_len: int | None = None,
    num_heads: int | None = None,
    max_query_len: int | None = None,
    page_table: Tensor | None = None,
    trust: Trust = Trust.CACHED,
    prefix_lens: Tensor | None = None,
    recomputed: bool = False,
    deterministic: bool | None = None,
    graph: bool = False,
) -> Step:
    """Check the arguments of `DashStep.plan` and put them in the form that kernels read."""
    shape = CacheShape.of(cache, config)
    device = cache.device
    heads = shape.kv_heads if num_heads is None else check_integer("num_heads", num_heads)
    if heads < 1 or heads % shape.kv_heads:
        near = max(1, round(heads / shape.kv_heads)) * shape.kv_heads
        raise found_needed(
            "num_heads",
            heads,
            f"a multiple of the cache's {shape.kv_heads} kv heads, such as {near}",
        )
    if max_model_len is not None:
        check_integer("max_model_len", max_model_len, 1)
    if max_query_len is not None:
        check_integer("max_query_len", max_query_len, 0)
    check_flag("graph", graph)
    if deterministic is not None:
        check_flag("deterministic", deterministic)
    host_query = host_lengths("query_lens", query_lens, device)
    host_seq = host_lengths("seq_lens", seq_lens, device)
    seqs = len(query_lens)
    if len(seq_lens) != seqs:
        raise found_needed("seq_lens", f"{len(seq_lens)} lengths", f"{seqs}, as many as query_lens")
    rows = len(check_tensor("slots", slots, (None,), dtypes=INDEX, device=device))
    if host_query is not None:
        row_seq, query_start = _host_rows(host_query, rows, device)
        longest = max(host_query, default=0)
        if max_query_len is not None and longest > max_query_len:
            raise found_needed("query_lens", longest, f"at most max_query_len ({max_query_len})")
        longest = longest if max_query_len is None else max_query_len
    else:
        if max_query_len is None:
            raise found_needed("max_query_len", None, "a number, since query_lens lies on a device")
        row_seq, query_start = _device_rows(query_lens, rows, seqs, max_query_len)
        longest = max_query_len
    sizes = {"R": seqs, "N": rows}

    def index(name: str, value: Tensor, dims: Sequence[int | str | None]) -> Tensor:
        return check_tensor(name, value, dims, dtypes=INDEX, device=device, sizes=sizes)

    index("roles", roles, ("N",))
    index("block_table", block_table, ("R", None))
    if positions is not None:
        index("positions", positions, (4, "N"))
    if page_table is not None:
        index("page_table", page_table, ("R", None, 2))
        if not page_table.shape[1]:
            raise found_needed("page_table", list(page_table.shape), "at least page 0")
    if prefix_lens is not None:
        index("prefix_lens", prefix_lens, ("R",))
    device_seq = _int32(seq_lens if host_seq is None else host_seq, device, copy=graph)
    own_slots = slots.to(torch.int64, copy=graph)
    row_pos = row_positions(own_slots, row_seq, query_start, device_seq)
    bound = block_table.shape[1] * shape.block_size
    if max_model_len is not None:
        bound = min(bound, max_model_len)
    step = Step(
        config=config,
        cache_shape=shape,
        heads=heads,
        dtype=cache.dtype,
        device=device,
        row_seq=row_seq,
        row_pos=row_pos,
        slots=own_slots,
        roles=_int32(roles, device, copy=graph),
        positions=None if positions is None else _int32(positions, device, copy=graph),
        query_start=query_start,
        seq_lens=device_seq,
        block_table=_int32(block_table, device, copy=graph).contiguous(),
        page_table=None if page_table is None else _int32(page_table, device, copy=graph),
        prefix_lens=None if prefix_lens is None else _int32(prefix_lens, device, copy=graph),
        trust=trust,
        recomputed=recomputed,
        max_query_len=longest,
        max_seq_len=bound,
        query_lens=None if host_query is None else tuple(host_query),
        deterministic=wanted_deterministic(deterministic),
        graph=graph,
    )
    if host_seq is not None and on_host(slots):
        lengths = torch.tensor(host_seq, dtype=torch.int64, device="cpu")
        # Values as they were given: in 32 bits a wrong one may look right.
        _check_values(step, slots, row_pos, roles, positions, lengths, block_table, page_table)
    return step


def _check_values(
    step: Step,
    slots: Tensor,
    row_pos: Tensor,
    roles: Tensor,
    positions: Tensor | None,
    seq_lens: Tensor,
    block_table: Tensor,
    page_table: Tensor | None,
) -> None:
    StepValues(
        slots=slots,
        row_seq=step.row_seq,
        row_pos=row_pos,
        roles=roles,
        positions=positions,
        seq_lens=seq_lens,
        block_table=block_table,
        page_table=page_table,
        num_blocks=step.cache_shape.num_blocks,
        block_size=step.block_size,
        longest=step.max_seq_len,
        recomputed=step.recomputed,
    ).check()


def _int32(value: Lengths, device: torch.device, *, copy: bool) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.int32, copy=copy)
    # Padding sequences may hold any length, also one that 32 bits cannot.
    lengths = torch.tensor(value, dtype=torch.int64, device="cpu")
    return lengths.clamp(-(2**31), 2**31 - 1).int().to(device)


def _host_rows(query_lens: list[int], rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    for i, length in enumerate(query_lens):
        if length < 0:
            raise found_needed(f"query_lens[{i}]", length, "at least 0")
    if sum(query_lens) != rows:
        raise found_needed("slots", f"{rows} rows", f"{sum(query_lens)}, the sum of query_lens")
    return rows_of(query_lens, device)


def _device_rows(
    query_lens: Lengths, rows: int, seqs: int, max_query_len: int
) -> tuple[Tensor, Tensor]:
    """Without looking at the lengths: each row's sequence by a search among the running sums."""
    assert isinstance(query_lens, Tensor)
    device = query_lens.device
    if max_query_len == 1 and rows == seqs:
        at = torch.arange(rows + 1, device=device, dtype=torch.int32)
        return at[:-1], at
    start = torch.zeros(seqs + 1, dtype=torch.int64, device=device)
    start[1:] = query_lens.long().cumsum(0)
    row = torch.arange(rows, device=device)
    row_seq = torch.searchsorted(start[1:], row, right=True).clamp_max(max(seqs - 1, 0))
    return row_seq.int(), start.int()
