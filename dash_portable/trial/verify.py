"""Sampled rows of a run against the oracle in float64, with a tolerance computed from the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_portable import reference
from dash_portable.config import DashConfig
from dash_portable.document import IMAGE, MARKER
from dash_portable.pages import next_coordinates, next_page, prompt_coordinates
from dash_portable.step import Step
from dash_portable.trial.feed import Feed, Ran
from dash_portable.trial.inputs import LayerInputs

_ROWS = 32  # rows whose keys are gathered at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison: the largest error over `rows` rows, and what it may be."""

    name: str
    rows: int
    error: float
    allowed: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # NaN is not

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "rows": self.rows,
            "error": self.error,
            "allowed": self.allowed,
            "ok": self.ok,
            "note": self.note,
        }


def worst(checks: list[Check]) -> list[Check]:
    """Of the checks of each name the one that is nearest to failing, with all their rows."""
    found: dict[str, Check] = {}
    for check in checks:
        known = found.get(check.name)
        if known is None:
            found[check.name] = check
            continue
        worse = max(known, check, key=_badness)
        found[check.name] = Check(
            name=check.name,
            rows=known.rows + check.rows,
            error=worse.error,
            allowed=worse.allowed,
            note=worse.note,
        )
    return list(found.values())


def _badness(check: Check) -> tuple[bool, float]:
    return not check.ok, check.error / check.allowed if check.allowed else check.error


def coordinates(feed: Feed) -> Tensor:
    """tok, page, num_pages, query_page of every token, int64 `[T, 4]`, on the host."""
    prompt = prompt_coordinates(torch.tensor(feed.document.prompt))
    pages = torch.full_like(prompt.tok, prompt.num_pages)
    rows = [torch.stack([prompt.tok, prompt.page, pages, prompt.query_page], 1)]
    state = rows[0][-1]
    for role in feed.document.answer:
        count = prompt.counts[next_page(state)]
        state = next_coordinates(state, torch.tensor(role), count)
        rows.append(state[None])
    return torch.cat(rows)


