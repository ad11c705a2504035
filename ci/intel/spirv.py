"""What is done with the SPIR-V that Intel's Triton made, before anything runs. Standard library
only.

    python -m ci.intel.spirv native DIR --home .cache/intel      code for PVC and Arc A, by ocloc
    python -m ci.intel.spirv strip DIR OUT --home .cache/intel   the CPU's modules, as it takes them

Intel's offline compiler (ocloc) is the compile gate: the newest validator that PyPI serves stops at
the vectors these modules use. What it reports of spills is recorded in DIR/native.json, not held
against a limit. A module whose text did not change is not built again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Triton's target, and ocloc's word for the card. Battlemage and Lunar Lake are not known to Debian
# 12's ocloc.
DEVICES = {"pvc": "pvc", "dg2": "acm-g10"}

# Of a limit of processor time, by the clock: other work may take the cores.
CLOCK = 10

# SPV_INTEL_kernel_attributes carries nothing here but a hint about the size of a work-group; the
# CPU refuses it.
REFUSED = re.compile(
    r'.*(OpCapability KernelAttributesINTEL|OpExtension "SPV_INTEL_kernel_attributes"'
    r"|OpExecutionMode \S+ MaxWorkgroupSizeINTEL .*)\n"
)
_SPILL = re.compile(r"compiled (SIMD\d+) allocated (\d+) regs and spilled around (\d+)")


def _offline_compiler(home: Path) -> tuple[list[str], dict[str, str]]:
    tool = home / "ocloc" / "usr" / "bin" / "ocloc"
    libraries = sorted({str(path.parent) for path in (home / "ocloc").rglob("*.so*")})
    paths = os.pathsep.join(libraries)
    return [str(tool)], {**os.environ, "LD_LIBRARY_PATH": paths}


def build(module: Path, device: str, home: Path, limit: float) -> dict[str, Any]:
    """Native code of one module: {"ok", "seconds", "simd", "registers", "spills", "words"}.

    limit   seconds of processor time; CLOCK times as many by the clock
    """
    tool, environment = _offline_compiler(home)
    command = [*tool, "compile", "-file", str(module), "-spirv_input", "-device", device]
    begin, allowed = time.perf_counter(), math.ceil(limit)
    with tempfile.TemporaryDirectory() as out:
        try:
            done = subprocess.run(
                [*command, "-output", "kernel", "-out_dir", out],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
                timeout=CLOCK * limit,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (allowed, allowed)),
            )
            words = done.stdout + done.stderr
            ok = done.returncode == 0 and any(Path(out).glob("*.bin"))
            if done.returncode == -signal.SIGKILL:
                words += f" not built within {limit:g} s of processor time"
        except subprocess.TimeoutExpired:
            words, ok = f"not built within {CLOCK * limit:g} s", False
    found: dict[str, Any] = {"ok": ok, "seconds": round(time.perf_counter() - begin, 1)}
    spill = _SPILL.search(words)
    if spill:
        found |= {"simd": spill[1], "registers": int(spill[2]), "spills": int(spill[3])}
    elif ok:
        found |= {"spills": 0}
    return found if ok else found | {"words": " ".join(words.split())[-300:]}


def native(folder: Path, home: Path, limit: float) -> int:
    """Build every module of the folder that is meant for a card; 1 when one is refused or there is
    none.
    """
    known = home / "native"
    known.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, Any]] = {}
    for arch, device in DEVICES.items():
        for module in sorted(folder.glob(f"*.{arch}*.spv")):
            key = hashlib.sha256(module.read_bytes() + device.encode()).hexdigest()
            kept = known / f"{key}.json"
            cached = kept.exists()
            row = json.loads(kept.read_text()) if cached else build(module, device, home, limit)
            if row["ok"] and not cached:
                kept.write_text(json.dumps(row))
            rows[module.stem] = row
            state = "ok   " if row["ok"] else "WRONG"
            facts = " ".join(f"{name}={value}" for name, value in row.items() if name != "ok")
            print(
                f"{state} {module.stem:40s} {device:8s} {'cached ' if cached else ''}{facts}",
                flush=True,
            )
    (folder / "native.json").write_text(json.dumps(rows, indent=1))
    wrong = sum(not row["ok"] for row in rows.values())
    print(f"ocloc: {len(rows)} modules, {wrong} wrong")
    return int(wrong > 0 or not rows)


def strip(folder: Path, out: Path, home: Path) -> int:
    """The `generic` modules, less what the CPU's runtime refuses; 1 when there is none."""
    tools = home / "ocl" / "bin"
    out.mkdir(parents=True, exist_ok=True)
    modules = sorted(folder.glob("*.generic*.spv"))
    for module in modules:
        command = [str(tools / "spirv-dis"), "--raw-id", str(module)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [str(tools / "spirv-as"), "--target-env", "spv1.4", "--preserve-numeric-ids", "-"]
        target = ["-o", str(out / module.name)]
        subprocess.run([*command, *target], input=REFUSED.sub("", text), text=True, check=True)
        shutil.copy(module.with_suffix(".json"), out)
    print(f"{len(modules)} modules stripped for the CPU")
    return int(not modules)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.intel.spirv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("native", "strip"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--home", type=Path, default=Path(".cache/intel"))
    parser.add_argument(
        "--limit", type=float, default=180, help="seconds of processor time for a build"
    )
    args = parser.parse_args(argv)
    if args.what == "native":
        return native(args.folder, args.home, args.limit)
    if args.out is None:
        parser.error("strip needs OUT")
    return strip(args.folder, args.out, args.home)


if __name__ == "__main__":
    sys.exit(main())
