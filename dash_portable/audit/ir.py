"""What can be read off a compiled kernel without running it: text of Triton's IR, assembler,
disassembly.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .targets import Target

# An assignment of Triton's IR: result, operation, operands, type text.
_LINE = re.compile(r"^\s*(%[\w#:]+(?:, %[\w#:]+)*) = \"?([\w.]+)\"?\s*(.*)$")
_ARGUMENT = re.compile(r"(%\w+): ([\w!<>.*]+)")
_SHAPE_ONLY = ("tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans")
_ARITHMETIC = re.compile(
    r"(arith\.(addf|subf|mulf|divf|remf|negf|cmpf|maximumf|minimumf|maxnumf|minnumf)|math\.\w+)$"
)
_NARROW = re.compile(r"(?:^|x|\s)(bf16|f16|f8\w+)>?$")

_MATRIX_NVIDIA = re.compile(r"\b([HIQ]MMA|[HIQ]GMMA|UTC[A-Z]*MMA)\b")
_MATRIX_AMD = re.compile(r"\bv_(?:mfma|smfmac|s?wmma)_\w+")
_MATRIX_INTEL = re.compile(r"call [^\n]*matrix_mad")


def _operations(ttir: str) -> Iterator[tuple[str, str, str, str]]:
    """(result, operation, operands, type text) of every assignment."""
    for line in ttir.splitlines():
        body = re.sub(r"\s*loc\((?:#\w+|.*)\)\s*$", "", line)
        found = _LINE.match(body)
        if found:
            operands, _, types = found.group(3).rpartition(" : ")
            yield found.group(1), found.group(2), operands, types.strip()


def narrow_arithmetic(ttir: str) -> tuple[str, ...]:
    """Arithmetic done in float16, bfloat16 or float8: kernels widen right after the load.

    Triton's interpreter computes bfloat16 on raw bits (wrong numbers, no error), and compiled code
    loses precision.
    """
    found = set()
    for _, name, operands, types in _operations(ttir):
        if _ARITHMETIC.match(name) and (kind := _NARROW.search(types.split(" -> ")[-1])):
            if name == "arith.cmpf" and "%cst" in operands:
                continue  # of a widened number: Triton 3.9 compares with a narrowed constant
            found.add(
                f"arithmetic: {name} on {kind.group(1)} values, widen them to f32 after the load"
            )
    return tuple(sorted(found))


def narrow_addresses(ttir: str, names: Sequence[str]) -> tuple[str, ...]:
    """A stride multiplied in 32 bits: silently wrong as soon as the tensor passes 2**31 elements.

    names   the kernel's run-time arguments in order: not every version of Triton keeps them in the
            text
    """
    head = next((line for line in ttir.splitlines() if "tt.func public" in line), "")
    arguments = zip(names, _ARGUMENT.findall(head), strict=True)
    origin = {
        value: name
        for name, (value, kind) in arguments
        if kind == "i32" and name.startswith("stride")
    }
    found = set()
    for result, name, operands, types in _operations(ttir):
        used = re.findall(r"%\w+", operands)
        if name in _SHAPE_ONLY and used and used[0] in origin:
            origin[result] = origin[used[0]]
            continue
        if name == "arith.muli" and re.search(r"i32>?$", types):
            found |= {f"address: {origin[u]} is multiplied in 32 bits" for u in used if u in origin}
        origin.pop(result, None)  # regions beside each other use the same names
    return tuple(sorted(found))


def matrix_instructions(kernel: Any, target: Target) -> list[str]:
    """The names of the matrix instructions that the compiled kernel holds, each as often.

    NVIDIA: in the disassembled binary (the Triton wheel brings nvdisasm). AMD: in the disassembled
    binary where an llvm-objdump knows the arch, else in the assembler text. Intel: calls in the
    LLVM IR that becomes SPIR-V.
    """
    if target.vendor == "nvidia":
        return _MATRIX_NVIDIA.findall(disassemble_cubin(kernel.asm["cubin"]))
    if target.vendor == "amd":
        text = disassemble_hsaco(kernel.asm["hsaco"], str(target.arch)) or kernel.asm["amdgcn"]
        return _MATRIX_AMD.findall(text)
    return _MATRIX_INTEL.findall(kernel.asm["llir"])


def disassemble_cubin(cubin: bytes) -> str:
    """Raises RuntimeError when nvdisasm refuses the binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return _decoded([str(tool), "-c"], cubin)


def disassemble_hsaco(hsaco: bytes, arch: str) -> str | None:
    """None where no llvm-objdump is installed that knows the arch (19 for gfx90a and gfx942, 22 for
    all of ours).
    """
    needed = 19 if arch in ("gfx90a", "gfx942") else 22
    tool = next(
        (t for v in range(30, needed - 1, -1) if (t := shutil.which(f"llvm-objdump-{v}"))), None
    )
    if tool is None:
        return None
    extra = ["--mattr=+real-true16"] if arch.startswith("gfx12") else []
    return _decoded([tool, "-d", f"--mcpu={arch}", *extra], hsaco)


def _decoded(command: list[str], binary: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {done.stderr.strip()[:300]}")
    return done.stdout
