"""Peers in one run, on the same data: what DASH costs here, and what a user would pay otherwise.

    python benchmarks/peers_h200.py --peer .peer --json peers.json
    python benchmarks/peers_h200.py --only decode --no-flex

Whole layers: our kernels, as planned and deterministic (with the same bits in any batch); and the
established way, which gathers a row's blocks, asks FlashAttention-3 for 13 segments a row and
merges them, 256 rows at a time. Store and select are ours in both. Attention alone: the same two,
FlexAttention with the same blocks and biases, and dense causal attention by FA3, cuDNN and torch's
flash kernel, which is what a user without DASH pays. Medians, of graph replays where a way lets
itself be captured; decode with the L2 emptied too. FlexAttention masks by 128 rows and 128 keys,
its smallest; where the blocks of 128 rows are everywhere it reads everything.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import vllm_shim
from dash_portable.document import MARKER, TEXT, paged, plain
from dash_portable.plan import DashStep
from dash_portable.serve import serve
from dash_portable.step import Step
from dash_portable.trial.bench import Bench, Workload
from dash_portable.trial.clock import Times, time_call
from dash_portable.trial.feed import watch

HEADS, BLOCK_SIZE = 10, 64
LOOP = 256  # rows of one pass of the established way
MASKED = 128  # rows and keys of one entry of FlexAttention's mask
FLEX = ("decode 32K x 64", "prefill 32K")


def _plain(name: str, tokens: int, rows: int = 0) -> Workload:
    return Workload(
        name=f"{name}, random",
        phase="decode" if rows else "prefill",
        document=lambda: plain(tokens, answer=1 if rows else 0),
        sequences=rows or 1,
        random=True,
    )


def _paged(name: str, pages: int, rows: int = 0) -> Workload:
    return Workload(
        name=f"{name}, {pages} pages",
        phase="decode" if rows else "prefill",
        document=lambda: (
            replace(paged(pages, answer=0), answer=(MARKER, TEXT))
            if rows
            else paged(pages, answer=0)
        ),
        sequences=rows or 1,
    )


WORKLOADS = (
    _plain("decode 32K x 64", 32768, 64),
    _paged("decode 32K x 64", 120, 64),
    _plain("prefill 32K", 32768),
    _paged("prefill 32K", 120),
    _plain("decode 32K x 1", 32768, 1),
    _plain("decode 32K x 8", 32768, 8),
    _plain("decode 32K x 256", 32768, 256),
    _plain("prefill 131K", 131072),
    _paged("prefill 131K", 478),
    _paged("prefill of 30 pages", 30),
)


def established() -> Any:
    """Our adapter of vLLM's FA3 over 13 gathered segments, so many rows at a time as vLLM takes."""
    base = importlib.import_module("dash_portable.backends.flash_attn").VllmSegmented3

    class Established(base):
        def _most_rows(self) -> int:
            return min(LOOP, super()._most_rows())

    return Established


