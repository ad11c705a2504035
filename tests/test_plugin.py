"""A third party's package adds a backend through the entry point: listed, tested, chosen, right."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dash_portable import dispatch, explanation, self_test
from dash_portable.backends import records
from dash_portable.errors import UnsupportedError
from tests.machines import MACHINES, asked
from tests.paged import Paged
from tests.prompts import PROMPTS, document

PACKAGE = Path(__file__).parent / "plugin_backend"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As pip would leave it: the files on the path, their metadata beside them."""
    info = tmp_path / "dash_portable_loops-1.0.dist-info"
    info.mkdir()
    project = (PACKAGE / "pyproject.toml").read_text(encoding="utf-8")
    name, _, target = (
        project.partition('[project.entry-points."dash_portable.backends"]\n')[2]
        .partition("\n")[0]
        .partition(" = ")
    )
    point = f"[dash_portable.backends]\n{name} = {target.strip(chr(34))}\n"
    (info / "entry_points.txt").write_text(point, encoding="utf-8")
    metadata = "Metadata-Version: 2.1\nName: dash-portable-loops\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dispatch.forget()
    yield
    dispatch.forget()
    for module in ("dash_portable_loops", "dash_portable_loops_adapter", "loops_attention"):
        sys.modules.pop(module, None)


def test_the_guide_shows_the_package_as_it_is() -> None:
    """What follows runs these files, so the guide's code works as it stands there."""
    guide = (PACKAGE.parents[1] / "docs" / "adding-a-backend.md").read_text(encoding="utf-8")
    shown = re.findall(r"```(?:python|toml)\n(.*?)```", guide, re.S)
    files = {path.name: path.read_text(encoding="utf-8") for path in PACKAGE.glob("*.*")}
    assert sorted(shown) == sorted(files.values())
    assert all(f"`{name}`" in guide for name in files)


@pytest.mark.usefixtures("installed")
def test_it_is_explained() -> None:
    """Also on a platform that is only named: its package counts as installed there."""
    for named in (None, "cpu"):
        choices = explanation.explain(platform=named, backend="loops").choices
        assert [choice.backend and choice.backend.name for choice in choices] == ["loops", "loops"]
    wide = asked(dtype="float32", cache_dtype="float32")
    here = dispatch.platform_for("cpu", dispatch.table())
    refused = str(explanation.explain(wide, here, backend="loops"))
    assert "asked float32, offers bfloat16 float16" in refused


@pytest.mark.usefixtures("installed")
def test_it_is_self_tested_once_and_chosen() -> None:
    choice = dispatch.choice_for(asked(head_dim=64), "cpu")
    assert choice.backend is not None
    assert choice.backend.name == "loops"
    assert [text for name, text in records.read().verdicts.items() if "loops" in name] == [""]
    assert self_test.run(choice.backend, choice.platform) == ""


@pytest.mark.usefixtures("installed")
def test_it_is_left_when_it_answers_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    import dash_portable_loops_adapter as adapter

    real = adapter.Loops.attend
    monkeypatch.setattr(
        adapter.Loops, "attend", lambda self, *tensors: (real(self, *tensors)[0] * 2, None)
    )
    choice = dispatch.choice_for(asked(head_dim=64), "cpu")
    assert choice.backend is not None
    assert choice.backend.name != "loops"
    assert "loops" in str(choice)
    assert "against the oracle" in str(choice)


@pytest.mark.usefixtures("installed")
def test_it_serves_the_calls() -> None:
    paged = Paged([document(PROMPTS["pages"][:200], seed=3)], 32, "bfloat16")
    length = len(paged.documents[0].roles)
    again = Paged([document(PROMPTS["pages"][:200], seed=3)], 32, "bfloat16")
    ours, exact = paged.prefill([length], "LOOPS"), again.prefill([length], "EAGER")
    assert torch.allclose(ours.float(), exact.float(), atol=2**-6)


@pytest.mark.usefixtures("installed")
def test_its_own_check_is_heard() -> None:
    row = next(row for row in dispatch.table() if row.name == "loops")
    assert dispatch.probe.try_import(row, MACHINES["h200"]).text == "loops_attention is for a CPU"
    with pytest.raises(UnsupportedError):
        dispatch.choice_for(asked(dtype="float32", cache_dtype="float32"), "cpu", backend="loops")
