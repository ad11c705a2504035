"""Plant one fault at a time in a copy of the project and ask the lane meant for it.

    python -m ci.seeded_faults                  all; prepares the Intel lane where it is not there
    python -m ci.seeded_faults offset wheel     those whose name holds one of these words

A fault counts as caught when the lane's own command fails and says why, and passes on the untouched
copy. A planted text that no longer finds its place is an error of this file, never a pass. The
table goes to .cache/seeded-faults.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
PYTHON = sys.executable
XPU = str(CACHE / "intel" / "xpu" / "bin" / "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: where it is planted, who must notice, and with which words.

    old      a text of the file that `new` takes the place of; empty: `new` is put behind the file
    command  what the lane runs, narrowed to what can show the fault
    control  whether the command passes on the untouched copy; False where this machine is the fault
    """

    name: str
    lane: str
    path: str
    old: str
    new: str
    command: Sequence[str]
    says: str
    control: bool = True


def _audit(case: str, target: str, python: str = PYTHON) -> list[str]:
    command = [python, "-m", "dash_portable.audit", "--targets", target, "--only", case]
    return [*command, "--cache", str(CACHE / ("triton" if python == PYTHON else "intel/triton"))]


def _prove(lane: str) -> list[str]:
    doctor = f"{PYTHON} -m dash_portable doctor --json >doctor.json"
    return ["bash", "-c", f"{doctor} && {PYTHON} -m ci.prove {lane} doctor.json"]


def _pytest(*arguments: str) -> list[str]:
    return [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]


KERNELS = "dash_portable/kernels"
FAULTS = (
    Fault(
        name="bf16 add before the upcast",
        lane="audit",
        path=f"{KERNELS}/store.py",
        old="low, high = low.to(tl.float32), high.to(tl.float32)",
        new="low, high = (low + low).to(tl.float32) * 0.5, high.to(tl.float32)",
        command=_audit("store_row_bf16", "sm90,gfx942"),
        says="arithmetic: arith.addf on bf16 values",
    ),
    Fault(
        name="int32 offset, seen in the code",
        lane="audit",
        path=f"{KERNELS}/primitives.py",
        old="(token % P).to(tl.int64) * stride_ct",
        new="(token % P) * stride_ct",
        command=_audit("attend_decode_bf16", "sm90,gfx942"),
        says="address: stride_ct is multiplied in 32 bits",
    ),
    Fault(
        name="int32 offset, beyond 2**31 elements",
        lane="interpreter",
        path=f"{KERNELS}/primitives.py",
        old="place = tl.load(table_ptr + token // P, mask=ok, other=0).to(tl.int64)",
        new="place = tl.load(table_ptr + token // P, mask=ok, other=0)",
        command=_pytest("tests/kernels/test_far_strides.py", "-k", "block and bfloat16"),
        says="Segmentation fault|Mismatched elements",
    ),
    Fault(
        name="tile too big for gfx942's LDS",
        lane="audit",
        path=f"{KERNELS}/launch_prefill.py",
        old="",
        new='PREFILL["gfx942"] = prefill_row("gfx942")._replace(pair_tile=128, pair_stages=3)\n',
        command=_audit("attend_pair_bf16_d128_p64", "gfx942"),
        says="shared memory: needs",
    ),
    Fault(
        name="tl.topk, which Intel's Triton lacks",
        lane="intel-simulated",
        path=f"{KERNELS}/merge.py",
        old="top = tl.max(lse, 0)",
        new="top = tl.max(tl.topk(lse, 2), 0)",
        command=_audit("merge_bf16", "pvc", XPU),
        says="topk",
    ),
    Fault(
        name="warps over the limit",
        lane="audit",
        path=f"{KERNELS}/launch.py",
        old="",
        new="STORE_ROW_WARPS = 64\n",
        command=_audit("store_row_bf16", "sm90,gfx942"),
        says="threads: 64 warps",
    ),
    Fault(
        name="vendor branch in a kernel",
        lane="cpu-py311",
        path=f"{KERNELS}/merge.py",
        old="    n = (tl.program_id(0) // HQ).to(tl.int64)\n",
        new="    IS_HIP: tl.constexpr = D == 128\n    n = (tl.program_id(0) // HQ).to(tl.int64)\n",
        command=_pytest("tests/test_kernel_text.py", "-k", "know_no_vendor"),
        says="IS_HIP",
    ),
    Fault(
        name="lane without a note",
        lane="checks",
        path="ci/vendors.json",
        old='"note": "RTX 50; no runner yet, not run by us"',
        new='"note": ""',
        command=[PYTHON, "-m", "ci.matrix", "--check"],
        says="nvidia-sm120: note: a lane that is off",
    ),
    Fault(
        name="stale generated page",
        lane="checks",
        path="dash_portable/env.py",
        old='about="never choose these"',
        new='about="never pick these"',
        command=[PYTHON, "-m", "ci.docs", "--check", "environment"],
        says="not current: environment",
    ),
    Fault(
        name="swapped torch wheel: another version",
        lane="checks",
        path="torch-1.0.0.dist-info/METADATA",
        old="",
        new="Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n",
        command=_prove("checks"),
        says="torch: the lane asks for",
    ),
    Fault(
        name="a machine without the lane's device: this one",
        lane="nvidia-sm90",
        path="README.md",
        old="",
        new="",
        command=_prove("nvidia-sm90"),
        says="vendor: the lane is for nvidia, doctor sees cpu",
        control=False,
    ),
)


