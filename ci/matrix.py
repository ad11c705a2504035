"""The lanes of ci/vendors.json: checked, listed for people, printed for GitHub.

    python -m ci.matrix                  the matrix as GitHub wants it, lanes that are on
    python -m ci.matrix --list           every lane, what it checks and why one is off
    python -m ci.matrix --check          only the check; exit status 1 and one line a finding
    python -m ci.matrix --names          name and Python of the lanes that are on
    python -m ci.matrix --shell LANE     the lane's fields as shell assignments, for ci/lane.sh

A lane is a row: vendor and arch that must be found on its machine, runner labels, container image
and its options, where torch comes from (`default` pip's own index, `image` the container), package
extra, versions (`none`: the check brings its own environment), the steps of ci/test.sh that it
runs, whether it is on and whether it blocks.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from dash_portable.platform.facts import ARCHS, Vendor

ROOT = Path(__file__).resolve().parent.parent
LANES = ROOT / "ci" / "vendors.json"
FIELDS: dict[str, type] = {
    "lane": str,
    "vendor": str,
    "arch": str,
    "check": str,
    "runner": list,
    "image": str,
    "devices": str,
    "index": str,
    "extra": str,
    "python": str,
    "torch": str,
    "triton": str,
    "minutes": int,
    "enabled": bool,
    "blocking": bool,
    "note": str,
}
Lane = dict[str, Any]
FLOORS = {"torch": (2, 8, 0), "triton": (3, 4, 0)}  # the oldest that are supported
MOST_MINUTES = 360  # GitHub ends a job then


def load(path: Path = LANES) -> list[Lane]:
    """Every lane with its defaults filled in, unchecked."""
    data = json.loads(path.read_text())
    return [{**data["defaults"], **lane} for lane in data["lanes"]]


def extras() -> set[str]:
    """The package's extras, read without a TOML library: a vendor's image may hold Python 3.10."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^([\w-]+) *=", section, re.MULTILINE))