class Peers:
    """One workload made ready, and the ways to attend to it."""

    def __init__(
        self, workload: Workload, device: torch.device, budget: float, **shape: Any
    ) -> None:
        kept = {"heads": HEADS, "kv_heads": HEADS, "block_size": BLOCK_SIZE}
        kept |= {"dtype": torch.bfloat16, **shape}
        self.bench = Bench(workload, device=device, **kept)
        self.workload, self.device, self.budget = workload, device, budget
        step = self.bench.step(graph=False)
        self.ours = None if device.type == "cpu" else "TRITON"
        _, shared, runner = serve(step, self.ours)
        self.ran = watch(
            step, shared, runner, self.bench.rows, self._cache, self.bench.inputs.head_cls, 0
        )
        self.exact = self.ran.out
        self.ids, self.bias = self.ran.ids.clone(), self.ran.bias.clone()
        self.query = self.ran.query.clone()

    @property
    def _cache(self) -> Tensor:
        return self.bench.feed.caches[0]

    def time(self, call: Callable[[], object], graph: bool = True) -> Times:
        on_gpu = self.device.type != "cpu"
        return time_call(call, self.device, graph=graph and on_gpu, budget=self.budget)

    def _step(self, deterministic: bool = False) -> Step:
        step = self.bench.step(graph=self.device.type != "cpu")
        return replace(step, deterministic=deterministic)

    def own(self, deterministic: bool) -> dict[str, Times]:
        """The whole layer and attention alone."""
        step = self._step(deterministic)
        choice, shared, runner = serve(step, self.ours)
        planned = DashStep(step, choice, shared, runner)
        out = torch.empty_like(self.query)
        head_cls = self.bench.inputs.head_cls
        layer = self.time(lambda: planned.run(*self.bench.rows, self._cache, head_cls, 0, out))
        attend = self.time(lambda: runner.run(self.query, self._cache, self.ids, self.bias, out))
        return {"layer": layer, "attend": attend}

    def established(self) -> dict[str, Times]:
        """Our store and select, then gather, FA3 and merge."""
        step = self._step()
        _, shared, _ = serve(step, self.ours)
        runner = established()(step)
        rows, cache, head_cls = self.bench.rows, self._cache, self.bench.inputs.head_cls
        scale, floor = self.bench.config.scale[0], self.bench.config.floor[0]
        out = torch.empty_like(self.query)

        def layer() -> None:
            query, ids, bias = shared.prepare(*rows, cache, head_cls, scale, floor)
            runner.run(query, cache, ids, bias, out)

        def attend() -> None:
            runner.run(self.query, cache, self.ids, self.bias, out)

        attend()
        self._near(out, "established")
        return {"layer": self.time(layer), "attend": self.time(attend)}

    def _near(self, out: Tensor, name: str) -> None:
        """The same attention, but for the roundings of two ways."""
        largest = float(self.exact.abs().max())
        gap = float((out.float() - self.exact.float()).abs().nan_to_num(torch.inf).max())
        if gap > 8 * torch.finfo(out.dtype).eps * largest:
            raise ArithmeticError(f"{name} is off by {gap:.3g} of {largest:.3g}")

    def _dense(self) -> tuple[Tensor, Tensor, Tensor, bool]:
        """q [B, H, rows, D], k and v [B, H, tokens, D], and whether rows are all tokens."""
        first, last = self.bench.span
        count = self.workload.sequences
        query = self.query.view(count, last - first, *self.query.shape[1:])
        keys, values = (
            x[:last].expand(count, *x[:last].shape) for x in (self._rotated(), self.bench.inputs.v)
        )
        dense = [x.transpose(1, 2).contiguous() for x in (query, keys, values)]
        return dense[0], dense[1], dense[2], first == 0

    def _rotated(self) -> Tensor:
        """Keys as they are in the cache, of the first sequence: [tokens, H, D]."""
        feed, last = self.bench.feed, self.bench.span[1]
        heads = [feed.keys_and_values(0, head, last)[0] for head in range(feed.kv_heads)]
        return torch.stack(heads, 1)

    def dense(self, backend: SDPBackend) -> dict[str, Times]:
        query, keys, values, causal = self._dense()

        def attend() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, keys, values, is_causal=causal)

        return {"attend": self.time(attend)}

    def dense_fa3(self) -> dict[str, Times]:
        query, keys, values, causal = self._dense()
        count, _, rows, _ = query.shape
        tokens = keys.shape[2]
        flat = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (query, keys, values)]
        starts = [
            torch.arange(0, (count + 1) * n, n, dtype=torch.int32, device=self.device)
            for n in (rows, tokens)
        ]

        def attend() -> Any:
            return vllm_shim.flash_attn_varlen_func(
                *flat, rows, starts[0], tokens, cu_seqlens_k=starts[1], causal=causal, fa_version=3
            )

        return {"attend": self.time(attend)}

    def flex(self) -> dict[str, Times]:
        """FlexAttention over the same keys with the same biases, compiled once."""
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        query, keys, values, _ = self._dense()
        count, _, rows, _ = query.shape
        tokens, config = keys.shape[2], self.bench.config
        block, local = config.block, config.local
        blocks = -(-tokens // block)
        prior = self._priors(count * rows, blocks)
        position = self.bench.step(graph=False).row_pos.view(count, rows)
        prior = prior.view(count, rows, blocks)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            end = position[b, i]
            near = (j > end - local) & (j <= end)
            far = torch.where(j <= end - local, prior[b, i, j // block], -torch.inf)
            return score + torch.where(near, 0.0, far)

        mask = self._flex_mask(BlockMask, prior, position, tokens)
        compiled = torch.compile(flex_attention) if self.device.type != "cpu" else flex_attention

        def attend() -> Tensor:
            out: Tensor = compiled(query, keys, values, score_mod=score_mod, block_mask=mask)
            return out

        with torch.no_grad():
            out = attend().transpose(1, 2).reshape(self.exact.shape)
            self._near(out, "flex")
            return {"attend": self.time(attend)}

    def _priors(self, rows: int, blocks: int) -> Tensor:
        """Bias of every row and block, -inf where it was not chosen."""
        prior = torch.full((rows, blocks + 1), -torch.inf, device=self.device)
        at = torch.where(self.ids >= 0, self.ids.long(), blocks)
        return prior.scatter_(1, at, self.bias)[:, :blocks].contiguous()

    def _flex_mask(self, kind: Any, prior: Tensor, position: Tensor, tokens: int) -> Any:
        """Blocks of MASKED keys that some of MASKED rows reads."""
        config, (count, rows, blocks) = self.bench.config, prior.shape
        wide = MASKED // config.block
        above, columns = -(-rows // MASKED), -(-tokens // MASKED)
        padded = (columns * wide - blocks, above * MASKED - rows)
        reads = torch.nn.functional.pad(prior > -torch.inf, (0, padded[0], 0, padded[1]))
        reads = reads.view(count, above, MASKED, columns, wide).any(4).any(2)
        start = torch.arange(columns, device=self.device) * MASKED
        ends = torch.cat([position, position[:, -1:].expand(-1, padded[1])], 1)
        ends = ends.view(count, above, MASKED)
        first, last = ends.amin(2)[..., None] - config.local, ends.amax(2)[..., None]
        reads |= (start <= last) & (start + MASKED - 1 > first)
        order = torch.argsort(reads.int(), dim=-1, descending=True, stable=True).int()
        return kind.from_kv_blocks(
            reads.sum(-1).int()[:, None],
            order[:, None].contiguous(),
            BLOCK_SIZE=(MASKED, MASKED),
            seq_lengths=(rows, tokens),
        )


@contextmanager
def told(found: dict[str, Any], name: str) -> Iterator[None]:
    """A way that fails is a line of the table."""
    begin = time.perf_counter()
    try:
        yield
    except Exception as error:
        found[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    sys.stderr.write(f"  {name}: {time.perf_counter() - begin:.1f} s\n")


def measured(peers: Peers, *, fa3: bool, flex: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    causal = peers.bench.span[0] == 0
    ways: dict[str, Callable[[], dict[str, Times]]] = {
        "own": lambda: peers.own(False),
        "own, deterministic": lambda: peers.own(True),
    }
    if fa3:
        ways["established (FA3, 13 segments)"] = peers.established
        ways["dense FA3"] = peers.dense_fa3
    ways["dense cuDNN" if causal else "dense torch"] = lambda: peers.dense(
        SDPBackend.CUDNN_ATTENTION if causal else SDPBackend.FLASH_ATTENTION
    )
    if causal:
        ways["dense torch"] = lambda: peers.dense(SDPBackend.FLASH_ATTENTION)
    if flex and peers.workload.name.startswith(FLEX):
        ways["FlexAttention, same blocks"] = peers.flex
    for name, way in ways.items():
        with told(found, name):
            times = way()
            found[name] = {
                part: {"warm": one.warm, "cold": one.cold, "how": one.how}
                for part, one in times.items()
            }
    return found


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """us of the layer and of attention alone; warm, and with emptied caches in brackets."""
    lines = ["| workload | way | layer | attention | layer / own |", "|---|---|---|---|---|"]

    def cell(one: dict[str, Any] | None) -> str:
        if one is None:
            return "-"
        cold = "" if one["cold"] is None else f" ({one['cold'] * 1e6:.4g})"
        return f"{one['warm'] * 1e6:.4g}{cold}"

    def figure(way: dict[str, Any]) -> float:
        one = way.get("layer") or way["attend"]
        return float(one["warm"] if one["cold"] is None else one["cold"])

    for workload, ways in results.items():
        own = ways.get("own", {})
        for name, way in ways.items():
            if "failed" in way:
                lines.append(f"| {workload} | {name} | {way['failed']} | | |")
                continue
            ratio = f"{figure(way) / figure(own):.3g}" if "layer" in own else ""
            cells = (cell(way.get("layer")), cell(way["attend"]), ratio)
            lines.append(f"| {workload} | {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer", type=Path, default=Path(".peer"), help="folder of vLLM's modules")
    parser.add_argument("--only", action="append", help="workloads with this in their name")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of each figure")
    parser.add_argument("--seconds", type=float, default=600, help="begin no workload after these")
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("no accelerator: nothing to measure")
    begin = time.perf_counter()
    fa3 = options.peer.is_dir() and 3 in vllm_shim.install(options.peer)
    name = torch.get_device_module(device).get_device_name()
    print(f"{name}, torch {torch.__version__}, {datetime.date.today()}, FA3 {fa3}")
    print("command:", " ".join(sys.argv))
    results: dict[str, dict[str, Any]] = {}
    for workload in WORKLOADS:
        if options.only and not any(word in workload.name for word in options.only):
            continue
        if time.perf_counter() - begin > options.seconds:
            print(f"not begun: {workload.name}")
            continue
        sys.stderr.write(f"{workload.name} at {time.perf_counter() - begin:.0f} s\n")
        with told(results, workload.name):
            peers = Peers(workload, device, options.budget)
            results[workload.name] = measured(peers, fa3=fa3, flex=not options.no_flex)
            del peers
        torch.accelerator.empty_cache()
        if options.json:
            data = {"device": name, "torch": torch.__version__, "results": results}
            options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    rows = {k: v for k, v in results.items() if "failed" not in v}
    print("\n".join(table(rows)))
    for workload, ways in results.items():
        if "failed" in ways:
            print(workload, ways["failed"])


if __name__ == "__main__":
    main()
