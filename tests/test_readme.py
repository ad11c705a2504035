"""What the README promises: its example runs, its test command is CI's, its links exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from dash_portable.platform.facts import TRITON_FLOOR, TRITON_RUN

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_says_who_attends() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    out = names["out"]
    assert out.shape == (300, 10, 128)  # type: ignore[attr-defined]
    assert out.isfinite().all()  # type: ignore[attr-defined]


def test_the_serving_page_is_one_program_that_runs() -> None:
    parts = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.S)
    assert len(parts) == 3
    names: dict[str, object] = {}
    exec(compile("\n".join(parts), "docs/serving.md", "exec"), names)
    a, b = names["a"], names["b"]
    assert (a.stored, b.stored) == (568 + 1 + 3, 294 + 3)  # type: ignore[attr-defined]


def test_no_page_holds_a_place_to_be_filled() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        assert "@@" not in page.read_text(), page


def test_the_test_command_is_cis() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.S)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


def test_the_same_script_runs_here() -> None:
    script = ROOT / "examples" / "same_script.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_link_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tritons_range_is_what_ci_runs() -> None:
    oldest, newest = TRITON_RUN
    assert f"Triton {oldest} to {newest} ({TRITON_FLOOR} in Intel's build)" in README
    lanes = json.loads((ROOT / "ci" / "vendors.json").read_text())["lanes"]
    run = {lane["triton"] for lane in lanes if "triton" in lane and lane["check"] != "intel"}
    assert {f"{oldest}.0", f"{newest}.0"} <= run
    assert f'"triton>={oldest};' in (ROOT / "pyproject.toml").read_text()
