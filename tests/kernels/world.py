"""Sequences in a cache, steps over them, and the eager layer beside the Triton one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_portable.cache import CacheShape
from dash_portable.config import DashConfig
from dash_portable.eager import EagerLayer
from dash_portable.pages import prompt_coordinates, prompt_positions
from dash_portable.step import Step, Trust, row_positions, rows_of
from dash_portable.triton_layer import TritonLayer
from tests.device import DEVICE

OUTSIDE = 2**30
Rows = tuple[int, int, int]  # sequence, first token, end


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Roles of one sequence: what was the prompt, and what was decoded after it."""

    prompt: list[int]
    answer: list[int]

    @property
    def roles(self) -> list[int]:
        return self.prompt + self.answer


class World:
    """Sequences with random rows of one layer, in a cache whose blocks lie in random order."""

    def __init__(
        self,
        texts: Sequence[Text],
        *,
        dtype: torch.dtype = torch.float32,
        width: int = 64,
        kv_heads: int = 1,
        group: int = 1,
        block_size: int = 32,
        block: int = 32,
        strided: bool = False,
        topk: int = 12,
        window: int = 16,
        local_blocks: int = 4,
        seed: int = 0,
    ) -> None:
        self.texts, self.dtype, self.block_size = list(texts), dtype, block_size
        self.group, self.kv_heads, self.width = group, kv_heads, width
        self.config = DashConfig(
            index_dim=width,
            scale=(60.0,),
            floor=(1e-4,),
            block=block,
            topk=topk,
            window=window,
            local_blocks=local_blocks,
        )
        self.generator = torch.Generator().manual_seed(seed)
        lengths = [len(text.roles) for text in texts]
        blocks = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(blocks) + 2, generator=self.generator).int()
        self.blocks = list(order.split([*blocks, 2]))[:-1]
        shape = (sum(blocks) + 2, kv_heads + 1, block_size, 2 * width)
        if strided:  # tokens before heads, and a gap behind every cache block
            room = torch.full(
                (shape[0], block_size + 3, kv_heads + 1, 2 * width), torch.nan, dtype=dtype
            )
            self.cache = room[:, :block_size].transpose(1, 2)
        else:
            self.cache = torch.full(shape, torch.nan, dtype=dtype)
        self.head_cls = self.random(width)
        self.inputs = [
            [
                self.random(length, kv_heads * group, width),
                self.random(length, kv_heads, width),
                self.random(length, kv_heads, width),
                self.random(length, width),
                self.random(length, width),
            ]
            for length in lengths
        ]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def slots(self, seq: int, first: int, end: int) -> Tensor:
        token = torch.arange(first, end)
        return self.blocks[seq][token // self.block_size].long() * self.block_size + (
            token % self.block_size
        )

    def positions(self, seq: int, first: int, end: int) -> Tensor:
        """Columns of `positions`; decoded tokens have nonsense and a 0 in row 3."""
        prompt = self.texts[seq].prompt
        given = prompt_positions(torch.tensor(prompt))
        decoded = torch.full((4, len(self.texts[seq].answer)), 12345, dtype=torch.int32)
        decoded[3] = 0
        return torch.cat([given, decoded], 1)[:, first:end]

    def page_table(self) -> Tensor:
        prompts = [prompt_coordinates(torch.tensor(text.prompt)) for text in self.texts]
        table = torch.zeros(len(prompts), max(len(p.counts) for p in prompts), 2, dtype=torch.int32)
        for row, prompt in zip(table, prompts, strict=True):
            row[: len(prompt.counts), 0] = prompt.starts
            row[: len(prompt.counts), 1] = prompt.counts
        return table

    def step(
        self,
        parts: Sequence[Rows | None],
        *,
        given: bool = True,
        tables: bool = False,
        trust: Trust = Trust.CACHED,
        prefix_lens: Sequence[int] | None = None,
        padding: int = 0,
        recomputed: bool = False,
        deterministic: bool = False,
        graph: bool = False,
    ) -> Step:
        """Rows `first .. end` of sequences; None is one row of padding, as a sequence of its own.

        padding   rows of padding put before the last row of every part with several rows
        """
        query_lens, slots, roles, positions, lengths, seqs = [], [], [], [], [], []
        for part in parts:
            if part is None:
                query_lens.append(1)
                slots.append(torch.tensor([-1]))
                roles.append(torch.tensor([2]))
                positions.append(torch.full((4, 1), -99, dtype=torch.int32))
                lengths.append(-12345)
                seqs.append(None)
                continue
            seq, first, end = part
            of = [
                self.slots(seq, first, end),
                torch.tensor(self.texts[seq].roles[first:end]),
                self.positions(seq, first, end),
            ]
            if padding and end - first > 1:
                blanks = (torch.full((padding,), -1), torch.full((padding,), 2))
                blanks = (*blanks, torch.full((4, padding), -99, dtype=torch.int32))
                of = [
                    torch.cat([x[..., :-1], blank.to(x.dtype), x[..., -1:]], -1)
                    for x, blank in zip(of, blanks, strict=True)
                ]
            query_lens.append(len(of[0]))
            slots.append(of[0])
            roles.append(of[1])
            positions.append(of[2])
            lengths.append(end)
            seqs.append(seq)
        row_seq, query_start = rows_of(query_lens, DEVICE)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        table = torch.full((len(parts), max(map(len, self.blocks)) + 1), OUTSIDE, dtype=torch.int32)
        pages = torch.zeros(0)
        if tables:
            every = self.page_table()
            pages = torch.stack([every[seq or 0] for seq in seqs])
        for row, seq, length in zip(table, seqs, lengths, strict=True):
            if seq is not None:
                live = -(-length // self.block_size)
                row[:live] = self.blocks[seq][:live]
        all_slots = torch.cat(slots)
        return Step(
            config=self.config,
            cache_shape=CacheShape.of(self.cache, self.config),
            heads=self.kv_heads * self.group,
            dtype=self.dtype,
            device=DEVICE,
            row_seq=row_seq,
            row_pos=row_positions(all_slots, row_seq, query_start, seq_lens),
            slots=all_slots,
            roles=torch.cat(roles).int(),
            positions=torch.cat(positions, 1).contiguous() if given else None,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=table,
            page_table=pages if tables else None,
            prefix_lens=None if prefix_lens is None else torch.tensor(prefix_lens).int(),
            trust=trust,
            recomputed=recomputed,
            max_query_len=max(query_lens),
            max_seq_len=max(map(len, (text.roles for text in self.texts))),
            query_lens=tuple(query_lens),
            deterministic=deterministic,
            graph=graph,
        )

    def rows(self, step: Step) -> list[Tensor]:
        """q, k, v, iq, ik of the step's rows, NaN for padding."""
        owner = {block: seq for seq, own in enumerate(self.blocks) for block in own.tolist()}
        at: dict[int, tuple[list[int], list[int]]] = {}  # of a sequence: rows, and their tokens
        for row, (slot, token) in enumerate(
            zip(step.slots.tolist(), step.row_pos.tolist(), strict=True)
        ):
            if token >= 0:
                rows, tokens = at.setdefault(owner[slot // self.block_size], ([], []))
                rows.append(row)
                tokens.append(token)
        made = []
        for i in range(5):
            like = self.inputs[0][i]
            whole = torch.full((step.num_rows, *like.shape[1:]), torch.nan, dtype=self.dtype)
            for seq, (rows, tokens) in at.items():
                whole[rows] = self.inputs[seq][i][tokens]
            made.append(whole)
        return made


def feed(world: World, *parts: Rows | None, **options: object) -> None:
    """Store rows by the eager layer."""
    step = world.step(parts, **options)
    EagerLayer(step).store(*world.rows(step), world.cache, world.head_cls)


def both(world: World, step: Step) -> tuple[TritonLayer, EagerLayer, list[Tensor], Tensor]:
    """Both layers, the step's rows, and a copy of the cache for the eager one."""
    twin = world.cache.clone()
    return TritonLayer(step), EagerLayer(step), world.rows(step), twin


def assert_same_cache(world: World, ours: Tensor, theirs: Tensor) -> None:
    """Bytes are equal; numbers as far as float32 angles and sums go, rounded once; blanks stay
    blank.
    """
    width = world.width
    aux, twin = (
        ours[:, -1, :, width : width + 30].float(),
        theirs[:, -1, :, width : width + 30].float(),
    )
    torch.testing.assert_close(aux, twin, rtol=0, atol=0, equal_nan=True)
    eps = torch.finfo(world.dtype).eps
    largest = float(theirs.nan_to_num().abs().max())
    bound = 2 * eps * largest + 2**-19 * largest
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound, equal_nan=True)


def assert_same_selection(
    found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], tolerance: float = 2e-3
) -> None:
    """The same blocks in the same order with the same biases."""
    ids, bias = found
    torch.testing.assert_close(ids, wanted[0], rtol=0, atol=0)
    torch.testing.assert_close(bias, wanted[1], rtol=0, atol=tolerance)
