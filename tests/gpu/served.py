"""A server in miniature: sequences in a paged cache, and the steps that a batch of them takes.

On a GPU it has the model's shape, so that all proofs share their compiled kernels. In Triton's
interpreter it is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dash_portable.backends.triton import Runner
from dash_portable.config import DashConfig
from dash_portable.describe import describe, length_bound
from dash_portable.pages import prompt_coordinates, prompt_positions
from dash_portable.plan import DashStep
from dash_portable.serve import serve
from dash_portable.shared_layer import SharedLayer
from dash_portable.step import Step
from dash_portable.triton_layer import TritonLayer
from tests.device import DEVICE, INTERPRETED

OUTSIDE = 2**30  # a cache block that no cache has
Ints = npt.NDArray[np.int64]
Rows5 = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What kernels are compiled for, and the longest sequence that a step allows for."""

    config: DashConfig
    kv_heads: int
    group: int
    dtype: torch.dtype
    block_size: int
    longest: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def width(self) -> int:
        return self.config.index_dim


_MODEL = Shape(
    config=DashConfig(index_dim=128, scale=(60.0,), floor=(1e-4,)),
    kv_heads=10,
    group=1,
    dtype=torch.bfloat16,
    block_size=64,
    longest=8192,
)
_TINY = Shape(
    config=DashConfig(
        index_dim=64, scale=(40.0,), floor=(1e-4,), block=16, local_blocks=1, topk=4, window=6
    ),
    kv_heads=2,
    group=1,
    dtype=torch.bfloat16,
    block_size=32,
    longest=4352,
)
SHAPE = _TINY if INTERPRETED else _MODEL
GROUPED = replace(SHAPE, kv_heads=2, group=4, dtype=torch.float16, block_size=16)

# Two sequences have more blocks than one program of the inversion takes.
LONG = replace(SHAPE, longest=1200 * SHAPE.config.block)


def prompts(
    page: int = 40 if INTERPRETED else 273,
    text: int = 330 if INTERPRETED else 6000,
    small: int = 12 if INTERPRETED else 60,
) -> list[list[int]]:
    """Roles of prompts: pages of `page` image tokens; `text` tokens without any; `small` pages that
    lie several in a block; images before the first page.
    """
    pages = ([2] + [1] * page) * 3 + [0] * 20
    tiny = ([2] + [1] * 3 + [0] * 2) * small + [1] * 30 + [0] * 15
    front = [0] * 5 + [1] * 50 + ([2] + [0] * 9 + [1] * page) * 2 + [0] * 7
    return [pages, [0] * text, tiny, front]


class Part(NamedTuple):
    """Rows of one sequence in a step: tokens `first .. end`, and rows of padding among them."""

    seq: int
    first: int
    end: int
    padding: int = 0


