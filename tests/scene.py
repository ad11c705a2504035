"""One small scene for every public call: right arguments, and a cache whose every bit is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dash_portable
from dash_portable import DashConfig, DashStep, prompt_positions

MODEL: dict[str, Any] = {
    "sparse_block_size": 8,
    "sparse_local_block": 2,
    "sparse_index_dim": 64,
    "dash_topk_blocks": 4,
    "dash_scale_per_layer": [30.0, 40.0],
    "dash_floor_per_layer": [1e-4, 1e-3],
    "sparse_main_rope_mode": "page2d",
    "training_stage": "dash",
    "dash_stage0": "head_cls",
    "window": 6,
}
CONFIG = DashConfig.from_model(MODEL)
HEADS, KV_HEADS, SIZE, WIDTH = 4, 2, 16, 64
BLOCKS = 16
OUTSIDE = 2**30  # no cache has such a block
PROMPT = [2] + [1] * 30 + [2] + [1] * 25 + [0] * 8  # 65 tokens
TABLES = ((3, 0, 7, 12, 5, 9), (8, 1, 14, 2, 11, 6))  # of two sequences; 4, 10, 13, 15 are free


def slots_of(seq: int, first: int, end: int) -> Tensor:
    at = torch.arange(first, end)
    return torch.tensor(TABLES[seq])[at // SIZE] * SIZE + at % SIZE


def rows(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of `count` tokens."""
    random = torch.Generator().manual_seed(seed)
    heads = {"q": (HEADS, WIDTH), "k": (KV_HEADS, WIDTH), "v": (KV_HEADS, WIDTH)}
    shapes = {**heads, "iq": (WIDTH,), "ik": (WIDTH,)}
    return {
        name: torch.randn(count, *shape, generator=random).to(dtype)
        for name, shape in shapes.items()
    }


def bits(x: Tensor) -> Tensor:
    """A tensor's numbers as integers: NaN equals itself there."""
    kinds = {2: torch.int16, 4: torch.int32}
    return x.view(kinds[x.dtype.itemsize]) if x.is_floating_point() else x


def same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(bits(first.contiguous()), bits(second.contiguous()))


