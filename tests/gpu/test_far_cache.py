"""A cache of more than 2**31 elements whose live blocks lie behind that, NaN everywhere else.

The same steps run in a small cache: every result and every live block must have the same bits. With
offsets of 32 bits they would lie elsewhere.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dash_portable.step import Trust
from dash_portable.triton_layer import TritonLayer
from tests.device import DEVICE, INTERPRETED
from tests.gpu.kinds import KINDS, launched, segments
from tests.gpu.served import PADDING, SHAPE, Part, Served, bits, planned, prompts, same

FAR = 2**18 if INTERPRETED else 2**31  # elements before the first live block of a layout
LAYOUTS = {"blocks first": (0, 1, 2, 3), "heads first": (1, 0, 2, 3)}


def far_cache(near: Tensor, order: tuple[int, ...]) -> tuple[Tensor, int]:
    """All NaN, as many numbers behind FAR as `near` has; and how many blocks come before them.

    order: the dimensions from the largest stride to the smallest.
    """
    blocks, *rest = near.shape
    per_block = near[0].numel()
    before = FAR // per_block + 1
    # Where another dimension lies outside blocks, half of its places lie behind FAR.
    total = (before + blocks) * (1 if order[0] == 0 else 2)
    shape = (total, *rest)
    held = torch.full([shape[d] for d in order], torch.nan, dtype=near.dtype, device=DEVICE)
    back = [order.index(d) for d in range(4)]
    return held.permute(back), total - blocks


def steps(served: Served, cache: Tensor) -> dict[str, Tensor]:
    """Prompts in chunks, rows alone, together and without trust, library ways; all they gave."""
    found: dict[str, Tensor] = {}
    half = [length // 2 for length in served.prompt_len]

    def run(name: str, parts: list[Part], **options: object) -> None:
        batch = served.batch(parts)
        step = planned(served.step(batch, cache, **options))
        out = step.run(*served.rows(batch), cache, served.head_cls, 0)
        assert step.selection is not None
        found[f"{name}: out"] = out
        found[f"{name}: ids"], found[f"{name}: bias"] = (x.clone() for x in step.selection)
        if not options.get("given", True):
            found.update({f"{name}: {way}": x for way, x in segments(step, cache).items()})

    seqs = range(len(half))
    run("first halves", [Part(s, 0, half[s]) for s in seqs])
    run("second halves", [Part(s, half[s], served.prompt_len[s], 1) for s in seqs])
    at = served.prompt_len
    run("rows", [*(Part(s, at[s], at[s] + 1) for s in seqs), PADDING], given=False)
    run("mixed", [Part(0, at[0] + 1, at[0] + 3), Part(1, at[1] + 1, at[1] + 2)])
    late = [Part(s, at[s] + 1, at[s] + 2) for s in (2, 3)]
    run("rows without trust", late, given=False, trust=Trust.NONE)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_live_blocks_behind_two_to_the_31st(name: str) -> None:
    near, far = (Served(prompts(), answer=6, seed=3) for _ in range(2))
    small = near.cache()
    large, before = far_cache(small, LAYOUTS[name])
    assert large.numel() > FAR
    far.blocks = [blocks + before for blocks in far.blocks]
    far.num_blocks = len(large)
    with launched(KINDS["decode"]):
        wanted = steps(near, small)
        found = steps(far, large)
    for what, x in wanted.items():
        assert same(x, found[what]), what
    assert same(small, large[before:].contiguous())
    blank = bits(torch.full((1,), torch.nan, dtype=SHAPE.dtype, device=DEVICE))
    for part in large[:before].split(1024):
        assert bool((bits(part) == blank).all())


def test_rebuilt_behind_two_to_the_31st() -> None:
    served = Served(prompts(), answer=6, seed=3)
    small = served.fed(served.cache(), served.prompt_len)
    small[:, -1, :, SHAPE.width + 22 :] = 7.0
    large, before = far_cache(small, LAYOUTS["blocks first"])
    large[before:] = small
    for cache, first in ((small, 0), (large, before)):
        batch = served.batch([Part(s, 0, 0) for s in range(len(served.blocks))])
        for row, blocks in enumerate(served.blocks):
            batch.table[row, : len(blocks)] = torch.tensor(blocks + first).int()
        batch.seq_lens[:] = served.prompt_len
        TritonLayer(served.step(batch, cache)).rebuild(cache, served.head_cls)
    assert same(small, large[before:].contiguous())
    assert bool(large[:before].isnan().all())