def pythons() -> list[str]:
    """The Pythons that the package says it runs on."""
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def steps() -> set[str]:
    """The steps that ci/test.sh has."""
    command = ["bash", str(ROOT / "ci" / "test.sh"), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def _shape(lane: Lane) -> list[str]:
    """What is wrong with the fields themselves; the rest of the checks rely on them."""
    found = [f"unknown field {name!r}" for name in lane if name not in FIELDS]
    for name, kind in FIELDS.items():
        if name not in lane:
            found.append(f"{name} is missing")
        elif type(lane[name]) is not kind:
            found.append(f"{name}: found {lane[name]!r}, needed a {kind.__name__}")
    return found


def _findings(lane: Lane, known_extras: set[str], known_steps: set[str]) -> list[str]:
    found = []
    vendors = {str(vendor) for vendor in Vendor}
    archs = {arch.token: str(arch.vendor) for arch in ARCHS} | {"cpu": "cpu"}
    if not re.fullmatch(r"[a-z][a-z0-9-]*", lane["lane"]):
        found.append("lane: needed small letters, digits and dashes")
    if lane["vendor"] not in vendors:
        found.append(f"vendor: found {lane['vendor']!r}, needed one of {' '.join(sorted(vendors))}")
    elif archs.get(lane["arch"]) != lane["vendor"]:
        found.append(f"arch: {lane['arch']!r} is no arch of {lane['vendor']}")
    if lane["extra"] not in known_extras:
        found.append(f"extra: pyproject.toml has no extra {lane['extra']!r}")
    unknown = sorted(set(lane["check"].split()) - known_steps)
    if unknown or not lane["check"]:
        found.append(f"check: ci/test.sh has no step {' '.join(unknown) or '(none named)'}")
    supported = pythons()
    if lane["python"] not in supported:
        found.append(f"python: found {lane['python']!r}, needed one of {' '.join(supported)}")
    for name, floor in FLOORS.items():
        value = lane[name]
        if value in ("image", "none"):
            continue
        if not re.fullmatch(r"\d+\.\d+\.\d+", value):
            found.append(f"{name}: found {value!r}, needed N.N.N, image or none")
        elif tuple(map(int, value.split("."))) < floor:
            least = ".".join(map(str, floor))
            found.append(f"{name}: found {value!r}, needed at least {least}")
    if not 1 <= lane["minutes"] <= MOST_MINUTES:
        found.append(f"minutes: found {lane['minutes']}, needed 1 to {MOST_MINUTES}")
    if lane["index"] not in ("default", "image"):
        found.append(f"index: found {lane['index']!r}, needed default or image")
    if not lane["runner"]:
        found.append("runner: no label")
    if not lane["note"].strip() and not (lane["enabled"] and lane["blocking"]):
        found.append("note: a lane that is off or does not block must say why")
    if lane["blocking"] and not lane["enabled"]:
        found.append("blocking: a lane that is off cannot block")
    device = lane["vendor"] != "cpu"
    if device != ("device" in lane["check"].split()):
        found.append("check: `device` belongs to the lanes of GPUs, and to all of them")
    if device and "self-hosted" not in lane["runner"]:
        found.append("runner: a lane with a device needs a self-hosted label")
    if device and "none" in (lane["torch"], lane["triton"]):
        found.append("torch: a lane with a device is proven by its torch and its triton")
    tag = lane["image"].rpartition("/")[2].partition(":")[2]
    if lane["image"] and (not re.search(r"\d", tag) or "latest" in tag):
        found.append(f"image: found {lane['image']!r}, needed a tag with a version")
    if device and lane["image"] and not lane["devices"]:
        found.append("devices: a container sees none that it is not given")
    if lane["devices"] and not lane["image"]:
        found.append("devices: they are a container's options, and the lane has no image")
    if (lane["index"] == "image") != (lane["torch"] == "image"):
        found.append("torch: it comes from the image when the index does, and only then")
    if lane["index"] == "image" and not lane["image"]:
        found.append("index: torch comes from the image, and the lane has none")
    if lane["vendor"] in ("amd", "intel") and lane["index"] == "default":
        found.append("index: pip's default index would bring CUDA's torch to this vendor")
    return found


def findings(lanes: list[Lane], known_extras: set[str], known_steps: set[str]) -> list[str]:
    """Everything wrong with the lanes, each with its lane's name; empty when they are right."""
    found = []
    names = [lane.get("lane") for lane in lanes]
    for place, lane in enumerate(lanes):
        name = lane.get("lane") or f"lane {place}"
        wrong = _shape(lane) or _findings(lane, known_extras, known_steps)
        if names.index(lane.get("lane")) != place:
            wrong = [*wrong, "lane: the name is taken"]
        found += [f"{name}: {text}" for text in wrong]
    covered = {lane.get("vendor") for lane in lanes}
    found += [f"{v}: the vendor has no lane" for v in map(str, Vendor) if v not in covered]
    return found


def container(lane: Lane) -> dict[str, str] | str:
    """What GitHub takes as a job's container; an empty text means the runner itself."""
    return {"image": lane["image"], "options": lane["devices"]} if lane["image"] else ""


def matrix(lanes: list[Lane]) -> dict[str, list[Lane]]:
    on = [lane for lane in lanes if lane["enabled"]]
    return {"include": [{**lane, "container": container(lane)} for lane in on]}


def listing(lanes: list[Lane]) -> str:
    lines = []
    for lane in lanes:
        state = "off" if not lane["enabled"] else "blocks" if lane["blocking"] else "reports"
        versions = f"py{lane['python']} torch {lane['torch']} triton {lane['triton']}"
        text = f"{lane['lane']:20s} {state:8s} {lane['vendor']:7s}{lane['arch']:9s}{versions:34s} "
        lines.append(f"{text}{lane['check']:24s} {lane['note']}".rstrip())
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--names", action="store_true")
    parser.add_argument("--shell", metavar="LANE")
    args = parser.parse_args(argv)
    lanes = load()
    wrong = findings(lanes, extras(), steps())
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if args.check:
        on = len(matrix(lanes)["include"])
        print(f"{len(lanes)} lanes are right, {on} on, {len(lanes) - on} off")
    elif args.names:
        for lane in matrix(lanes)["include"]:
            print(lane["lane"], lane["python"])
    elif args.list:
        print(listing(lanes))
    elif args.shell:
        named = {lane["lane"]: lane for lane in lanes}
        if args.shell not in named:
            print(f"lane: found {args.shell!r}, needed one of {' '.join(named)}", file=sys.stderr)
            return 1
        lane = named[args.shell]
        for name, value in lane.items():
            text = " ".join(value) if isinstance(value, list) else str(value)
            print(f"LANE_{name.upper()}={shlex.quote(text)}")
    else:
        print(json.dumps(matrix(lanes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
