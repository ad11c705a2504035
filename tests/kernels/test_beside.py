"""What runs beside the tiles: in what order, and that all of it is waited for."""

from __future__ import annotations

import pytest
import torch

from dash_portable.kernels import prefill
from dash_portable.kernels.launch_prefill import PrefillRow
from dash_portable.streams import Beside, InOrder
from tests.device import COMPILED, DEVICE
from tests.kernels.prefill_batch import Batch, Part
from tests.kernels.test_attend_prefill import choose

ROW = PrefillRow(tile=16, select_groups=16, union_limit=14, union_all=0, pair_tile=16)
PARTS = [Part(((1, 90), (3, 120)), 330, 40, padding=3), Part((), 610, 21)]


class Noted(InOrder):
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def __enter__(self) -> None:
        self.seen.append("fork")

    def __exit__(self, *_: object) -> None:
        self.seen.append("back")

    def join(self) -> None:
        self.seen.append("join")


def test_lists_fork_behind_the_unions_and_are_joined_before_the_merge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    made = prefill.launch_of

    def noted(kernel, *args, **options):
        run = made(kernel, *args, **options)

        def call(*given: object) -> None:
            seen.append(kernel.__name__.removesuffix("_kernel"))
            run(*given)

        return call

    monkeypatch.setattr(prefill, "launch_of", noted)
    batch = Batch(PARTS, heads=1)
    groups = batch.grouped(ROW)
    ids, bias = choose(batch, alike=0.5)
    one = ROW.tile * 12 * (batch.width * 4 + 4)
    out, scratch = batch.attend(ROW, groups, ids, bias, 3 * one, Noted(seen))
    chunks = scratch["offset"].shape[0]
    assert chunks > 1
    lists = ["fork", "invert_offset", "invert_place", "attend_pair", "back"]
    rest = ["attend_tile", "join", "attend_merge", *["attend_pair", "attend_merge"] * (chunks - 1)]
    assert seen == ["union", *lists, *rest]
    assert not out.isnan().any()


@pytest.mark.skipif(not COMPILED, reason="one stream: this is a CPU")
def test_a_second_stream_changes_no_bit_and_can_be_captured() -> None:
    batch = Batch(PARTS, dtype=torch.bfloat16)
    groups = batch.grouped(ROW)
    ids, bias = choose(batch, alike=0.5)
    expected, _ = batch.attend(ROW, groups, ids, bias)
    beside = Beside(DEVICE)
    for _ in range(20):
        found, _ = batch.attend(ROW, groups, ids, bias, beside=beside)
        assert torch.equal(found, expected)
    x = torch.zeros(1 << 24, device=DEVICE)
    y = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with beside:
            y.copy_(x)
        x.mul_(1)
        beside.join()
        y.add_(x)
    for count in range(1, 50):
        graph.replay()
        assert float(y.min()) == float(y.max()) == 2 * count


@pytest.mark.skipif(not COMPILED, reason="one stream: this is a CPU")
def test_an_error_leaves_the_first_stream_current() -> None:
    beside, first = Beside(DEVICE), torch.accelerator.current_stream()
    seen = []

    def half() -> None:
        with beside:
            seen.append(torch.accelerator.current_stream())
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        half()
    assert seen != [first]
    assert torch.accelerator.current_stream() == first