class Scene:
    """Two sequences of which both prompts are stored, in a cache that is NaN elsewhere."""

    def __init__(self, dtype: torch.dtype = torch.float32, cache: Tensor | None = None) -> None:
        shape = (BLOCKS, KV_HEADS + 1, SIZE, 2 * WIDTH)
        self.dtype = dtype
        self.cache = torch.full(shape, torch.nan, dtype=dtype) if cache is None else cache
        self.head_cls = torch.randn(WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype)
        for seq in range(2):
            arguments = self.store(seq)
            dash_portable.cache_dash_prefill(**arguments)

    def store(self, seq: int = 0) -> dict[str, Any]:
        """Arguments of `cache_dash_prefill`."""
        given = rows(len(PROMPT), self.dtype, seq)
        return {
            **{name: given[name] for name in ("k", "v", "ik")},
            "roles": torch.tensor(PROMPT),
            "slots": slots_of(seq, 0, len(PROMPT)),
            "cache": self.cache,
            "sp": MODEL,
            "head_cls": self.head_cls,
        }

    def prefill(self) -> dict[str, Any]:
        """Arguments of `paged_dash_prefill`: the last 33 tokens of sequence 0's prompt."""
        first, end = 32, len(PROMPT)
        return {
            **{name: x[first:] for name, x in rows(end, self.dtype, 0).items()},
            "roles": torch.tensor(PROMPT[first:]),
            "positions": prompt_positions(torch.tensor(PROMPT))[:, first:],
            "cache": self.cache,
            "block_table": torch.tensor(TABLES[:1]),
            "length": end,
            "slots": slots_of(0, first, end),
            "head_cls": self.head_cls,
            "sp": MODEL,
            "layer_idx": 0,
            "backend": "SDPA",
        }

    def decode(self) -> dict[str, Any]:
        """Arguments of `paged_dash_decode`: a token of each sequence, and padding between them."""
        at = len(PROMPT)
        return {
            **rows(3, self.dtype, 5),
            "roles": torch.tensor([0, 0, 2]),
            "cache": self.cache,
            "block_table": torch.tensor([TABLES[0], [OUTSIDE] * 6, TABLES[1]]),
            "seq_lens": torch.tensor([at + 1, -12345, at + 1]),
            "slots": torch.cat(
                [slots_of(0, at, at + 1), torch.tensor([-1]), slots_of(1, at, at + 1)]
            ),
            "head_cls": self.head_cls,
            "sp": MODEL,
            "layer_idx": 1,
            "max_model_len": 96,
            "prefix_lens": torch.tensor([16, -5, 40]),
            "backend": "SDPA",
            "cached_summaries": True,
            "positions": torch.tensor([[0, -9, 0]] * 3 + [[0, -9, 0]]),
        }

    def step(self) -> dict[str, Any]:
        """Arguments of `DashStep.plan` and `run`: a whole prompt and padding, then a decode."""
        at = len(PROMPT)
        positions = torch.zeros(4, at + 3, dtype=torch.int64)
        positions[:, :at] = prompt_positions(torch.tensor(PROMPT))
        return {
            **rows(at + 3, self.dtype, 6),
            "query_lens": [at + 2, 1],
            "seq_lens": [at, at + 1],
            "block_table": torch.tensor(TABLES),
            "slots": torch.cat(
                [slots_of(0, 0, at), torch.tensor([-1, -7]), slots_of(1, at, at + 1)]
            ),
            "roles": torch.tensor([*PROMPT, 0, 0, 0]),
            "positions": positions,
            "config": CONFIG,
            "cache": self.cache,
            "backend": "SDPA",
            "max_model_len": 96,
            "num_heads": HEADS,
            "max_query_len": None,
            "page_table": None,
            "cached_summaries": True,
            "prefix_lens": torch.tensor([0, 32]),
            "deterministic": None,
            "graph": False,
            "head_cls": self.head_cls,
            "layer": 0,
            "out": None,
        }

    def rebuild(self) -> dict[str, Any]:
        return {
            "cache": self.cache,
            "block_table": torch.tensor(TABLES),
            "seq_lens": torch.tensor([len(PROMPT)] * 2),
            "head_cls": self.head_cls,
            "sp": MODEL,
        }

    def segments(self) -> dict[str, Any]:
        """Arguments of `flash_dash_attention`: 3 rows of 4 blocks of 8 and a window of 16."""
        return {
            "q": rows(3, self.dtype)["q"],
            "k": rows(3 * 48, self.dtype, 1)["k"],
            "v": rows(3 * 48, self.dtype, 2)["v"],
            "used": torch.tensor([8, 8, 3, 0, 16] * 3),
            "bias": torch.zeros(3, 4),
            "backend": "SDPA",
            "bs": 8,
            "local": 16,
        }


_OF_RUN = ("q", "k", "v", "iq", "ik", "cache", "head_cls", "layer", "out")


def run_step(**arguments: Any) -> Tensor:
    """Plan and run; `run_cache`, if given, is another cache than the one planned for."""
    other = arguments.pop("run_cache", arguments.get("cache"))
    of_run = {name: arguments[name] for name in _OF_RUN} | {"cache": other}
    of_plan = {name: x for name, x in arguments.items() if name == "cache" or name not in of_run}
    return DashStep.plan(**of_plan).run(**of_run)


CALLS: dict[str, Callable[..., Any]] = {
    "store": dash_portable.cache_dash_prefill,
    "prefill": dash_portable.paged_dash_prefill,
    "decode": dash_portable.paged_dash_decode,
    "step": run_step,
    "rebuild": dash_portable.rebuild_summaries,
    "segments": dash_portable.flash_dash_attention,
}
