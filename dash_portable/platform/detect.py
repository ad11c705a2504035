"""The only questions to devices: one probe per vendor, asked when needed and remembered."""

from __future__ import annotations

import importlib.metadata
import platform as python_platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from dash_portable import env
from dash_portable.errors import found_needed
from dash_portable.platform.facts import (
    DISTRIBUTIONS,
    KNOWN,
    Platform,
    Vendor,
    parse_arch,
    unknown_arch,
)
from dash_portable.platform.quiet import Seen, intel_arch, look, uniform_arch

# torch's word for a vendor's devices. AMD answers to "cuda" too: only the build tells them apart.
_DEVICE_TYPES = {Vendor.NVIDIA: "cuda", Vendor.AMD: "cuda", Vendor.INTEL: "xpu"}

_HIDERS = {
    Vendor.NVIDIA: ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    Vendor.AMD: ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    Vendor.INTEL: ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "SYCL_DEVICE_FILTER"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one vendor's probe saw: how many devices torch can use, and why when it is none."""

    vendor: Vendor
    count: int = 0
    text: str = ""


_BUILDS = {Vendor.NVIDIA: "cuda", Vendor.AMD: "hip", Vendor.INTEL: "xpu"}


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _counted(torch: Any, vendor: Vendor) -> Finding:
    """Ask torch's build, then its device count, which starts no runtime if it can help it."""
    build = _BUILDS[vendor]
    version = getattr(torch.version, build, None)
    if version is None and vendor is not Vendor.INTEL:
        return Finding(vendor=vendor, text=f"torch {torch.__version__} is built without {build}")
    try:
        count = int(getattr(torch, _DEVICE_TYPES[vendor]).device_count())
    except Exception as error:  # a probe of somebody else's: whatever it raises is its answer
        return Finding(vendor=vendor, text=_why(error))
    if count:
        return Finding(vendor=vendor, count=count)
    missing = f"torch {torch.__version__} is built without {build}"
    text = f"torch {torch.__version__} sees no device" if version is not None else missing
    return Finding(vendor=vendor, text=text)


def _arch_of(vendor: Vendor, properties: Any) -> str:
    if vendor is Vendor.NVIDIA:
        return f"sm{properties.major}{properties.minor}"
    if vendor is Vendor.AMD:
        return parse_arch(properties.gcnArchName)
    return intel_arch(int(properties.architecture))


def _described(torch: Any, vendor: Vendor, index: int, seen: tuple[Seen, ...]) -> tuple[str, str]:
    """(arch, name) of a device. The runtime is only started when nothing quieter can tell."""
    room = getattr(torch, _DEVICE_TYPES[vendor])
    if not room.is_initialized():
        arch = uniform_arch(seen, vendor)
        if arch:
            names = {gpu.name for gpu in seen if gpu.vendor is vendor}
            return arch, names.pop() if len(names) == 1 else ""
    properties = room.get_device_properties(index)
    return _arch_of(vendor, properties), str(properties.name)


def _usable(torch: Any, findings: tuple[Finding, ...]) -> list[Vendor]:
    """Vendors with devices, that of torch's current accelerator first."""
    usable = [finding.vendor for finding in findings if finding.count]
    if len(usable) < 2:
        return usable
    try:
        current = torch.accelerator.current_accelerator().type
    except Exception:  # older or broken builds do not say: our order stands, notes name the rest
        return usable
    return sorted(usable, key=lambda vendor: _DEVICE_TYPES[vendor] != current)


def _asked_for(device: tuple[str, int], findings: tuple[Finding, ...]) -> list[Vendor]:
    """The vendor behind a device, none for a CPU; ArgumentError when torch has no such device."""
    kind, index = device
    have = [found for found in findings if found.count]
    behind = [one.vendor for one in have if _DEVICE_TYPES[one.vendor] == kind and index < one.count]
    if kind != "cpu" and not behind:
        counts = " ".join(["cpu", *(f"{_DEVICE_TYPES[one.vendor]} ({one.count})" for one in have)])
        raise found_needed("device", f"{kind}:{index}", f"one that torch has: {counts}")
    return behind


def _notes(
    vendor: Vendor, findings: tuple[Finding, ...], seen: tuple[Seen, ...], hidden: Mapping[str, str]
) -> tuple[str, ...]:
    notes = list[str]()
    for finding in findings:
        other = finding.vendor
        here = [gpu for gpu in seen if gpu.vendor is other]
        if other is vendor or not (here or finding.count):
            continue
        names = ", ".join(dict.fromkeys(gpu.name or gpu.arch for gpu in here))
        reason = finding.text or "another accelerator is torch's current one"
        notes.append(f"{other} is here too ({names or finding.count}), not used: {reason}")
    for finding in findings:
        hiders = [f"{name}={hidden[name]}" for name in _HIDERS[finding.vendor] if name in hidden]
        if hiders and not finding.count and "built without" not in finding.text:
            notes.append(f"{finding.vendor} devices may be hidden by {' '.join(hiders)}")
    if {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} <= set(hidden):
        notes.append(
            "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are both set: one filters the other"
        )
    return tuple(notes)


def probe(torch: Any) -> tuple[Finding, ...]:
    """One finding per vendor; a probe that fails is a finding, never an exception."""
    return tuple(_counted(torch, vendor) for vendor in _DEVICE_TYPES)


def platform_of(
    torch: Any,
    device: tuple[str, int] | None = None,
    *,
    seen: tuple[Seen, ...] = (),
    packages: tuple[tuple[str, str], ...] = (),
    hidden: Mapping[str, str] | None = None,
) -> Platform:
    """The platform of a device (torch's word, index), or of torch's current accelerator.

    Everything it asks comes in as an argument: a torch module, the GPUs seen quietly, installed
    packages, and the set visible-device variables. Raises ArgumentError for a device that torch
    does not have.
    """
    findings = probe(torch)
    candidates = _usable(torch, findings) if device is None else _asked_for(device, findings)
    vendor, failed = Vendor.CPU, list[str]()
    arch, name, runtime = python_platform.machine().lower(), "", ""
    for candidate in candidates:
        try:
            arch, name = _described(torch, candidate, device[1] if device else 0, seen)
        except Exception as error:  # a device that is counted and does not answer is none
            if device is not None:
                needed = f"one that answers ({_why(error)})"
                raise found_needed("device", f"{device[0]}:{device[1]}", needed) from error
            failed.append(f"{candidate} not available: {_why(error)}")
            continue
        vendor, version = candidate, getattr(torch.version, _BUILDS[candidate], None)
        runtime = f"{_BUILDS[vendor].upper()} {version or ''}".rstrip()
        break
    known = vendor is Vendor.CPU or arch in KNOWN
    return Platform(
        vendor=vendor,
        device_type=_DEVICE_TYPES.get(vendor, "cpu"),
        arch=arch,
        device_name=name,
        runtime=runtime,
        packages=packages,
        notes=(
            *failed,
            *_notes(vendor, findings, seen, hidden or {}),
            *(() if known else (unknown_arch(vendor, arch),)),
        ),
    )


def _without_torch(error: str, packages: tuple[tuple[str, str], ...]) -> Platform:
    return Platform(
        vendor=Vendor.CPU,
        device_type="cpu",
        arch=python_platform.machine().lower(),
        packages=packages,
        notes=(f"torch cannot be imported: {error}",),
    )


@lru_cache(maxsize=8)
def _installed(names: tuple[str, ...], path: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = list[tuple[str, str]]()
    for name in names:
        for distribution in importlib.metadata.distributions(name=name, path=list(path)):
            found.append((name, distribution.version))
            break
    return tuple(found)


def installed(names: tuple[str, ...] = DISTRIBUTIONS) -> tuple[tuple[str, str], ...]:
    """(distribution, version) of those that are installed, from their metadata; imports nothing."""
    return _installed(names, tuple(sys.path))


@lru_cache(maxsize=1)
def _seen() -> tuple[Seen, ...]:
    return look()


@lru_cache(maxsize=64)
def _platform(
    device: tuple[str, int] | None,
    packages: tuple[tuple[str, str], ...],
    hidden: tuple[tuple[str, str], ...],
) -> Platform:
    try:
        import torch
    except Exception as error:  # a broken build can raise anything, and is reported, not hidden
        return _without_torch(_why(error), packages)
    return platform_of(torch, device, seen=_seen(), packages=packages, hidden=dict(hidden))


def _named(device: Any) -> tuple[str, int] | None:
    """A torch.device, "cuda:1" or "cpu" as (type, index); None stays None."""
    if device is None:
        return None
    kind, _, number = str(device).partition(":")
    if number and not number.isdigit():
        raise found_needed("device", repr(str(device)), "a torch device")
    return kind, int(number or 0)


def current_platform(device: Any = None) -> Platform:
    """The platform of a device, or of torch's current accelerator; a CPU where there is none.

    device   a torch.device, its text, or None

    A device without an index is the current one once the GPU runtime runs, else the first.
    Remembered per device. Raises ArgumentError for a device that torch does not have.
    """
    named = _named(device)
    torch = sys.modules.get("torch")
    if torch is not None and (named is None or (named[0] != "cpu" and ":" not in str(device))):
        named = _current(torch, named)
    return _platform(named, installed(), tuple(env.visible_devices().items()))


def _current(torch: Any, named: tuple[str, int] | None) -> tuple[str, int] | None:
    """The device that torch would use now, if its runtime runs already; else what was named."""
    for kind in ("cuda", "xpu"):
        room = getattr(torch, kind, None)
        if room is not None and room.is_initialized() and (named is None or named[0] == kind):
            return kind, int(room.current_device())
    return named


def is_capturing() -> bool:
    """Whether a CUDA or HIP graph is being captured on the current stream."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def report(device: Any = None) -> dict[str, object]:
    """The machine's facts for `doctor`, ready for JSON: platform, probes, GPUs seen, variables."""
    current = current_platform(device)
    torch = sys.modules.get("torch")
    return {
        "python": python_platform.python_version(),
        "system": f"{python_platform.system()} {python_platform.machine()}",
        "platform": current.to_dict(),
        "probes": [asdict(finding) for finding in probe(torch)] if torch else [],
        "seen": [asdict(gpu) for gpu in _seen()],
        "visible_devices": env.visible_devices(),
        "ignored_variables": env.foreign(),
    }
