"""Attention by torch in chunks of rows: what lies across the edge of one is as elsewhere."""

from __future__ import annotations

import pytest
import torch

from dash_portable.backends import sdpa
from dash_portable.backends.sdpa import Runner
from dash_portable.document import model_config, paged
from dash_portable.eager import EagerLayer
from dash_portable.trial.feed import Feed, watch
from dash_portable.trial.inputs import layer_inputs
from dash_portable.trial.verify import Check, Oracle


def checked(pages: int, rows: torch.Tensor) -> list[Check]:
    """A whole prompt in one step; `rows` of it against the oracle."""
    config = model_config()
    feed = Feed(document=paged(pages, answer=0), config=config, heads=2, kv_heads=1)
    given = {"heads": 2, "kv_heads": 1, "dtype": feed.dtype, "device": feed.device, "seed": 0}
    inputs = layer_inputs(feed.document, config, **given)  # type: ignore[arg-type]
    step, total = feed.describe(0, feed.prompt_len), feed.prompt_len
    made = watch(
        step,
        EagerLayer(step),
        Runner(step),
        inputs.rows(0, total),
        feed.caches[0],
        inputs.head_cls,
        0,
    )
    return Oracle(feed).check(inputs, 0, step, made, rows[rows < total])


@pytest.mark.parametrize("rows", [1, 31, 64, 129, 300, 588, 10_000])
def test_a_step_in_chunks_is_right(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_ROWS", rows)
    assert [check for check in checked(2, torch.arange(588)) if not check.ok] == []


def test_rows_about_the_real_edge_are_right() -> None:
    edge = sdpa._ROWS
    assert [
        check for check in checked(60, torch.arange(edge - 40, edge + 40)) if not check.ok
    ] == []
