"""Run the SPIR-V of a kernel on the CPU through Intel's OpenCL runtime: real barriers, sub-groups,
local memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl

WIDTHS = {"i32": np.int32, "i64": np.int64, "fp32": np.float32, "u64": np.uint64, "i1": np.int8}


class Module(NamedTuple):
    """A kernel ready to run, and the facts that a launch needs."""

    entry: Any
    args: dict[str, str]
    consts: dict[str, Any]
    shared: int
    lanes: int

    @property
    def dtype(self) -> str:
        """Of the cache, or of what is written where the kernel sees no cache."""
        return (self.args.get("cache_ptr") or self.args["out_ptr"]).removeprefix("*")


def modules_of(kernel: str, constant: str) -> list[Path]:
    """Every compiled launch row of the kernel with that constant: paths without their ending."""
    found = []
    for path in sorted(Path(os.environ["DASH_INTEL_MODULES"]).glob("*.json")):
        facts = json.loads(path.read_text())
        if facts["kernel"] == kernel and constant in facts["consts"]:
            found.append(path.with_suffix(""))
    return found


class Cpu:
    """The CPU as an OpenCL device; `binaries` keeps what the runtime built."""

    def __init__(self, binaries: Path) -> None:
        platform = next(p for p in cl.get_platforms() if "Intel" in p.name)
        self.device = platform.get_devices()[0]
        self.context = cl.Context([self.device])
        self.queue = cl.CommandQueue(self.context)
        self.binaries = binaries
        self.executed: set[str] = set()  # names of cases

    def load(self, stem: Path) -> Module:
        """Build the module, or load what an earlier run built of the same bytes.

        Never build with -cl-opt-disable: wrong numbers, or the process ends without a word.
        """
        facts = json.loads(stem.with_name(f"{stem.name}.json").read_text())
        source = stem.with_name(f"{stem.name}.spv").read_bytes()
        name = hashlib.sha256(source + self.device.driver_version.encode()).hexdigest()
        kept = self.binaries / f"{name}.bin"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the runtime chats on every build
            if kept.exists():
                program = cl.Program(self.context, [self.device], [kept.read_bytes()]).build()
            else:
                program = cl.Program(self.context, source).build()
                self.binaries.mkdir(parents=True, exist_ok=True)
                kept.write_bytes(program.get_info(cl.program_info.BINARIES)[0])
            entry = cl.Kernel(program, facts["kernel"])
        lanes = facts["warps"] * facts["threads"]
        self.executed.add(stem.name.partition(".")[0])
        return Module(entry, facts["args"], facts["consts"], facts["shared"], lanes)

    def launch(self, module: Module, grid: Sequence[int], **arguments: Any) -> None:
        """Run the kernel; arrays are read and written in place, scalars get the declared width.

        A pointer may be None: the kernel then gets a null pointer. Every run-time argument must be
        given, no other.
        """
        if set(arguments) != set(module.args):
            raise TypeError(f"found {sorted(arguments)}, needed {sorted(module.args)}")
        buffers = []
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        for place, (name, kind) in enumerate(module.args.items()):
            value = arguments[name]
            if isinstance(value, np.ndarray):
                buffer = cl.Buffer(self.context, flags, hostbuf=_whole(value))
                buffers.append(buffer)
                value = buffer
            elif value is not None:
                value = WIDTHS[kind.removesuffix(":16")](value)
            module.entry.set_arg(place, value)
        if module.shared:  # always the last argument
            module.entry.set_arg(len(module.args), cl.LocalMemory(module.shared))
        x, y, z = (*grid, 1, 1)[:3]
        size = (x * module.lanes, y, z)
        cl.enqueue_nd_range_kernel(self.queue, module.entry, size, (module.lanes, 1, 1)).wait()
        for buffer in buffers:  # USE_HOST_PTR: a map makes the host see what the kernel wrote
            read_write = cl.map_flags.READ | cl.map_flags.WRITE
            view, _ = cl.enqueue_map_buffer(
                self.queue, buffer, read_write, 0, (buffer.size,), np.uint8, is_blocking=True
            )
            view.base.release(self.queue)
        self.queue.finish()


def _whole(array: np.ndarray) -> np.ndarray:
    """The memory that a strided view lies in: a buffer is one piece."""
    if array.flags.c_contiguous:
        return array
    base = array.base
    while isinstance(base, np.ndarray) and not base.flags.c_contiguous:
        base = base.base
    return np.asarray(base)


def sparse(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Zeros of which only the touched pages take memory: for tensors of more than 2**31
    elements.
    """
    count = int(np.prod(shape))
    region = mmap.mmap(-1, count * np.dtype(dtype).itemsize)
    return np.frombuffer(region, dtype, count).reshape(shape)


def narrow(values: Any, dtype: str) -> np.ndarray:
    """Numbers as the array that holds them in a kernel's memory: bfloat16 as its bits in uint16."""
    if dtype != "bf16":
        return np.ascontiguousarray(values, {"fp16": np.float16, "fp32": np.float32}[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers of such an array, as float64."""
    if dtype != "bf16":
        return array.astype(np.float64)
    return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
