"""What a server can ask for is among what warming up compiled: by the variants that Triton's own
binder tells apart, for archs that are not here, with lengths that a GPU test has no time for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from dash_portable import attention, document
from dash_portable.cache import empty_cache
from dash_portable.kernels import launch
from dash_portable.plan import DashStep
from dash_portable.trial import warm
from dash_portable.trial.warm import CALLS, Server, warm_up
from tests.device import INTERPRETED

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the interpreter has no variants", allow_module_level=True)

from tests.variants import Variant, apart, variants

HEADS, KV_HEADS, BLOCK, LONGEST, MOST = 2, 1, 64, 40_000, 30
CONFIG = document.model_config()
Part = tuple[int, int]  # new rows and tokens of one sequence


def server(longest: int) -> Server:
    return Server(
        config=CONFIG,
        heads=HEADS,
        kv_heads=KV_HEADS,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        block_size=BLOCK,
        max_model_len=longest,
    )


class Serving:
    """A cache of one long sequence, whose blocks all others share but where they write."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self.width = -(-longest // BLOCK)
        self.blocks = 3 * self.width + 5 * MOST
        self.cache = empty_cache(CONFIG, self.blocks, KV_HEADS, BLOCK, dtype=torch.bfloat16)
        self.head_cls = torch.zeros(CONFIG.index_dim, dtype=torch.bfloat16)

    def rows(self, count: int) -> list[torch.Tensor]:
        shapes = [(count, HEADS), (count, KV_HEADS), (count, KV_HEADS), (count,), (count,)]
        return [torch.zeros(*of, CONFIG.index_dim, dtype=torch.bfloat16) for of in shapes]

    def places(self, parts: Sequence[Part], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """block_table and slots."""
        table = torch.arange(width, dtype=torch.int32).repeat(len(parts), 1)
        own, slots = self.width, [torch.zeros(0, dtype=torch.int64)]
        for seq, (rows, tokens) in enumerate(parts):
            if rows:
                first, last = (tokens - rows) // BLOCK, (tokens - 1) // BLOCK + 1
                table[seq, first:last] = torch.arange(own, own + last - first)
                own += last - first
                token = torch.arange(tokens - rows, tokens)
                slots.append(table[seq, token // BLOCK].long() * BLOCK + token % BLOCK)
        assert own <= self.blocks
        return table, torch.cat(slots)

    def step(
        self,
        parts: Sequence[Part],
        *,
        given: bool = True,
        width: int | None = None,
        pages: int = 0,
        unaligned: bool = False,
        **options: object,
    ) -> None:
        """Rows of a prompt where a sequence brings several, else decoded; two layers of them."""
        width = width or self.width
        table, slots = self.places(parts, width)
        rows = sum(n for n, _ in parts)
        positions = torch.zeros(4, rows, dtype=torch.int32)
        positions[3] = torch.tensor([-(n > 1) for n, _ in parts for _ in range(n)])
        tensors = [table, slots, torch.zeros(rows, dtype=torch.int32)]
        if unaligned:
            tensors, positions = [apart(x) for x in tensors], apart(positions)
        shared = torch.zeros(len(parts), max(pages, 1), 2, dtype=torch.int32)
        step = DashStep.plan(
            [n for n, _ in parts],
            [tokens for _, tokens in parts],
            *tensors,
            positions if given else None,
            config=CONFIG,
            cache=self.cache,
            num_heads=HEADS,
            page_table=shared if pages else None,
            **options,
        )
        for _ in range(2):  # as for two layers: only the first one locates and groups the rows
            step.run(*self.rows(rows), self.cache, self.head_cls, 0)

    def steps(self, *, pages: int = 0) -> None:
        """What `DashStep` may be asked for."""
        lengths = [2, 15, 16, 17, 100, 1000, 1024, 1025, 2048, 2049, 3072, 3073, 4096, 4097, 9000]
        for tokens in [n for n in lengths if n <= self.longest]:
            self.step([(tokens, tokens)], pages=pages)
            used = -(-tokens // BLOCK)
            for width in (used, used + 1, -(-used // 16) * 16):
                self.step([(tokens, tokens)], width=width, pages=pages)
            self.step([(tokens, tokens), (1, self.longest)], pages=pages)
            self.step([(2, self.longest), (min(tokens, 200), tokens), (0, 7)], pages=pages)
        self.step([(100, self.longest)], unaligned=True, pages=pages)
        self.step([(2, self.longest)] * 17, given=False, pages=pages)
        chance = random.Random(0)
        for _ in range(30):
            tokens = [chance.randint(2, self.longest) for _ in range(chance.randint(1, MOST))]
            many = [min(chance.choice([1, 1, 2, 3, 16, 17, 250]), n) for n in tokens]
            self.step(list(zip(many, tokens, strict=True)), pages=pages)
        for count in range(1, MOST + 1):
            tokens = [chance.randint(2, self.longest) for _ in range(count)]
            for given in (False, True):
                self.step([(1, n) for n in tokens], given=given, pages=pages)
            self.step([(0, 5), *((1, n) for n in tokens)], given=False, pages=pages)

    def established(self) -> None:
        """The calls of the established names."""
        for tokens in [n for n in (1, 2, 16, 17, 1000, 2049, 3073, 4097) if n <= self.longest]:
            table, slots = self.places([(tokens, tokens)], self.width)
            q, k, v, iq, ik = self.rows(tokens)
            roles = torch.zeros(tokens, dtype=torch.int32)
            for head_cls in (None, self.head_cls):
                attention.cache_dash_prefill(k, v, ik, roles, slots, self.cache, CONFIG, head_cls)
        for rows, tokens in [(1, 9), (1, self.longest), (5, 1300), (100, 100), (900, self.longest)]:
            table, slots = self.places([(rows, tokens)], self.width)
            q, k, v, iq, ik = self.rows(rows)
            roles, positions = slots.new_zeros(rows), slots.new_zeros(4, rows)
            for prefix in (None, torch.tensor([64])):
                attention.paged_dash_prefill(
                    q, k, v, iq, ik, roles, positions, self.cache, table, tokens, slots,
                    self.head_cls, CONFIG, 0, "AUTO", prefix,
                )  # fmt: skip
        for count in (1, 2, 3, 16, 17, MOST):
            parts = [(1, self.longest - 10 * i) for i in range(count)]
            table, slots = self.places(parts, self.width)
            q, k, v, iq, ik = self.rows(count)
            roles, lengths = slots.new_zeros(count), torch.tensor([n for _, n in parts])
            fresh = slots.new_zeros(4, count)
            fresh[3] = -1
            trusts = [
                {},
                {"cached_summaries": True},
                {"cached_summaries": True, "prefix_lens": slots.new_zeros(count)},
            ]
            for trust in trusts:
                for positions in (None, fresh):
                    attention.paged_dash_decode(
                        q, k, v, iq, ik, roles, self.cache, table, lengths, slots, self.head_cls,
                        CONFIG, 0, self.longest, positions=positions, **trust,
                    )  # fmt: skip
        table = torch.arange(self.width)[None]
        for tokens in (5, 1300, self.longest):
            attention.rebuild_summaries(
                self.cache, table, torch.tensor([tokens]), self.head_cls, CONFIG
            )


def warmed(arch: str, longest: int, calls: Sequence[str] = CALLS) -> set[Variant]:
    with variants(arch) as seen, pytest.MonkeyPatch.context() as patch:
        # On a CPU only a few steps are warmed up: here it stands for a GPU.
        patch.setattr(warm, "compiles", lambda device: True)
        warm_up(server(longest), max_rows=MOST, calls=calls)
    return seen


def served(arch: str, longest: int) -> dict[str, set[Variant]]:
    serving, found = Serving(longest), {}
    for call, ask in {
        warm.STEP: serving.steps,
        warm.ESTABLISHED: serving.established,
        warm.SHARING: lambda: [serving.steps(pages=n) for n in (2, 3, 8, 33)],
    }.items():
        with variants(arch) as seen:
            ask()
        found[call] = seen
    return found


def texts(found: set[Variant]) -> str:
    return "\n".join(sorted(f"{name}: {kinds} {options}" for name, kinds, options in found))


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize(
    ("arch", "longest"),
    [
        *((arch, LONGEST) for arch in ("sm80", "sm90", "gfx942", "gfx1100")),
        ("sm90", 1500),
        ("gfx942", 2100),
    ],
)
def test_serving_asks_for_nothing_new(
    arch: str, longest: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASH_PORTABLE_DETERMINISTIC", str(int(deterministic)))
    for call, asked in served(arch, longest).items():
        assert len({name for name, *_ in asked}) > 5  # the kernels were reached
        new = asked - warmed(arch, longest, (call,))
        assert not new, texts(new)


def test_so_many_rows_and_heads_that_every_row_of_decode_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One query head of a kv head, and up to 1,200 programs."""
    for name, value in {"HEADS": 10, "KV_HEADS": 10, "MOST": 120}.items():
        monkeypatch.setitem(globals(), name, value)
    asked = served("sm90", 3000)[warm.STEP]
    splits = {text for name, text, _ in asked if name == "attend_decode_kernel"}
    assert len(splits) >= len(launch.ATTEND["sm90"]) - 1  # all but the one of groups
    new = asked - warmed("sm90", 3000, (warm.STEP,))
    assert not new, texts(new)


def test_a_bound_that_is_not_warmed_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above can fail."""
    planned = warm.bounds(LONGEST, CONFIG.block)
    monkeypatch.setattr(warm, "bounds", lambda longest, block: planned[:1])
    new = served("sm90", LONGEST)[warm.STEP] - warmed("sm90", LONGEST, (warm.STEP,))
    assert {"select_tile_kernel", "attend_pair_kernel"} <= {name for name, *_ in new}


def test_a_short_prompt_takes_the_short_form_in_any_table() -> None:
    """Also beside a sequence that has no row, whose length may be anything."""
    serving, long = Serving(), {"attend_pair_kernel", "select_group_kernel", "invert_offset_kernel"}
    forms = {}
    for tokens, others in [(700, []), (700, [(0, 10**12)]), (3000, []), (3080, []), (9000, [])]:
        with variants("sm90") as seen:
            serving.step([(tokens, tokens), *others])
        forms[tokens, len(others)] = long & {name for name, *_ in seen}
    assert forms[700, 0] == forms[700, 1] == forms[3000, 0] == set()
    assert forms[3080, 0] == {"attend_pair_kernel", "invert_offset_kernel"}
    assert forms[9000, 0] == long


def test_prompts_are_planned_in_few_sizes() -> None:
    planned = warm.bounds(LONGEST, 32)
    assert planned[:6] == [1024, 1536, 2048, 3072, 4096, 6144]
    assert planned[-2] < LONGEST <= planned[-1]
