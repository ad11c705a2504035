"""What planning a prompt by its own length is worth: whole layers of short prompts in the table of
a long context, planned so, and planned for all that the table holds.

    python benchmarks/short_prompts.py --tokens 32768

Medians of graph replays, milliseconds; memory is what the step keeps while it lives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dash_portable import document
from dash_portable.document import Document
from dash_portable.plan import DashStep
from dash_portable.serve import serve
from dash_portable.step import Step
from dash_portable.trial.clock import time_call
from dash_portable.trial.feed import Feed
from dash_portable.trial.inputs import layer_inputs

PROMPTS: dict[str, Callable[[], Document]] = {
    "1 page": lambda: document.paged(1, answer=0),
    "8 pages": lambda: document.paged(8, answer=0),
    "16 pages": lambda: document.paged(16, answer=0),
}


def measured(feed: Feed, step: Step) -> tuple[float, float, torch.Tensor]:
    """Milliseconds of one layer, MiB of the step, and its output."""
    made = layer_inputs(
        feed.document,
        feed.config,
        heads=feed.heads,
        kv_heads=feed.kv_heads,
        dtype=feed.dtype,
        device=feed.device,
        seed=0,
    )
    rows = made.rows(0, feed.prompt_len)
    out = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    memory = torch.get_device_module(feed.device)
    before = memory.memory_allocated()
    planned = DashStep(step, *serve(step, None))

    def layer() -> None:
        planned.run(*rows, feed.caches[0], made.head_cls, 0, out)

    layer()
    held = memory.memory_allocated() - before
    times = time_call(layer, feed.device, graph=True, budget=0.2)
    return times.warm * 1e3, held / 2**20, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768, help="what the table holds")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("needs a GPU")
    print(f"a table of {options.tokens} tokens; {torch.__version__}, {device}")
    print("| prompt | by its length, ms | MiB | by the table, ms | MiB |\n|---|---|---|---|---|")
    for name, made in PROMPTS.items():
        feed = Feed(document=made(), config=document.model_config(), device=device)
        wide = torch.zeros(1, options.tokens // feed.block_size, dtype=torch.int32, device=device)
        wide[:, : feed.block_table.shape[1]] = feed.block_table
        feed.block_table = wide
        step = feed.describe(0, feed.prompt_len)
        short = measured(feed, step)
        long = measured(feed, replace(step, max_seq_len=options.tokens))
        print(f"| {name} | {short[0]:.3f} | {short[1]:.0f} | {long[0]:.3f} | {long[1]:.0f} |")
        far = float((short[2].float() - long[2].float()).abs().max())
        print(f"|  largest difference of their outputs | {far:.1e} |", file=sys.stderr)


if __name__ == "__main__":
    main()
