"""Gather and merge, beside a plain gather and the segments' own merge."""

import pytest
import torch

from dash_portable.kernels import gather, merge
from dash_portable.segments.merge import merge_segments
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("block_size", "width"), [(8, 64), (64, 80)])
def test_gather(dtype, biased, block_size, width):
    lengths = [700, 33, 160, 1]
    texts = [Text(prompt=[2] + [1] * (length - 1), answer=[]) for length in lengths]
    world = World(texts, dtype=dtype, block_size=block_size, width=width, kv_heads=2, strided=True)
    feed(world, *[(i, 0, length) for i, length in enumerate(lengths)])
    step = world.step([*[(i, n - 1, n) for i, n in enumerate(lengths)], None])
    topk, bs, local = 12, 32, 4
    ids = torch.full((5, topk), -1, dtype=torch.int32)
    ids[0, :5] = torch.tensor([17, 2, 9, 0, 1])
    ids[2, 0] = 0
    bias = torch.where(ids >= 0, torch.randn(5, topk), 0.0)
    slots, extra = (topk + local) * bs, 8 if biased else 0
    key = torch.empty(5 * slots, 2, width + extra, dtype=dtype)
    value = torch.empty(5 * slots, 2, width, dtype=dtype)
    used = torch.empty(5, topk + 1, dtype=torch.int32)
    padded = 1 << (width - 1).bit_length()
    gather.gather_segments_kernel[(5 * (topk + local),)](
        world.cache, step.row_pos, step.row_seq, step.block_table, ids, bias, key, value, used,
        *world.cache.stride()[:3], step.block_table.stride(0), *key.stride()[:2],
        *value.stride()[:2],
        2, width, padded, block_size, bs, bs, local, topk, extra,
    )  # fmt: skip
    keys, values, live = gathered(world, step, ids)
    assert torch.equal(key[..., :width], keys.flatten(0, 1))
    assert torch.equal(value, values.flatten(0, 1))
    far = live[:, : topk * bs].unflatten(1, (topk, bs)).sum(2)
    assert used.tolist() == torch.cat([far, live[:, topk * bs :].sum(1, keepdim=True)], 1).tolist()
    if biased:
        columns = key[..., width : width + 2].float()
        assert (key[..., width + 2 :] == 0).all()
        masked = torch.tensor(-30000.0).to(dtype).float()
        assert (columns[~live.flatten(), :, 0] == masked).all()
        assert (columns[~live.flatten(), :, 1] == 0).all()
        prior = torch.cat([bias.repeat_interleave(bs, 1), torch.zeros(5, local * bs)], 1)
        seen = columns.sum(-1).unflatten(0, (5, slots)) / width**0.5
        error = (seen - prior[..., None]).abs()[live].max()
        assert error <= torch.finfo(dtype).eps ** 2 * 16 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_merge(dtype, biased):
    rows, segments, heads, width = 4, 13, 3, 80
    out = torch.randn(rows, segments, heads, width).to(dtype)
    lse = torch.randn(rows, segments, heads) * 4
    lse[0, 3:9] = -torch.inf
    lse[1] = -torch.inf
    lse[2, :, 1] = -torch.inf
    out[lse == -torch.inf] = torch.nan
    bias = torch.randn(rows, segments - 1) * 3
    merged = torch.empty(rows, heads, width, dtype=dtype)
    merge.merge_segments_kernel[(rows * heads,)](
        out,
        lse,
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
    exact = merge_segments(out.double(), lse.double(), bias.double() if biased else None)
    eps = torch.finfo(dtype).eps
    assert (merged.double() - exact).abs().max() <= eps * exact.abs().max() + 1e-6
    assert (merged[1] == 0).all()
