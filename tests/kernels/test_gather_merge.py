"""Gather and merge, beside a plain gather and the segments' own merge."""

import pytest
import torch

from dash_portable.kernels import gather, merge
from dash_portable.segments.merge import merge_segments
from tests.kernels.families import varied
from tests.kernels.tolerance import allowed_error
from tests.kernels.world import Text, World, feed


def gathered(world, step, ids):
    """Keys and values [N, W, H, D] of each row's slots, zeros where none is used, and which are."""
    config, rows = world.config, step.num_rows
    slots = (config.topk + config.local_blocks) * config.block
    both = torch.zeros(rows, slots, world.kv_heads, 2 * world.width, dtype=world.dtype)
    live = torch.zeros(rows, slots, dtype=torch.bool)
    for n in range(rows):
        p = int(step.row_pos[n])
        lo = max(p + 1 - config.local, 0)
        tokens = [
            *[
                int(b) * config.block + t if b >= 0 else lo
                for b in ids[n]
                for t in range(config.block)
            ],
            *range(lo, lo + config.local),
        ]
        for slot, token in enumerate(tokens):
            end = lo if slot < config.topk * config.block else p + 1
            if token < end:
                block = int(step.block_table[n, token // world.block_size])
                both[n, slot] = world.cache[block, :-1, token % world.block_size]
                live[n, slot] = True
    return both[..., : world.width], both[..., world.width :], live


ROWS = (
    gather.GatherRow(heads=1),
    gather.GatherRow(heads=2, last=True),
    gather.GatherRow(heads=4, tail=16),
)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(
    ("dtype", "shape"), varied([torch.float32, torch.bfloat16, torch.float16], [0, 1, 2])
)
def test_gather(dtype, biased, shape):
    """More heads than a program takes, a window that begins inside a block, rows without a block,
    a padding row; keys and values in different orders of memory."""
    block_size, width, group = ((8, 64, 1), (64, 80, 3), (32, 64, 2))[shape]
    row = ROWS[shape]
    lengths, heads = [700, 33, 160, 1, 288], 3
    texts = [Text(prompt=[2] + [1] * (length - 1), answer=[]) for length in lengths]
    world = World(
        texts, dtype=dtype, block_size=block_size, width=width, kv_heads=heads, strided=True
    )
    feed(world, *[(i, 0, length) for i, length in enumerate(lengths)])
    step = world.step([*[(i, n - 1, n) for i, n in enumerate(lengths)], None])
    topk, bs, local = 12, 32, 4
    rows = len(lengths) + 1
    ids = torch.full((rows, topk), -1, dtype=torch.int32)
    ids[0, :5] = torch.tensor([17, 2, 9, 0, 1])
    ids[2, 0] = 0
    ids[4, :2] = torch.tensor([4, 3])
    bias = torch.where(ids >= 0, torch.randn(rows, topk), 0.0)
    bias[0, :2] = torch.tensor([1e6, -1e6])  # beyond float16 even as a number
    ids[-1], bias[-1] = 2**30, torch.nan  # a padding row may hold anything
    slots, extra = (topk + local) * bs, (row.tail or 8) if biased else 0
    key = torch.empty(heads, rows * slots, width + extra, dtype=dtype).transpose(0, 1)
    value = torch.empty(rows * slots, heads, width, dtype=dtype)
    query = torch.randn(rows, heads * group, width).to(dtype)
    query[-1] = torch.nan
    copies = 1 if biased else topk + 1
    wide = torch.full((rows, copies, heads * group, width + 8), 7.0, dtype=dtype)
    used = torch.empty(rows, topk + 1, dtype=torch.int32)
    length = torch.empty_like(used)
    parts = -(-heads // row.heads)
    gather.gather_segments_kernel[(rows * (topk + local + 1) * parts,)](
        world.cache, step.row_pos, step.row_seq, step.block_table, ids, bias, query, key, value,
        wide, used, length,
        *world.cache.stride()[:3], step.block_table.stride(0),
        *(stride // 8 for stride in (*key.stride()[:2], *value.stride()[:2])),
        heads, group, width, 1 << (width - 1).bit_length(), block_size, bs, local, topk, extra,
        width + 8, row.heads, 1 << (row.heads * group - 1).bit_length(), parts, row.last,
    )  # fmt: skip
    keys, values, live = gathered(world, step, ids)
    assert torch.equal(key[..., :width], keys.flatten(0, 1))
    assert torch.equal(value, values.flatten(0, 1))
    query[-1] = 0
    assert torch.equal(wide[..., :width], query[:, None].expand(-1, copies, -1, -1))
    assert (wide[..., width:] == 7).all()
    if not biased:
        far = live[:, : topk * bs].unflatten(1, (topk, bs)).sum(2)
        near = live[:, topk * bs :].sum(1, keepdim=True)
        assert used.tolist() == torch.cat([far, near], 1).tolist()
        assert torch.equal(length, used.clamp(min=1))
        return
    columns = key[..., width : width + 2].float()
    assert (key[..., width + 2 :] == 0).all()
    masked = torch.tensor(-30000.0).to(dtype).float()
    assert (columns[~live.flatten(), :, 0] == masked).all()
    assert (columns[~live.flatten(), :, 1] == 0).all()
    prior = torch.cat([bias.repeat_interleave(bs, 1), torch.zeros(rows, local * bs)], 1)
    prior = prior.clamp(-30000 / width**0.5, 30000 / width**0.5)
    seen = columns.sum(-1).unflatten(0, (rows, slots)) / width**0.5
    allowed = torch.finfo(dtype).eps ** 2 * (16 + prior.abs()) + 1e-6 * (1 + prior.abs())
    assert ((seen - prior[..., None]).abs() <= allowed[..., None])[live].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_merge(dtype, biased):
    rows, segments, heads, width = 4, 13, 3, 80
    out = torch.randn(rows, segments, heads, width).to(dtype)
    lse = torch.randn(rows, segments, heads) * 4
    used = torch.randint(1, 33, (rows, segments), dtype=torch.int32)
    used[0, 3:9], used[1] = 0, 0
    lse[2, :, 1] = -torch.inf
    out[lse == -torch.inf] = 0
    out[used == 0], lse[used == 0] = torch.nan, torch.inf  # as libraries leave it
    bias = torch.randn(rows, segments - 1) * 3
    merged = torch.empty(rows, heads, width, dtype=dtype)
    merge.merge_segments_kernel[(rows * heads,)](
        out,
        lse,
        used,
        bias,
        merged,
        *out.stride()[:3],
        *lse.stride(),
        heads,
        width,
        128,
        segments,
        16,
        biased,
    )

    def oracle(values, kind):
        added = bias.to(kind) if biased else None
        return merge_segments(values.to(kind), lse.to(kind), added, used)

    exact, eager = oracle(out, torch.float64), oracle(out, torch.float32).to(dtype)
    allowed = allowed_error(exact, eager, oracle(out.abs(), torch.float64), segments)
    assert (merged.double() - exact).abs().max() <= allowed
    assert (merged[1] == 0).all()
