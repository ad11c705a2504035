"""The lanes as data, the workflow that takes them, and the proof that a lane is on its own
machine.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml

from ci import matrix, prove, seeded_faults
from dash_portable import current_platform
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
        ("amd-gfx942", {"image": "rocm/pytorch:latest"}, "image: found 'rocm/pytorch:latest'"),
        ("amd-gfx942", {"image": "rocm/pytorch"}, "image: found 'rocm/pytorch'"),
        ("amd-gfx942", {"image": ""}, "index: torch comes from the image, and the lane has none"),
        ("intel-bmg", {"image": ""}, "devices: they are a container's options"),
        ("intel-bmg", {"torch": "2.13.0"}, "torch: it comes from the image when the index does"),
        ("audit", {"check": "adit"}, "check: ci/test.sh has no step adit"),
        ("audit", {"check": "device"}, "check: `device` belongs to the lanes of GPUs"),
        ("intel-bmg", {"check": "cpu"}, "check: `device` belongs to the lanes of GPUs"),
        ("amd-gfx942", {"image": "here:5000/pytorch"}, "image: found 'here:5000/pytorch'"),
        ("amd-gfx942", {"image": "rocm/pytorch:latest-3"}, "image: found 'rocm/pytorch:latest-3'"),
        ("amd-gfx942", {"devices": ""}, "devices: a container sees none that it is not given"),
        ("nvidia-sm90", {"note": "  "}, "note: a lane that is off"),
        ("nvidia-sm90", {"torch": "none"}, "torch: a lane with a device is proven by its torch"),
        ("audit", {"python": "3"}, "python: found '3'"),
        ("audit", {"python": "3.7"}, "python: found '3.7', needed one of 3.10 3.11 3.12 3.13"),
        ("audit", {"torch": "2.5.0"}, "torch: found '2.5.0', needed at least 2.8.0"),
        ("audit", {"triton": "3.3.1"}, "triton: found '3.3.1', needed at least 3.4.0"),
        ("audit", {"minutes": 0}, "minutes: found 0, needed 1 to 360"),
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


def test_every_step_is_run_somewhere():
    """By a lane, or by the command that everybody runs; nox's own default is that command's."""
    text = (ROOT / "ci" / "test.sh").read_text()
    default = set(re.search(r"^DEFAULT=\((.*)\)$", text, re.M)[1].split())
    lanes = {step for lane in LANES for step in lane["check"].split()}
    assert lanes | default == STEPS
    sessions = re.search(r"options.sessions = \[(.*)\]", (ROOT / "noxfile.py").read_text())[1]
    assert set(re.findall(r'"(\w+)"', sessions)) == default


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


@pytest.mark.parametrize(
    ("lanes", "said"),
    [(["nosuchlane"], "no lane was run: found nosuchlane, needed"), ([], "note: a lane that is")],
    ids=["no-such-lane", "wrong-lanes"],
)
def test_a_run_of_no_lane_is_red(tmp_path: Path, lanes: list[str], said: str):
    shutil.copytree(ROOT / "ci", tmp_path / "ci", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dash_portable", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    if not lanes:
        table = tmp_path / "ci" / "vendors.json"
        table.write_text(table.read_text().replace("RTX 50; no runner yet, not run by us", ""))
    command = ["bash", "ci/simulated.sh", *lanes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr


def test_shell_row_is_safe_to_evaluate():
    lane = next(lane for lane in LANES if " " in lane["devices"] and ";" in lane["note"])
    row = f"{sys.executable} -m ci.matrix --shell {lane['lane']}"
    command = ["bash", "-c", f'eval "$({row})"; echo "$LANE_NOTE|$LANE_DEVICES"']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{lane['note']}|{lane['devices']}"


def test_nox_has_a_session_for_every_step():
    """Under the step's own name."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    runs = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            named = re.search(r"name='([\w-]+)'", ast.unparse(node.decorator_list[0]))
            asked = re.search(r"_step\(session, '([\w-]+)'\)", ast.unparse(node))
            runs[named[1] if named else node.name] = asked and asked[1]
    assert runs.pop("simulated") is None
    assert runs == {step: step for step in STEPS}


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


