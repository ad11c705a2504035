"""What a machine tells about its GPUs without starting a GPU runtime.

Starting one makes forked children unusable, so these sources are asked first: NVIDIA's management
library through ctypes, and what Linux's kernel drivers show as files. None of them is needed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dash_portable.platform.facts import Vendor


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One GPU of the machine, whether or not torch can use it; arch "" where it cannot be told."""

    vendor: Vendor
    arch: str = ""
    name: str = ""


_PCI_VENDORS = {"0x10de": Vendor.NVIDIA, "0x1002": Vendor.AMD, "0x8086": Vendor.INTEL}

# First two hex digits of Intel's PCI device ids, per architecture.
_INTEL_IDS = {"56": "dg2", "4f": "dg2", "0b": "pvc", "e2": "bmg", "64": "lnl", "b0": "ptl"}

# Intel's hardware version (major, minor), packed as major << 22 | minor << 14 | revision.
_INTEL_VERSIONS = {
    (12, 55): "dg2",
    (12, 56): "dg2",
    (12, 57): "dg2",
    (12, 60): "pvc",
    (12, 61): "pvc",
    (12, 70): "mtl",
    (12, 71): "mtl",
    (12, 74): "arl",
    (20, 1): "bmg",
    (20, 2): "bmg",
    (20, 4): "lnl",
    (30, 0): "ptl",
    (30, 1): "ptl",
    (30, 3): "wcl",
}


def intel_arch(version: int) -> str:
    """The token of Intel's packed hardware version; `xe20.3` for one newer than our table."""
    major, minor = version >> 22, version >> 14 & 0xFF
    return _INTEL_VERSIONS.get((major, minor), f"xe{major}.{minor}")


def _nvml(load: Callable[[str], ctypes.CDLL]) -> Iterator[Seen]:
    library = load("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    if library.nvmlInit_v2() != 0:
        return
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            major, minor = ctypes.c_int(), ctypes.c_int()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
                continue
            library.nvmlDeviceGetName(device, name, 96)
            failed = library.nvmlDeviceGetCudaComputeCapability(
                device, ctypes.byref(major), ctypes.byref(minor)
            )
            arch = "" if failed else f"sm{major.value}{minor.value}"
            yield Seen(vendor=Vendor.NVIDIA, arch=arch, name=name.value.decode(errors="replace"))
    finally:
        library.nvmlShutdown()


def _kfd(nodes: Path) -> Iterator[Seen]:
    for node in sorted(nodes.glob("*/properties")):
        lines = (line.split() for line in node.read_text().splitlines())
        properties = {line[0]: line[1] for line in lines if len(line) == 2}
        version = int(properties.get("gfx_target_version", 0))
        if version:
            major, minor, step = version // 10000, version // 100 % 100, version % 100
            yield Seen(vendor=Vendor.AMD, arch=f"gfx{major}{minor:x}{step:x}")


def _pci(devices: Path) -> Iterator[Seen]:
    for device in sorted(devices.glob("*/class")):
        vendor = _PCI_VENDORS.get((device.parent / "vendor").read_text().strip())
        if vendor and device.read_text().startswith("0x03"):
            number = (device.parent / "device").read_text().strip().removeprefix("0x")
            arch = _INTEL_IDS.get(number[:2], "") if vendor is Vendor.INTEL else ""
            yield Seen(vendor=vendor, arch=arch, name=f"PCI device {number}")


def look(
    load: Callable[[str], ctypes.CDLL] = ctypes.CDLL, sysfs: Path = Path("/sys")
) -> tuple[Seen, ...]:
    """Every GPU that can be seen this way; a source that is missing or fails adds nothing."""
    found = list[Seen]()
    sources = (
        _nvml(load),
        _kfd(sysfs / "class/kfd/kfd/topology/nodes"),
        _pci(sysfs / "bus/pci/devices"),
    )
    for source in sources:
        try:
            more = list(source)
        except (OSError, AttributeError, ValueError):
            continue
        told = {seen.vendor for seen in found}
        found += [seen for seen in more if seen.vendor not in told]
    return tuple(found)


def uniform_arch(seen: tuple[Seen, ...], vendor: Vendor) -> str:
    """The one architecture that all of a vendor's GPUs have; "" when they differ or hide it."""
    archs = {gpu.arch for gpu in seen if gpu.vendor is vendor}
    return archs.pop() if len(archs) == 1 else ""
