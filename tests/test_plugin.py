"""A third party's package adds a backend through the entry point: listed, tested, chosen, right."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dash_portable import dispatch, explanation, self_test
from dash_portable.__main__ import main
from dash_portable.backends import BACKENDS, records, sources
from dash_portable.backends.spec import Capability, takes
from dash_portable.choose import choose
from dash_portable.errors import UnsupportedError
from tests.machines import MACHINES, asked
from tests.paged import Paged
from tests.prompts import PROMPTS, document

PACKAGE = Path(__file__).parent / "plugin_backend"


MODULES = ("dash_portable_loops", "dash_portable_loops_adapter", "loops_attention")


def reloaded() -> None:
    """As a new process would find it: nothing of the plug-in is loaded or remembered in memory."""
    for module in MODULES:
        sys.modules.pop(module, None)
    importlib.invalidate_caches()
    records._kept.clear()
    dispatch.forget()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As pip would leave it: the files on the path, their metadata beside them. Gives the folder of
    the files, a copy."""
    folder = tmp_path / "plugin"
    folder.mkdir()
    for file in PACKAGE.glob("*.*"):
        shutil.copy(file, folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
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
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reloaded()
    yield folder
    reloaded()


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


def test_the_guides_step_runs(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(installed / "try_loops.py"))
    assert capsys.readouterr().out == "loops torch.Size([300, 2, 64])\n"


@pytest.mark.usefixtures("installed")
def test_it_comes_first_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what was measured on an architecture, and nowhere once it is disabled."""
    anywhere = replace(
        next(row for row in dispatch.table() if row.name == "loops"), capability=Capability()
    )
    for machine, place in (("mi300x", True), ("h200", False)):
        rows = (anywhere, *BACKENDS)
        names = [
            one.backend.name for one in choose(asked(), MACHINES[machine], backends=rows).decisions
        ]
        assert (names[0] == "loops") is place
        assert names.index("loops") < names.index("sdpa")
    assert chosen() == "loops"
    monkeypatch.setenv("DASH_PORTABLE_DISABLE", "loops")
    assert chosen() != "loops"


@pytest.mark.usefixtures("installed")
def test_its_own_check_is_heard() -> None:
    row = next(row for row in dispatch.table() if row.name == "loops")
    assert dispatch.probe.try_import(row, MACHINES["h200"]).text == "loops_attention is for a CPU"
    with pytest.raises(UnsupportedError):
        dispatch.choice_for(asked(dtype="float32", cache_dtype="float32"), "cpu", backend="loops")


# --- what is remembered, and of which source ----------------------------------------------------


def edit(file: Path, old: str, new: str) -> None:
    """Change a file of the plug-in; its version stays."""
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    reloaded()


def chosen() -> str:
    backend = dispatch.choice_for(asked(head_dim=64), "cpu").backend
    assert backend is not None
    return backend.name


LIBRARY, WRONG, RIGHT = "loops_attention.py", "1.5 * logit.softmax(0)", "logit.softmax(0)"


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        (LIBRARY, RIGHT, WRONG),
        ("dash_portable_loops_adapter.py", "self.call.scale", "2 * self.call.scale"),
    ],
)
def test_a_changed_source_is_tested_anew(
    installed: Path, file: str, right: str, wrong: str
) -> None:
    """Whichever way it changed, and without a new version."""
    assert chosen() == "loops"
    edit(installed / file, right, wrong)
    assert chosen() != "loops"
    edit(installed / file, wrong, right)
    assert chosen() == "loops"


def test_of_an_installed_copy_the_adapter_alone_is_marked(tmp_path: Path) -> None:
    """Its version tells the rest; in a folder that somebody works in nothing does."""
    for folder in ("site-packages", "work"):
        (tmp_path / folder / "some_library/inner").mkdir(parents=True)
        for name in ("__init__", "adapter", "inner/deep"):
            (tmp_path / folder / f"some_library/{name}.py").write_text("")
    counts = []
    for folder in ("site-packages", "work"):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / folder))
            counts.append(len(sources._files("some_library.adapter")))
            assert "some_library" not in sys.modules
    assert counts == [1, 3]
    assert sources.mark("no_such_library.adapter") == "none"


def doctor(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def failed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a verdict about what has been mended since: the same key, another answer."""
    with monkeypatch.context() as patch:
        patch.setattr(self_test, "run", lambda backend, platform: "wrong by 3e-1")
        row = next(row for row in dispatch.table() if row.name == "loops")
        dispatch.run_self_test(row, dispatch.platform_for(None, dispatch.table()))
    reloaded()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("force", ["", "loops"])
def test_doctor_tests_again_what_a_verdict_refused(
    force: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASH_PORTABLE_BACKEND", force)
    failed_before(monkeypatch)
    assert doctor(capsys, "--no-self-test")[0] == (2 if force else 1)
    status, report = doctor(capsys, "--self-test")
    assert (status, report["self_tests"]["loops"], report["refused"]) == (0, "", [])
    assert [choice["chosen"] for choice in report["choices"]] == ["loops", "loops"]
    reloaded()
    assert chosen() == "loops"


def test_doctor_says_one_thing_of_one_that_fails(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table shows the choice as the tests leave it."""
    edit(installed / LIBRARY, RIGHT, WRONG)
    assert main(["doctor"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("loops "))
    assert "FAILED" in line
    assert "chosen" not in line
    assert "decode of bfloat16, heads of 128" in line
    edit(installed / LIBRARY, WRONG, RIGHT)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("loops "))
    assert "passed" in line
    assert "chosen" in line
    assert "must pass" not in shown


def test_a_forced_plug_in_that_is_wrong_is_an_error(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a fallback, not a wrong answer; and it can be run all the same."""
    edit(installed / LIBRARY, RIGHT, WRONG)
    paged = Paged([document(PROMPTS["pages"][:200], seed=3)], 32, "bfloat16")
    length = len(paged.documents[0].roles)
    for way in ("argument", "environment"):
        if way == "environment":
            monkeypatch.setenv("DASH_PORTABLE_BACKEND", "loops")
        with pytest.raises(UnsupportedError) as refused:
            paged.prefill([length], "LOOPS" if way == "argument" else "AUTO")
        head = str(refused.value).splitlines()[0]
        assert "found an error of" in head
        assert "needed at most" in head
        assert "DASH_PORTABLE_SELF_TEST=0 runs it all the same" in head
    monkeypatch.setenv("DASH_PORTABLE_SELF_TEST", "0")
    assert paged.prefill([length], "LOOPS").isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        ("q.dtype == torch.float16", "of float16"),
        ("q.dtype == torch.bfloat16", "of bfloat16"),
        ("v.shape[-1] in (64, 72)", "heads of 64"),
        ("v.shape[-1] > 200", "heads of 240"),
        ("group > 2", "4 query heads a kv head"),
        ("group == 1", "1 query heads a kv head"),
    ],
)
def test_wrong_in_one_corner_is_seen(installed: Path, wrong: str, seen: str) -> None:
    """Each dtype, width and group that its row declares is tried."""
    edit(installed / LIBRARY, RIGHT, f"(1.5 if {wrong} else 1.0) * {RIGHT}")
    row = next(row for row in dispatch.table() if row.name == "loops")
    verdict = self_test.run(row, MACHINES["cpu"])
    assert seen in verdict
    assert "against the oracle" in verdict


@pytest.mark.parametrize("machine", ["h200", "b200", "a100", "mi300x", "b580", "cpu"])
def test_what_is_tried_of_our_own_rows(machine: str) -> None:
    """Both phases, every dtype, group and usual width that a row takes there, in a few calls."""
    for row in BACKENDS:
        offer = row.capability
        if offer.vendors is not None and MACHINES[machine].vendor not in offer.vendors:
            continue
        found = self_test.tried(row, MACHINES[machine])
        assert {one.phase for one in found} == {"prefill", "decode"}
        dtypes = set(self_test.DTYPES) if offer.dtypes is None else set(offer.dtypes)
        assert {one.dtype for one in found} == dtypes
        assert {one.group_size for one in found} == set(self_test.GROUPS)
        widths = {one.head_dim for one in found}
        assert 64 in widths
        assert 128 in widths or not takes(row, MACHINES[machine], asked())
        assert len(found) <= 6


def test_a_step_that_a_library_refuses_is_no_verdict(installed: Path) -> None:
    """It refuses such a step later too, and another backend serves it; but one has to work."""
    adapter = installed / "dash_portable_loops_adapter.py"
    refusing = "from dash_portable.errors import BackendError\n"
    raising = 'raise BackendError("no such kernel")\n        '
    line = "self.function = function"
    edit(adapter, "from torch import Tensor\n", f"from torch import Tensor\n{refusing}")
    edit(adapter, line, f"if call.value_width > 200:\n            {raising}{line}")
    row = next(row for row in dispatch.table() if row.name == "loops")
    assert self_test.run(row, MACHINES["cpu"]) == ""
    edit(adapter, "call.value_width > 200", "True")
    assert self_test.run(row, MACHINES["cpu"]).endswith("no such kernel")


def test_a_width_that_a_card_has_no_room_for_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfResources(Exception):  # as Triton's
        pass

    row = next(row for row in dispatch.table() if row.name == "eager")
    runner: Any = row.load()
    run, most = runner.run, 200

    def narrow(self: Any, query: torch.Tensor, *rest: torch.Tensor) -> None:
        if query.shape[2] > most:
            raise OutOfResources("out of resource: shared memory")
        run(self, query, *rest)

    monkeypatch.setattr(runner, "run", narrow)
    assert self_test.run(row, MACHINES["cpu"]) == ""
    most = 0
    assert self_test.run(row, MACHINES["cpu"]).endswith("shared memory")


SEGMENTS = """
from dash_portable.segments import Addressing, Segments


class Apart(Library):
    title = "loops_attention"
    addressing = Addressing.CLOSED

    def __init__(self, call: Call) -> None:
        self.call = call

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        starts = self.call.starts_k.tolist()
        group = query.shape[1] // key.shape[1]
        out = query.new_full((*query.shape[:2], value.shape[-1]), float("nan"))
        lse = query.new_full((query.shape[1], len(query)), EMPTY).float()
        for run in range(len(query)):
            keys, values = (x[starts[run] : starts[run + 1]].float() for x in (key, value))
            if len(keys):
                keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
                logits = (keys * query[run].float()).sum(-1) * self.call.scale
                lse[:, run] = logits.logsumexp(0) + SHIFT
                out[run] = (logits.softmax(0)[..., None] * values).sum(0).to(out.dtype)
        return out, lse


class Segmented(Segments):
    library = Apart
"""


@pytest.mark.parametrize("empty", ["0.0", "float('inf')", "float('-inf')", "float('nan')"])
def test_the_lse_of_a_run_without_keys_may_be_anything(installed: Path, empty: str) -> None:
    with (installed / "dash_portable_loops_adapter.py").open("a") as file:
        file.write(SEGMENTS.replace("EMPTY", empty).replace("SHIFT", "0.0"))
    reloaded()
    row = next(row for row in dispatch.table() if row.name == "loops")
    row = replace(row, entry="dash_portable_loops_adapter:Segmented", stages=("gather", "merge"))
    assert self_test.run(row, MACHINES["cpu"]) == ""


def test_an_lse_that_is_not_one_is_seen(installed: Path) -> None:
    """Of a base that was not told: the segments' shares are wrong."""
    with (installed / "dash_portable_loops_adapter.py").open("a") as file:
        file.write(SEGMENTS.replace("EMPTY", "0.0").replace("+ SHIFT", "* 1.4427"))
    reloaded()
    row = next(row for row in dispatch.table() if row.name == "loops")
    row = replace(row, entry="dash_portable_loops_adapter:Segmented", stages=("gather", "merge"))
    assert "against the oracle" in self_test.run(row, MACHINES["cpu"])


def test_what_was_forced_is_told_first(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it cannot serve: before those that nobody asked about, with its reason."""
    edit(installed / LIBRARY, RIGHT, WRONG)
    assert main(["explain", "--backend", "loops", "--phase", "decode"]) == 0
    shown = capsys.readouterr().out
    first, *others = shown.partition("answer")[2].splitlines()[1:]
    assert first.split()[:2] == ["rejected", "loops"]
    assert any(line.startswith("ok") for line in others)
    told = str(explanation.explain(asked(head_dim=64), backend="loops")).splitlines()
    rows = [line for line in told if line.startswith("  ") and not line.startswith("   ")]
    assert rows[0].startswith("  loops: rejected")