class Oracle:
    """What every row of a document's run should be."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.coordinates = coordinates(feed)
        roles = torch.tensor(feed.document.roles)
        image = roles == IMAGE
        image[feed.prompt_len :] = False  # what is decoded has no image page
        self.image_page = torch.where(image, (roles == MARKER).long().cumsum(0) - 1, -1)

    def check(
        self, inputs: LayerInputs, layer: int, step: Step, ran: Ran, rows: Tensor
    ) -> list[Check]:
        """Hold rows `[n]` (int64, on the host) of a step of one sequence to the oracle."""
        token = step.row_pos[rows.to(step.device)].long()
        return [
            self.rotation(inputs, ran, rows, token),
            self.selection(layer, ran, rows, token),
            self._attention(layer, ran, rows, token),
        ]

    def rotation(self, inputs: LayerInputs, ran: Ran, rows: Tensor, token: Tensor) -> Check:
        """Rotated queries: off by a rounding of the result, and one of an angle of up to a turn."""
        at = self.coordinates[token.cpu()]
        error, largest = 0.0, 0.0
        for raw, rotated in ((inputs.q, ran.query), (inputs.iq, ran.index_query)):
            exact = reference.rotate(
                raw[token].cpu(), at[:, 0], at[:, 1], self.feed.config, torch.float64
            )
            error = max(error, _off(rotated[rows.to(rotated.device)].cpu(), exact))
            largest = max(largest, float(exact.abs().max()))
        turn = 2 * math.pi * torch.finfo(torch.float32).eps
        allowed = (torch.finfo(self.feed.dtype).eps + turn) * largest
        return Check(name="rotation", rows=len(rows), error=error, allowed=allowed)

    def selection(self, layer: int, ran: Ran, rows: Tensor, token: Tensor) -> Check:
        """Chosen blocks from the stored summaries: equal wherever the choice is not a near tie.

        A choice may differ where the scores of the last block in and the first one out are nearer
        than float32 sums can tell. `error` counts the rows that differ otherwise.
        """
        feed, config = self.feed, self.feed.config
        wrong, close = 0, 0
        position = token.cpu()
        blocks = int(position.max()) // config.block - config.local_blocks + 1
        if blocks <= 0:
            chosen = ran.ids[rows.to(ran.ids.device)]
            wrong = int((chosen >= 0).any(1).sum())
            return Check(name="selection", rows=len(rows), error=wrong, allowed=0)
        summaries = feed.summaries(layer, blocks).cpu().double()
        query = ran.index_query[rows.to(feed.device)].cpu().double()
        candidate = self._candidates(position, blocks)
        score = reference.block_scores(query, summaries, config.scale[layer])
        score = score.masked_fill(~candidate, -torch.inf)
        ordered = torch.nn.functional.pad(
            score.sort(1, descending=True).values, (0, 1), value=-torch.inf
        )
        kept = ordered[:, : config.topk + 1]
        slack = torch.finfo(torch.float32).eps * abs(config.scale[layer])
        slack *= float((query.abs() @ summaries.abs().T).max()) / config.index_dim**0.5
        exact = score.topk(min(config.topk, blocks), dim=1)
        for i, row in enumerate(rows.tolist()):
            want = set(exact.indices[i][exact.values[i] > -torch.inf].tolist())
            got = ran.ids[row][ran.ids[row] >= 0].tolist()
            if set(got) == want and len(got) == len(want):
                continue
            full = kept.shape[1] > config.topk and bool(kept[i, -1] > -torch.inf)
            near = full and float(kept[i, -2] - kept[i, -1]) <= slack and len(got) == len(want)
            close, wrong = close + near, wrong + (not near)
        note = f"{close} near ties" if close else ""
        return Check(name="selection", rows=len(rows), error=wrong, allowed=0, note=note)

    def _own(self, position: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Remote blocks of each row, and those of them that show its page, both `[n, blocks]`."""
        size = self.feed.config.block
        remote = torch.arange(blocks) <= (position // size - self.feed.config.local_blocks)[:, None]
        pages = self.image_page[: blocks * size].view(blocks, size)
        low, high = pages.masked_fill(pages < 0, 1 << 30).amin(1), pages.amax(1)
        wanted = self.coordinates[position, 3][:, None]
        own = (low <= wanted) & (wanted <= high) & (wanted >= 0) & remote
        for row, block in (own & (low < wanted) & (wanted < high)).nonzero().tolist():
            own[row, block] = bool((pages[block] == wanted[row]).any())
        return remote, own

    def _candidates(self, position: Tensor, blocks: int) -> Tensor:
        """Which blocks each row may choose from, `[n, blocks]`, from roles alone."""
        remote, own = self._own(position, blocks)
        return torch.where(own.any(1, keepdim=True), own, remote)

    def candidates(self, position: Tensor) -> int:
        """How many blocks rows at `position [n]` may choose from, in all."""
        blocks = len(self.image_page) // self.feed.config.block
        return int(self._candidates(position, blocks).sum())

    def bound(self, position: Tensor) -> Tensor:
        """Whether rows at `position [n]` are bound to blocks of their own page, `[n]` bool."""
        blocks = len(self.image_page) // self.feed.config.block
        parts = [self._own(part, blocks)[1].any(1) for part in torch.split(position, 4096)]
        return torch.cat(parts)

    def _attention(self, layer: int, ran: Ran, rows: Tensor, token: Tensor) -> Check:
        """Outputs for the blocks and biases that were chosen, from the stored cache.

        Allowed: twice the error of plain torch that adds in float32 and rounds its answer to the
        same type, and twice one rounding of the largest value.
        """
        feed = self.feed
        error, eager_error, largest = 0.0, 0.0, 0.0
        group = feed.heads // feed.kv_heads
        for head in range(feed.kv_heads):
            mine = slice(head * group, (head + 1) * group)
            keys, values = feed.keys_and_values(layer, head, int(token.max()) + 1)
            for begin in range(0, len(rows), _ROWS):
                part = torch.arange(begin, min(begin + _ROWS, len(rows)))
                at = rows[part].to(feed.device)
                query, place = ran.query[at][:, mine], token[part.to(feed.device)]
                dense = (query, keys[:, None], values[:, None])
                exact, eager = (
                    _attend(dense, ran.ids[at], ran.bias[at], place, feed.config, dtype)
                    for dtype in (torch.float64, torch.float32)
                )
                error = max(error, _off(ran.out[at][:, mine].cpu(), exact))
                eager_error = max(eager_error, _off(eager.to(feed.dtype), exact))
                largest = max(largest, float(exact.abs().max()))
        allowed = 2 * (eager_error + torch.finfo(feed.dtype).eps * largest)
        return Check(name="attention", rows=len(rows), error=error, allowed=allowed)


def _off(found: Tensor, exact: Tensor) -> float:
    """Largest distance; infinite where something is no number."""
    return float((found.double() - exact).abs().nan_to_num(torch.inf).max())


def _attend(
    dense: tuple[Tensor, Tensor, Tensor],
    ids: Tensor,
    bias: Tensor,
    position: Tensor,
    config: DashConfig,
    dtype: torch.dtype,
) -> Tensor:
    """The oracle on the host, in `dtype`."""
    query, keys, values = (x.cpu().to(dtype) for x in dense)
    return reference.attend(
        query, keys, values, ids.cpu(), bias.cpu().to(dtype), position.cpu(), config
    )
