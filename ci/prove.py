"""Proof that a lane runs on its own machine with its own wheels: `python -m ci.prove LANE
doctor.json`.

A torch of another vendor, put there by a dependency, runs every test on the CPU and turns the lane
green; so does a missing device. Both make the lane red here. Exit status 1, one line a finding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ci.matrix import Lane, load


def found_versions() -> dict[str, str]:
    """The installed torch and Triton, without the local part (`+cpu`, `+rocm7.0`); absent ones left
    out.
    """
    found = {}
    for name in ("torch", "triton"):
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def findings(lane: Lane, doctor: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """What `doctor --json` and the installed versions say against the lane; empty when it is
    proven.
    """
    platform = doctor["platform"]
    found = []
    # A CPU's arch is the host's: no lane asks for one.
    for name in ("vendor",) if lane["vendor"] == "cpu" else ("vendor", "arch"):
        seen = platform[name] or "nothing"
        if seen != lane[name]:
            found.append(f"{name}: the lane is for {lane[name]}, doctor sees {seen}")
    for name in ("torch", "triton"):
        if lane[name][0].isdigit() and versions.get(name) != lane[name]:
            seen = versions.get(name, "nothing")
            found.append(f"{name}: the lane asks for {lane[name]}, found {seen}")
    return found


def main(argv: list[str]) -> int:
    name, path = argv
    lane = next(lane for lane in load() if lane["lane"] == name)
    wrong = findings(lane, json.loads(Path(path).read_text()), found_versions())
    for text in wrong:
        print(f"lane {name}: {text}", file=sys.stderr)
    if not wrong:
        versions = " ".join(f"{key} {value}" for key, value in found_versions().items())
        print(f"lane {name}: {lane['vendor']} {lane['arch']} is here, {versions}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
