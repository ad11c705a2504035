"""One layer on this CPU against dense causal attention, in one process.

    python benchmarks/cpu_dense.py --json out.json

Whole layer (store, select, attend) of a plain-text prompt whose rows choose at random, 10 heads of
128, against `scaled_dot_product_attention` of the same size. Medians, in seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention as dense

from dash_portable import DashConfig, DashStep, empty_cache, prompt_positions

HEADS, WIDTH, CACHE_BLOCK = 10, 128, 64
CONFIG = DashConfig(index_dim=WIDTH, scale=(200.0,), floor=(1e-4,))


def median(call: Callable[[], object], runs: int) -> float:
    call()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[runs // 2]


def measure(tokens: int, dtype: torch.dtype) -> dict[str, float]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, tokens, HEADS, WIDTH).to(dtype)
    iq, ik = torch.randn(2, tokens, WIDTH).to(dtype)
    head_cls = torch.randn(WIDTH)
    blocks = -(-tokens // CACHE_BLOCK) + 2
    cache = empty_cache(CONFIG, blocks, HEADS, CACHE_BLOCK, dtype=dtype)
    table = torch.randperm(blocks)[None].int()
    at = torch.arange(tokens)
    slots = table[0, at // CACHE_BLOCK].long() * CACHE_BLOCK + at % CACHE_BLOCK
    roles = torch.zeros(tokens, dtype=torch.long)
    prompt = DashStep.plan(
        [tokens], [tokens], table, slots, roles, prompt_positions(roles), config=CONFIG, cache=cache
    )
    one = DashStep.plan([1], [tokens], table, slots[-1:], roles[-1:], config=CONFIG, cache=cache)
    rows = [x[-1:] for x in (q, k, v, iq, ik)]
    whole = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    last = whole[0][:, :, -1:]
    runs = 1 if tokens > 10000 else 3
    return {
        "prefill": median(lambda: prompt.run(q, k, v, iq, ik, cache, head_cls, 0), runs),
        "prefill dense": median(lambda: dense(*whole, is_causal=True), runs),
        "decode": median(lambda: one.run(*rows, cache, head_cls, 0), 20),
        "decode dense": median(lambda: dense(last, whole[1], whole[2]), 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    results: dict[str, object] = {**facts, "torch": torch.__version__}
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (8192, 32768):
            found = measure(tokens, dtype)
            name = f"{tokens} {str(dtype).removeprefix('torch.')}"
            results[name] = found
            ratios = {what: found[f"{what} dense"] / found[what] for what in ("prefill", "decode")}
            print(name, {key: round(value, 5) for key, value in found.items()}, ratios, flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
