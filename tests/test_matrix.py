"""The lanes as data, the workflow that takes them, and the proof that a lane is on its own
machine.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ci import matrix, prove
from dash_portable.platform.facts import Vendor

ROOT = Path(__file__).resolve().parent.parent
LANES = matrix.load()
EXTRAS = matrix.extras()
STEPS = matrix.steps()


def wrong(lanes: list[matrix.Lane]) -> list[str]:
    return matrix.findings(lanes, EXTRAS, STEPS)


def changed(name: str, **fields: object) -> list[matrix.Lane]:
    lanes = copy.deepcopy(LANES)
    next(lane for lane in lanes if lane["lane"] == name).update(fields)
    return lanes


def test_lanes_are_right():
    assert wrong(LANES) == []


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("nvidia-sm90", {"note": ""}, "note: a lane that is off"),
        ("audit-newest", {"note": ""}, "note: a lane that is off or does not block"),
        ("nvidia-sm90", {"blocking": True}, "blocking: a lane that is off cannot block"),
        ("amd-gfx942", {"vendor": "rocm"}, "vendor: found 'rocm'"),
        ("amd-gfx942", {"arch": "sm90"}, "arch: 'sm90' is no arch of amd"),
        ("amd-gfx942", {"index": "default"}, "index: pip's default index would bring CUDA's torch"),
        ("amd-gfx942", {"extra": "rocm"}, "extra: pyproject.toml has no extra 'rocm'"),
        ("amd-gfx942", {"runner": ["ubuntu-24.04"]}, "runner: a lane with a device"),
        ("amd-gfx942", {"runner": []}, "runner: no label"),
        ("audit", {"check": "adit"}, "check: ci/test.sh has no step adit"),
        ("audit", {"check": "device"}, "check: `device` belongs to the lanes of GPUs"),
        ("intel-bmg", {"check": "cpu"}, "check: `device` belongs to the lanes of GPUs"),
        ("audit", {"python": "3"}, "python: found '3'"),
        ("audit", {"torch": "2.13"}, "torch: found '2.13'"),
        ("audit", {"minutes": "30"}, "minutes: found '30', needed a int"),
        ("audit", {"colour": "red"}, "unknown field 'colour'"),
        ("audit", {"lane": "cpu-py310"}, "lane: the name is taken"),
        ("audit", {"lane": "Audit lane"}, "lane: needed small letters"),
    ],
)
def test_wrong_lane_is_named(name: str, fields: dict[str, object], said: str):
    found = wrong(changed(name, **fields))
    lane = fields.get("lane", name)
    assert [text for text in found if text.startswith(f"{lane}: {said}")], found


def test_every_vendor_has_a_lane():
    for vendor in Vendor:
        others = [lane for lane in LANES if lane["vendor"] != vendor]
        assert f"{vendor}: the vendor has no lane" in wrong(others)


def test_lanes_cover_what_is_promised():
    names = {lane["lane"] for lane in LANES}
    assert {f"cpu-py3{minor}" for minor in (10, 11, 12, 13)} <= names
    assert {"nvidia-sm80", "nvidia-sm90", "nvidia-sm120", "intel-pvc", "intel-bmg"} <= names
    assert {f"amd-{arch}" for arch in ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")} <= names
    checks = {step for lane in LANES if lane["enabled"] for step in lane["check"].split()}
    assert {
        "lint",
        "types",
        "docs",
        "cpu",
        "interpreter",
        "audit-full",
        "intel",
        "faults",
    } <= checks


def test_pinned_versions_are_those_of_the_constraints():
    pins = dict(
        re.findall(r"^(torch|triton)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)
    )
    lane = next(lane for lane in LANES if lane["lane"] == "interpreter")
    assert {"torch": lane["torch"], "triton": lane["triton"]} == pins


def test_workflow_takes_the_lanes():
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    plan, lane = workflow["jobs"]["plan"], workflow["jobs"]["lane"]
    assert plan["outputs"]["matrix"] == "${{ steps.matrix.outputs.matrix }}"
    assert lane["strategy"] == {
        "fail-fast": False,
        "matrix": "${{ fromJSON(needs.plan.outputs.matrix) }}",
    }
    assert lane["continue-on-error"] == "${{ !matrix.blocking }}"
    assert lane["steps"][-1]["run"] == "bash ci/lane.sh ${{ matrix.lane }}"
    used = set(re.findall(r"matrix\.(\w+)", text)) - {"outputs"}
    for row in matrix.matrix(LANES)["include"]:
        assert used <= set(row), "the workflow asks for a field that no lane has"


def test_actions_are_pinned_by_hash():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for line in path.read_text().splitlines():
            if "uses:" in line:
                assert re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_printed_matrix_is_the_enabled_lanes():
    command = [sys.executable, "-m", "ci.matrix"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "\n" not in done.stdout.strip()  # one line: it becomes a line of GITHUB_OUTPUT
    rows = json.loads(done.stdout)["include"]
    assert [row["lane"] for row in rows] == [lane["lane"] for lane in LANES if lane["enabled"]]
    listed = subprocess.run(
        [*command, "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == len(LANES)
    for lane in LANES:
        assert lane["note"] in listed.stdout


def test_shell_row_is_safe_to_evaluate():
    lane = next(lane for lane in LANES if " " in lane["devices"] and ";" in lane["note"])
    row = f"{sys.executable} -m ci.matrix --shell {lane['lane']}"
    command = ["bash", "-c", f'eval "$({row})"; echo "$LANE_NOTE|$LANE_DEVICES"']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{lane['note']}|{lane['devices']}"


def test_nox_has_a_session_for_every_step():
    text = (ROOT / "noxfile.py").read_text()
    assert set(re.findall(r'_step\(session, "([\w-]+)"\)', text)) == STEPS - {"device"}


PROVEN = {"platform": {"vendor": "nvidia", "arch": "sm90"}}
VERSIONS = {"torch": "2.13.0", "triton": "3.7.1"}
SM90 = next(lane for lane in LANES if lane["lane"] == "nvidia-sm90")


def test_lane_on_its_own_machine_is_proven():
    assert prove.findings(SM90, PROVEN, VERSIONS) == []


@pytest.mark.parametrize(
    ("platform", "versions", "said"),
    [
        (
            {"vendor": "cpu", "arch": "cpu"},
            VERSIONS,
            "vendor: the lane is for nvidia, doctor sees cpu",
        ),
        ({"vendor": "nvidia", "arch": "sm80"}, VERSIONS, "arch: the lane is for sm90"),
        (
            PROVEN["platform"],
            {"torch": "2.12.0", "triton": "3.7.1"},
            "torch: the lane asks for 2.13.0",
        ),
        (PROVEN["platform"], {"torch": "2.13.0"}, "triton: the lane asks for 3.7.1, found nothing"),
    ],
    ids=["swapped-torch-wheel", "other-card", "other-torch", "no-triton"],
)
def test_lane_elsewhere_is_red(platform: dict[str, str], versions: dict[str, str], said: str):
    found = prove.findings(SM90, {"platform": platform}, versions)
    assert any(text.startswith(said) for text in found), found