def test_workflow_gives_each_lane_its_machine_and_no_more():
    """What a lane asks for is what its job gets; nothing but reading is allowed, to any job."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    job = workflow["jobs"]["lane"]
    assert job["runs-on"] == "${{ matrix.runner }}"
    assert job["container"] == "${{ matrix.container }}"
    assert job["timeout-minutes"] == "${{ matrix.minutes }}"
    assert "if" not in job
    # YAML reads `on` as true.
    assert set(workflow[True]) == {"push", "pull_request", "workflow_dispatch"}
    for one in workflow["jobs"].values():
        assert "permissions" not in one
        for step in one["steps"]:
            assert not step.get("continue-on-error")
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}


PRETENDED = """#!/usr/bin/env bash
# A Python whose `venv` and `pip` only write down what they are asked, and whose doctor was here.
case "$*" in
    "-m venv "*)
        mkdir -p "$3/bin" "$3/packages"
        cp "$0" "$3/bin/python"
        echo "venv" >>"$ASKED" ;;
    "-m dash_portable doctor --json") cat "$DOCTOR" ;;
    "-m pip "*) echo "${*:3}" >>"$ASKED" ;;
    *purelib*) echo "$(dirname "$(dirname "$0")")/packages" ;;
    *) exec "$REAL" "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def doctor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What doctor says of this machine: it looks at every library, for some seconds."""
    path = tmp_path_factory.mktemp("doctor") / "doctor.json"
    command = [sys.executable, "-m", "dash_portable", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    path.write_text(done.stdout)
    return path


@pytest.fixture
def lanes_run_dry(tmp_path: Path, doctor: Path):
    """Runs ci/lane.sh whole, but for what pip would install and what ci/test.sh would check."""
    shutil.copytree(ROOT / "ci", tmp_path / "ci", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dash_portable", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    checks = tmp_path / "ci" / "test.sh"
    checks.write_text(
        f'[[ "$1" == --list ]] && exec bash {ROOT}/ci/test.sh --list\n'
        'echo "checked $*"\nexit "${FAILING:-0}"\n'
    )
    python = tmp_path / "python"
    python.write_text(PRETENDED)
    python.chmod(0o755)

    def run(lane: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        asked = tmp_path / "asked"
        asked.write_text("")
        done = subprocess.run(
            ["bash", "ci/lane.sh", lane],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHON": str(python),
                "REAL": sys.executable,
                "ASKED": str(asked),
                "DOCTOR": str(doctor),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return done, asked.read_text().splitlines()

    return run


OTHER = "amd" if current_platform().vendor != Vendor.AMD else "intel"


@pytest.mark.parametrize("lane", [lane["lane"] for lane in LANES if lane["vendor"] == OTHER][:1])
def test_a_lane_whose_device_is_missing_is_red(lanes_run_dry, lane: str):
    done, _ = lanes_run_dry(lane)
    assert done.returncode != 0
    assert f"vendor: the lane is for {OTHER}, doctor sees" in done.stderr
    assert f"lane {lane} FAILED. Run it locally: bash ci/lane.sh {lane}" in done.stderr
    assert "checked" not in done.stdout  # nothing is run on another machine than the lane's


def test_a_lane_takes_torch_from_its_image(lanes_run_dry, tmp_path: Path):
    _, asked = lanes_run_dry("amd-gfx942")
    assert not [line for line in asked if " torch==" in line or " triton==" in line]
    home = tmp_path / ".cache" / "lanes" / "amd-gfx942"
    found = (home / "packages" / "image.pth").read_text().splitlines()
    assert str(Path(torch.__file__).parent.parent) in found
    pinned = f"torch=={version('torch')}"
    assert pinned in (home / "constraints.txt").read_text().splitlines()


@pytest.mark.skipif(current_platform().vendor != Vendor.CPU, reason="a lane of a CPU is run")
def test_a_lane_installs_checks_and_shows_the_choice(lanes_run_dry):
    installed = {name: version(name).partition("+")[0] for name in ("torch", "triton")}
    lane = next(
        (one for one in LANES if one["check"] == "cpu" and {**one, **installed} == one), None
    )
    if lane is None:
        pytest.skip(f"no lane of {installed}")
    done, asked = lanes_run_dry(lane["lane"])
    assert done.returncode == 0, done.stderr
    assert asked[0] == "venv"
    assert asked[1].endswith(f"torch=={lane['torch']}")
    assert asked[2].endswith(f"--no-deps triton=={lane['triton']}")
    assert asked[3].endswith(".[test,cli,plot]")
    assert "checked cpu" in done.stdout
    assert "prefill" in done.stdout.partition("checked cpu")[2]  # the decision table
    again, asked = lanes_run_dry(lane["lane"], FAILING="1")
    assert asked == []  # the environment is kept
    assert again.returncode != 0
    assert f"Run it locally: bash ci/lane.sh {lane['lane']}" in again.stderr


def test_tests_that_want_another_device_end_at_once():
    """They are not skipped: `--require-vendor` is what the lanes of GPUs say to pytest."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_errors.py"]
    done = subprocess.run(
        [*command, "--require-vendor", OTHER], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"no {OTHER} device: this is" in done.stdout + done.stderr
    assert "passed" not in done.stdout
    text = (ROOT / "ci" / "test.sh").read_text()
    assert 'tests tests/kernels --require-vendor "$LANE_VENDOR"' in text


def test_a_failing_step_is_red_and_named():
    """The other steps are run all the same."""
    command = ["bash", "ci/test.sh", "docs", "matrix"]
    broken = {**os.environ, "PYTHON": "false"}
    done = subprocess.run(
        command, cwd=ROOT, env=broken, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    for step in ("docs", "matrix"):
        assert f"FAILED {step}. Run it locally: bash ci/test.sh {step}" in done.stderr
    assert "== times: install 0 s, docs 0 s, matrix 0 s" in done.stdout


@pytest.mark.parametrize("fault", seeded_faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_still_finds_its_place(fault: seeded_faults.Fault):
    assert fault.lane in {lane["lane"] for lane in LANES}
    if fault.old:
        assert (ROOT / fault.path).read_text().count(fault.old) == 1
    if "--only" in fault.command:
        CASES = pytest.importorskip("dash_portable.kernels.cases").CASES
        assert fault.command[list(fault.command).index("--only") + 1] in CASES


def test_faults_are_planted_in_a_copy_also_of_another_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in a container, whose checkout is the runner's; git itself can be told to see it so."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("HOME", str(tmp_path))  # where nobody trusts the folder
    refused = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=False)
    assert refused.returncode != 0
    seeded_faults.copy_to(tmp_path / "copy")
    assert (tmp_path / "copy" / "ci" / "seeded_faults.py").read_bytes() == Path(
        seeded_faults.__file__
    ).read_bytes()