def copy_to(folder: Path) -> None:
    """The project's files, ignored ones left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    # In a container the folder is another user's, which git trusts only when told to.
    trusted = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": str(ROOT),
    }
    names = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **trusted},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def ask(command: Sequence[str], folder: Path) -> tuple[bool, str]:
    """Whether the command passes in the folder, and all it said."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def plant(fault: Fault, folder: Path) -> str | None:
    """Put the fault in place; the file's former text, None when there was no such file.

    Raises LookupError when its place is not there or not the only one.
    """
    path = folder / fault.path
    before = path.read_text() if path.exists() else None
    if fault.old and (before is None or before.count(fault.old) != 1):
        count = 0 if before is None else before.count(fault.old)
        raise LookupError(f"{fault.path} holds {fault.old!r} {count} times, needed 1")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = before or ""
    path.write_text(whole.replace(fault.old, fault.new) if fault.old else whole + fault.new)
    return before


def verdict(fault: Fault, folder: Path) -> tuple[bool, str]:
    """Whether the fault was caught, and the words that say so or what is missing."""
    if fault.control:
        passes, words = ask(fault.command, folder)
        if not passes:
            return False, f"the untouched copy fails: {words.strip()[-300:]}"
    before = plant(fault, folder)
    passes, words = ask(fault.command, folder)
    path = folder / fault.path
    if before is None:
        shutil.rmtree(path.parent)
    else:
        path.write_text(before)
    if passes:
        return False, "not noticed"
    said = next((line for line in words.splitlines() if _holds(line, fault.says)), "")
    return bool(said), said.strip()[-160:] or f"failed for another reason: {words.strip()[-300:]}"


def _holds(line: str, words: str) -> bool:
    return any(word in line for word in words.split("|"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.seeded_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*")
    words = parser.parse_args(argv).words
    chosen = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    if any(fault.lane == "intel-simulated" for fault in chosen):
        subprocess.run(["bash", "ci/intel/prepare.sh"], cwd=ROOT, check=True)
    lines = ["| fault | lane | caught | seconds | its words |", "|---|---|---|---|---|"]
    caught = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_to(folder)
        for fault in chosen:
            begin = time.perf_counter()
            try:
                ok, said = verdict(fault, folder)
            except LookupError as error:
                ok, said = False, f"cannot be planted: {error}"
            caught += ok
            seconds = time.perf_counter() - begin
            text = " ".join(said.replace("|", "/").split())
            cells = [fault.name, fault.lane, "yes" if ok else "**no**", f"{seconds:.0f}", text]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    CACHE.mkdir(exist_ok=True)
    (CACHE / "seeded-faults.md").write_text("\n".join(lines) + "\n")
    print(f"faults: {caught} passed, {len(chosen) - caught} failed")
    return int(caught != len(chosen))


if __name__ == "__main__":
    sys.exit(main())