PADDING = Part(-1, 0, 0, 1)  # a sequence of one row that is nobody's


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's arguments on the device; `token [N]` says where the rows' inputs lie."""

    query_lens: list[int]
    seq_lens: list[int]
    table: Tensor
    slots: Tensor
    roles: Tensor
    positions: Tensor
    pages: Tensor
    token: Tensor

    def changes(self, step: Step) -> dict[str, Tensor | None]:
        """The arguments of `DashStep.update` for a step that was planned alike."""
        return {
            "seq_lens": torch.tensor(self.seq_lens, device=self.table.device),
            "block_table": self.table,
            "slots": self.slots,
            "roles": self.roles,
            "positions": None if step.positions is None else self.positions,
            "page_table": None if step.page_table is None else self.pages,
        }


class Served:
    """Sequences of one layer with random inputs, whose cache blocks lie in random order."""

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        answer: int = 40,
        shape: Shape = SHAPE,
        spare: int = 8,
        seed: int = 0,
        tied: int = 0,
    ) -> None:
        """tied: every so many tokens' index query is zero, so that all its scores are equal."""
        self.shape, self.random = shape, np.random.default_rng(seed)
        markers = [0, 2, *[0] * 7]
        self.prompt_len = [len(text) for text in texts]
        said = [markers[i % len(markers)] for i in range(answer)]
        self.roles = [np.array([*text, *said], np.int64) for text in texts]
        self.positions = [self._positions(list(text), answer) for text in texts]
        self.pages = self._page_table([list(text) for text in texts])
        self.lengths = [len(roles) for roles in self.roles]
        self.base = np.concatenate([[0], np.cumsum(self.lengths)])
        need = [-(-length // shape.block_size) for length in self.lengths]
        self.num_blocks = sum(need) + spare
        order = self.random.permutation(self.num_blocks)
        self.blocks: list[Ints] = np.split(order, np.cumsum(need))[:-1]
        self.free = set(order[sum(need) :].tolist())
        self.width = -(-shape.longest // shape.block_size)  # of block tables
        assert max(need) < self.width
        made = torch.Generator(device=DEVICE).manual_seed(seed)
        total, heads, of = int(self.base[-1]), shape.heads, shape.width

        def normal(*sizes: int) -> Tensor:
            """Random numbers of every token, and a last row that is none."""
            x = torch.randn(total + 1, *sizes, of, generator=made, device=DEVICE)
            x[-1] = torch.nan
            return x.to(shape.dtype)

        self.inputs: Rows5 = (
            normal(heads), normal(shape.kv_heads), normal(shape.kv_heads), normal(), normal(),
        )  # fmt: skip
        if tied:
            self.inputs[3][:-1:tied] = 0
        self.head_cls = torch.randn(of, generator=made, device=DEVICE).to(shape.dtype)

    @staticmethod
    def _positions(text: list[int], answer: int) -> Ints:
        """Columns of all tokens; decoded ones have nonsense, and 0 in row 3."""
        decoded = np.full((4, answer), 4321, np.int64)
        decoded[3] = 0
        return np.concatenate([prompt_positions(torch.tensor(text)).numpy(), decoded], 1)

    @staticmethod
    def _page_table(texts: list[list[int]]) -> Ints:
        """[sequences, pages, 2], nonsense behind a sequence's last page."""
        known = [prompt_coordinates(torch.tensor(text)) for text in texts]
        table = np.full((len(texts), max(len(p.counts) for p in known) + 1, 2), -OUTSIDE, np.int64)
        for row, prompt in zip(table, known, strict=True):
            row[: len(prompt.counts), 0] = prompt.starts
            row[: len(prompt.counts), 1] = prompt.counts
        return table

    def cache(self) -> Tensor:
        """All NaN."""
        shape = self.shape
        size = (self.num_blocks, shape.kv_heads + 1, shape.block_size, 2 * shape.width)
        return torch.full(size, torch.nan, dtype=shape.dtype, device=DEVICE)

    def slots(self, seq: int, first: int, end: int) -> Ints:
        token, size = np.arange(first, end), self.shape.block_size
        return self.blocks[seq][token // size] * size + token % size

    def batch(self, parts: Sequence[Part], scatter: np.random.Generator | None = None) -> Batch:
        """The arguments of a step of `parts`; padding lies behind a part's rows, or anywhere."""
        lens = [part.end - part.first + part.padding for part in parts]
        rows = sum(lens)
        slots, roles, token = np.full(rows, -1), np.full(rows, 77), np.full(rows, self.base[-1])
        positions = np.full((4, rows), -7)
        table = np.full((len(parts), self.width), OUTSIDE)
        pages = np.full((len(parts), *self.pages.shape[1:]), -OUTSIDE)
        seq_lens, begin = [], 0
        for i, (part, count) in enumerate(zip(parts, lens, strict=True)):
            live = part.end - part.first
            at = np.arange(begin, begin + live)
            if scatter is not None:
                at = begin + np.sort(scatter.choice(count, live, replace=False))
            begin += count
            seq_lens.append(part.end if part.seq >= 0 else -12345)
            if part.seq < 0:
                continue
            slots[at] = self.slots(part.seq, part.first, part.end)
            roles[at] = self.roles[part.seq][part.first : part.end]
            token[at] = self.base[part.seq] + np.arange(part.first, part.end)
            positions[:, at] = self.positions[part.seq][:, part.first : part.end]
            held = -(-part.end // self.shape.block_size)
            table[i, :held] = self.blocks[part.seq][:held]
            pages[i] = self.pages[part.seq]

        def moved(x: Ints, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.from_numpy(x).to(dtype).to(DEVICE)

        return Batch(
            query_lens=lens,
            seq_lens=seq_lens,
            table=moved(table),
            slots=moved(slots, torch.int64),
            roles=moved(roles),
            positions=moved(positions),
            pages=moved(pages),
            token=moved(token, torch.int64),
        )

    def rows(self, batch: Batch) -> Rows5:
        """q, k, v, iq, ik of a step, NaN for padding."""
        q, k, v, iq, ik = (x[batch.token] for x in self.inputs)
        return q, k, v, iq, ik

    def step(
        self,
        batch: Batch,
        cache: Tensor,
        *,
        given: bool = True,
        paged: bool = False,
        wide: bool = False,
        **options: Any,
    ) -> Step:
        """given: rows bring their coordinates. paged: through a page table. wide: planned for the
        longest sequence of the shape, as prompts are whose lengths lie on the device.
        """
        step = describe(
            batch.query_lens,
            batch.seq_lens,
            batch.table,
            batch.slots,
            batch.roles,
            batch.positions if given else None,
            config=self.shape.config,
            cache=cache,
            max_model_len=self.shape.longest,
            num_heads=self.shape.heads,
            page_table=batch.pages if paged else None,
            **options,
        )
        if not wide:
            return step
        return replace(step, max_seq_len=length_bound(self.shape.longest, step.config.block))

    def fed(self, cache: Tensor, ends: Sequence[int], chunk: int = 1 << 20) -> Tensor:
        """Store and attend the first `ends[s]` tokens of every sequence, `chunk` at a time."""
        done = [0] * len(ends)
        while any(a < b for a, b in zip(done, ends, strict=True)):
            parts = [
                Part(seq, at, min(at + chunk, end))
                for seq, (at, end) in enumerate(zip(done, ends, strict=True))
                if at < end
            ]
            for part in parts:
                done[part.seq] = part.end
            batch = self.batch(parts)
            planned(self.step(batch, cache)).run(*self.rows(batch), cache, self.head_cls, 0)
        return cache

    def move(self, seq: int) -> tuple[Ints, Ints]:
        """Give a sequence other cache blocks; its old ones and its new ones."""
        old = self.blocks[seq]
        pool = np.array(sorted(self.free | set(old.tolist())))
        self.blocks[seq] = self.random.choice(pool, len(old), replace=False)
        self.free = set(pool.tolist()) - set(self.blocks[seq].tolist())
        return old, self.blocks[seq]


def parts_of(step: DashStep) -> tuple[SharedLayer, Any]:
    """The layer and the runner of a planned step."""
    return step._shared, step._runner


def planned(step: Step) -> DashStep:
    """A step for the package's own kernels."""
    if not INTERPRETED:
        return DashStep.of(step, "TRITON")
    # Dispatch knows no interpreter: who serves a CPU is asked, and the kernels serve.
    choice, _, _ = serve(step, "EAGER")
    runner = Runner(step)
    return DashStep(step, choice, TritonLayer(step), runner)


def bits(x: Tensor) -> Tensor:
    """Numbers as integers: NaN equals itself there."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds[x.dtype.itemsize]) if x.is_floating_point() else x


def same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(bits(first), bits(second))
