"""What a compiled kernel needs of the card: registers, spills, scratch, shared memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from .targets import MAX_THREADS, Target

CLAIMED_TRITON = "3.7"  # whose allocation of registers the launch rows were chosen by


class Usage(NamedTuple):
    """shared, scratch, binary in bytes; regs of one thread; spill in the compiler's unit: NVIDIA
    bytes, AMD registers.

    Intel's compiler says neither registers nor spills here (0): its offline compiler does, in the
    Intel lane.
    """

    shared: int
    regs: int = 0
    spill: int = 0
    scratch: int = 0
    binary: int = 0


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _nvidia(kernel: Any, arch: Any, kept: Path | None) -> dict[str, int]:
    """What ptxas says of the PTX; asked once where `kept` is a folder, for it takes as long as the
    compile.
    """
    ptx = kernel.asm["ptx"]
    if kept is None:
        return _ask_ptxas(ptx, arch)
    from triton import __version__  # each brings a ptxas of its own

    note = kept / f"{sha256(f'{__version__} {arch} {ptx}'.encode()).hexdigest()}.json"
    if not note.exists():
        note.parent.mkdir(parents=True, exist_ok=True)
        written = note.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(_ask_ptxas(ptx, arch)))
        written.replace(note)
    found: dict[str, int] = json.loads(note.read_text())
    return found


def _ask_ptxas(ptx: str, arch: Any) -> dict[str, int]:
    # The compiler picks ptxas or ptxas-blackwell by arch; its own function picks the same one here.
    from triton.backends.nvidia.compiler import get_ptxas

    # Triton 3.4 has one ptxas for all archs.
    tool = get_ptxas(arch) if signature(get_ptxas).parameters else get_ptxas()

    named = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if named is None:
        raise RuntimeError(f"no .target line in the PTX: {ptx[:200]}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        done = subprocess.run(
            [
                tool.path,
                "-v",
                f"--gpu-name={named.group(1)}",
                str(source),
                "-o",
                f"{folder}/kernel.o",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    text = done.stderr + done.stdout
    if "Used" not in text:
        raise RuntimeError(f"ptxas -v told nothing about {named.group(1)}: {text[:200]}")
    return {
        "regs": _number(r"Used (\d+) registers", text),
        "spill": _number(r"(\d+) bytes spill stores", text),
        "scratch": _number(r"(\d+) bytes stack frame", text),
    }


def _amd(kernel: Any) -> dict[str, int]:
    text = kernel.asm["amdgcn"]
    fields = {
        "regs": "vgpr_count",
        "spill": "vgpr_spill_count",
        "scratch": "private_segment_fixed_size",
    }
    found = {key: _number(rf"\.{field}:\s+(\d+)", text) for key, field in fields.items()}
    return found | {"binary": len(kernel.asm["hsaco"])}


def usage_of(kernel: Any, target: Target, kept: Path | None = None) -> Usage:
    """Read what `triton.compile` returned; `kept` is a folder for answers of the vendor's tool.
    Raises RuntimeError when the vendor's tool says nothing.
    """
    # Shared memory always from the metadata: AMD asks for LDS at launch, so the code object's own
    # figure is 0.
    shared = int(kernel.metadata.shared)
    if target.vendor == "nvidia":
        binary = len(kernel.asm["cubin"])
        return Usage(shared, **_nvidia(kernel, target.arch, kept), binary=binary)
    if target.vendor == "amd":
        return Usage(shared, **_amd(kernel))
    return Usage(shared, binary=len(kernel.asm["spv"]))


def too_many_threads(warps: int, target: Target) -> str | None:
    """Said before compiling: compilers build such a kernel for some targets, and no card launches
    it.
    """
    threads = warps * target.threads
    if threads <= MAX_THREADS:
        return None
    asked = f"{warps} warps of {target.threads} are {threads}"
    return f"threads: {asked}, a program has at most {MAX_THREADS}"


def not_claimed() -> str:
    """Why a spill is accepted under this Triton; empty under the one whose spills are claimed.

    Every release allocates registers anew: launch rows are chosen by one of them, and others must
    compile and keep the limits.
    """
    import triton

    version = ".".join(triton.__version__.split(".")[:2])
    return "" if version == CLAIMED_TRITON else f"claimed for Triton {CLAIMED_TRITON} only"


def excess(usage: Usage, target: Target, may_spill: bool) -> tuple[str, ...]:
    """What passes the card's limits, as texts; empty when the kernel can be launched and spills
    only where it may.
    """
    found = []
    if usage.shared > target.shared:
        found.append(f"shared memory: needs {usage.shared} bytes, the card has {target.shared}")
    if target.regs and usage.regs > target.regs:
        found.append(f"registers: needs {usage.regs}, the card has {target.regs}")
    if usage.spill and not may_spill:
        unit = "bytes" if target.vendor == "nvidia" else "registers"
        found.append(f"spill: {usage.spill} {unit}, none is claimed")
    return tuple(found)
