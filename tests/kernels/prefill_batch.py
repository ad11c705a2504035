"""A batch of sequences as the prefill kernels see it, and what they must answer, by plain float64.

Cache blocks lie in random order, unused ones are NaN, table entries behind a sequence's last block
point far outside, scratch and outputs are NaN (or the largest integer) before each call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dash_portable import reference
from dash_portable.config import DashConfig
from dash_portable.kernels import group_rows as grouping
from dash_portable.kernels import prefill
from dash_portable.kernels.launch_prefill import PrefillRow
from dash_portable.streams import Beside, InOrder

OUTSIDE = 2**30
POISON = 0x7FFFFFFF


def config(scale: float = 20.0, **more: object) -> DashConfig:
    keys: dict[str, object] = {
        "block": 32,
        "local_blocks": 4,
        "topk": 12,
        "window": 16,
        "scale": (scale,),
        "floor": (1e-6,),
        "sigma": 2.0,
        "theta": 10000.0,
        "page_mod": 2,
        "index_dim": 64,
    }
    return DashConfig(**(keys | more))  # type: ignore[arg-type]


class Part(NamedTuple):
    """One sequence: its pages as (text tokens, image tokens) from page 1 on, tokens in all, new
    rows.
    """

    pages: tuple[tuple[int, int], ...]
    length: int
    rows: int
    front: int = 0  # tokens of page 0 before the first page
    padding: int = 0  # padding rows behind its rows


class Batch:
    """Random data for `parts`; `row_page` overrides the rows' query page, as decoded rows do."""

    def __init__(
        self,
        parts: list[Part],
        *,
        heads: int = 2,
        group: int = 1,
        width: int = 64,
        cache_block: int = 32,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        page_of: int | None = None,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.parts, self.heads, self.group, self.width, self.dtype = (
            parts,
            heads,
            group,
            width,
            dtype,
        )
        self.config = config(index_dim=width)
        block = self.config.block
        seqs = len(parts)
        self.max_blocks = max(-(-p.length // block) for p in parts)
        self.page_tokens: list[Tensor] = []
        per = [-(-p.length // cache_block) for p in parts]
        spare = 3
        cache = torch.full(
            (sum(per) + spare, heads + 1, cache_block + 3, 2 * width + 16), torch.nan
        )
        self.holder = cache.to(dtype)
        self.cache = self.holder[:, :, :cache_block, : 2 * width]  # strides of a wider buffer
        places = torch.randperm(sum(per) + spare, generator=draw).int()
        self.table = torch.full((seqs, max(per) + 2), OUTSIDE, dtype=torch.int32)
        self.summaries = torch.full((seqs, self.max_blocks, width), torch.nan).to(dtype)
        self.starts = torch.zeros(seqs, max(len(p.pages) for p in parts) + 1, 2, dtype=torch.int32)
        self.ranges = torch.zeros(seqs, self.max_blocks, 2, dtype=torch.int32)
        rows: dict[str, list[Tensor]] = {k: [] for k in ("seq", "pos", "query_page", "num_pages")}
        start, used = [0], 0
        self.keys, self.values, self.image = [], [], []
        for r, part in enumerate(parts):
            self.table[r, : per[r]] = places[used : used + per[r]]
            used += per[r]
            page = torch.zeros(part.length, dtype=torch.int64)
            role = torch.zeros(part.length, dtype=torch.int64)
            at = part.front
            self.starts[r, 0] = torch.tensor([0, part.front])
            for g, (text, image) in enumerate(part.pages, 1):
                page[at : at + text + image] = g
                role[at + text : at + text + image] = 1
                self.starts[r, g] = torch.tensor([at, text + image])
                at += text + image
            assert at <= part.length
            image = torch.where(role == 1, page, 0)
            self.image.append(image.cpu())  # looked at token by token
            for b in range(part.length // block):
                inside = image[b * block : (b + 1) * block]
                inside = inside[inside > 0]
                if len(inside):
                    self.ranges[r, b] = torch.tensor([inside.min(), inside.max()])
            self.summaries[r, : part.length // block] = torch.randn(
                part.length // block, width, generator=draw
            ).to(dtype)
            token = torch.arange(part.length)
            kv = torch.randn(part.length, heads + 1, 2 * width, generator=draw).to(dtype)
            kv[:, heads, width] = role.to(dtype)
            self.cache[self.table[r, token // cache_block].long(), :, token % cache_block] = kv
            self.keys.append(kv[:, :heads, :width])
            self.values.append(kv[:, :heads, width:])
            pos = torch.arange(part.length - part.rows, part.length)
            rows["seq"].append(torch.full((part.rows,), r))
            rows["pos"].append(pos)
            after = page[pos] == 0
            own = page[pos] - 1 if page_of is None else torch.full_like(pos, page_of)
            rows["query_page"].append(torch.where(after & (page_of is None), torch.tensor(-1), own))
            rows["num_pages"].append(torch.full((part.rows,), len(part.pages)))
            for name, value in (
                ("seq", POISON),
                ("pos", -1),
                ("query_page", POISON),
                ("num_pages", POISON),
            ):
                rows[name].append(torch.full((part.padding,), value))
            start.append(start[-1] + part.rows + part.padding)
        self.row = {k: torch.cat(v).int() for k, v in rows.items()}
        self.query_start = torch.tensor(start, dtype=torch.int32)
        self.num_rows = start[-1]
        self.index_query = torch.randn(self.num_rows, width, generator=draw).to(dtype)
        self.query = torch.randn(self.num_rows, heads * group, width, generator=draw).to(dtype)
        padding = self.row["pos"] < 0
        self.index_query[padding] = torch.nan
        self.query[padding] = torch.nan

    # ---------------------------------------------------------------- the kernels
    def grouped(self, launch: PrefillRow, *, given: bool = False) -> dict[str, Tensor]:
        shapes = grouping.group_shapes(self.num_rows, len(self.parts), launch.tile)
        groups = {k: torch.full(s, POISON, dtype=torch.int32) for k, s in shapes.items()}
        grouping.group_rows(
            self.row["seq"],
            self.row["pos"],
            self.row["query_page"],
            self.row["num_pages"],
            self.query_start,
            self.starts,
            self.ranges,
            self.device_cache(),
            self.table,
            groups,
            block=self.config.block,
            local_blocks=self.config.local_blocks,
            tile=launch.tile,
            starts_given=given,
        )
        return groups

    def device_cache(self) -> Tensor:
        return self.holder[:, :, : self.cache.shape[2], : self.cache.shape[3]]

    def select(
        self, launch: PrefillRow, groups: dict[str, Tensor], scale: float | None = None
    ) -> tuple[Tensor, Tensor, int]:
        """ids, bias and the number of rows that the launches after the first looked at."""
        shapes = prefill.select_shapes(self.num_rows, len(self.parts))
        scratch = {k: torch.full(s, POISON, dtype=torch.int32) for k, s in shapes.items()}
        ids = torch.full((self.num_rows, self.config.topk), POISON, dtype=torch.int32)
        bias = torch.full((self.num_rows, self.config.topk), torch.nan)
        rule = self.config
        select = prefill.SelectPrefill(
            self.summaries,
            self.ranges,
            self.row["pos"],
            groups,
            scratch,
            ids,
            bias,
            sigma=rule.sigma,
            block=rule.block,
            window=rule.window,
            launch=launch,
        )
        select(self.index_query, rule.scale[0] if scale is None else scale, rule.floor[0])
        return ids, bias, 0 if select.redo is None else int(scratch["redo_count"].sum())

    def attend(
        self,
        launch: PrefillRow,
        groups: dict[str, Tensor],
        ids: Tensor,
        bias: Tensor,
        budget: int = 1 << 30,
        beside: InOrder | Beside | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        shapes = prefill.attend_shapes(
            self.num_rows,
            len(self.parts),
            groups["tiles"].shape[0],
            self.max_blocks,
            self.heads * self.group,
            self.width,
            self.query.element_size(),
            self.config.topk,
            budget=budget,
            launch=launch,
        )
        fill = {
            "int32": (torch.int32, POISON),
            "float32": (torch.float32, torch.nan),
            "query": (self.dtype, torch.nan),
        }
        scratch = {
            k: torch.full(shape, fill[t][1], dtype=fill[t][0]) for k, (t, shape) in shapes.items()
        }
        out = torch.full_like(self.query, torch.nan)
        attend = prefill.AttendPrefill(
            self.table,
            self.row["pos"],
            groups,
            scratch,
            heads=self.heads * self.group,
            width=self.width,
            kv_heads=self.heads,
            cache_block=self.cache.shape[2],
            block=self.config.block,
            local=self.config.local,
            max_blocks=self.max_blocks,
            launch=launch,
            beside=InOrder() if beside is None else beside,
        )
        attend(self.query, self.cache, ids, bias, out)
        return out, scratch

    # ---------------------------------------------------------------- the answers
    def candidates(self, i: int, given: bool = False) -> tuple[list[int], bool]:
        """Blocks that row i may choose, by looking at every token; whether they are those of its
        page.
        """
        rule, r, pos = self.config, int(self.row["seq"][i]), int(self.row["pos"][i])
        remote = list(range(pos // rule.block - rule.local_blocks + 1))
        page = int(self.row["query_page"][i]) + 1
        own = [
            b
            for b in remote
            if (self.image[r][b * rule.block : (b + 1) * rule.block] == page).any()
        ]
        known = 0 < page <= int(self.row["num_pages"][i]) and (page <= pos or given)
        return (own, True) if own and known else (remote, False)

    def scores(self, i: int, scale: float | None = None) -> Tensor:
        """float64 [blocks] of row i's sequence."""
        r = int(self.row["seq"][i])
        return reference.block_scores(
            self.index_query[i : i + 1].double(),
            self.summaries[r].double(),
            self.config.scale[0] if scale is None else scale,
        )[0]

    def live(self) -> list[int]:
        return torch.nonzero(self.row["pos"] >= 0).flatten().tolist()

    def attended(
        self,
        ids: Tensor,
        bias: Tensor,
        dtype: torch.dtype = torch.float64,
        *,
        magnitudes: bool = False,
    ) -> Tensor:
        """The oracle's output for these ids and biases, 0 for padding; of the values' magnitudes,
        if asked.
        """
        out = torch.zeros(self.query.shape, dtype=dtype)
        for r in range(len(self.parts)):
            at = (self.row["seq"] == r) & (self.row["pos"] >= 0)
            values = self.values[r].to(dtype)
            out[at] = reference.attend(
                self.query[at].to(dtype),
                self.keys[r].to(dtype),
                values.abs() if magnitudes else values,
                ids[at],
                bias[at],
                self.row["pos"][at].long(),
                self.config,
            )
        return out
