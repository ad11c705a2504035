"""Machines written down: what detection would say on them, so that a laptop can test the choice."""

from __future__ import annotations

from dash_portable.platform.facts import Platform, Vendor
from dash_portable.request import Request

_TORCH = (("torch", "2.14.1+cu130"), ("triton", "3.8.0"))
_ROCM = (("torch", "2.14.1+rocm7.2"), ("triton-rocm", "3.8.0"))
_XPU = (("torch", "2.14.0+xpu"), ("pytorch-triton-xpu", "3.8.0"))
_NVIDIA_LIBRARIES = (
    ("flash-attn", "2.8.3.post1"),
    ("flashinfer-python", "0.7.4"),
    ("vllm", "0.33.0"),
)


def _machine(
    vendor: Vendor, arch: str, name: str, packages: tuple[tuple[str, str], ...]
) -> Platform:
    device_type = {Vendor.CPU: "cpu", Vendor.INTEL: "xpu"}.get(vendor, "cuda")
    return Platform(
        vendor=vendor,
        device_type=device_type,
        arch=arch,
        device_name=name,
        runtime={"nvidia": "CUDA 13.0", "amd": "HIP 7.2", "intel": "XPU 2026.1"}.get(vendor, ""),
        packages=packages,
    )


def _nvidia(arch: str, name: str, *libraries: tuple[str, str]) -> Platform:
    return _machine(Vendor.NVIDIA, arch, name, _TORCH + libraries)


def _amd(arch: str, name: str, *libraries: tuple[str, str]) -> Platform:
    return _machine(Vendor.AMD, arch, name, _ROCM + libraries)


def _intel(arch: str, name: str, *libraries: tuple[str, str]) -> Platform:
    return _machine(Vendor.INTEL, arch, name, _XPU + libraries)


# With the libraries that a serving image of that card usually has.
MACHINES: dict[str, Platform] = {
    "h200": _nvidia("sm90", "NVIDIA H200", ("flash-attn-3", "3.0.0"), *_NVIDIA_LIBRARIES),
    "a100": _nvidia("sm80", "NVIDIA A100", *_NVIDIA_LIBRARIES),
    "b200": _nvidia("sm100", "NVIDIA B200", ("flash-attn-4", "4.0.0b36"), *_NVIDIA_LIBRARIES),
    "rtx5090": _nvidia("sm120", "NVIDIA GeForce RTX 5090", ("flashinfer-python", "0.7.4")),
    "t4": _nvidia("sm75", "Tesla T4", ("flash-attn", "2.8.3"), ("flashinfer-python", "0.7.4")),
    "nvidia-bare": _nvidia("sm90", "NVIDIA H100"),
    "nvidia-future": _nvidia("sm130", "NVIDIA R100", ("flash-attn", "2.8.3")),
    "mi300x": _amd("gfx942", "AMD Instinct MI300X", ("amd-aiter", "0.1.20"), ("vllm", "0.33.0")),
    "mi355x": _amd("gfx950", "AMD Instinct MI355X", ("amd-aiter", "0.1.20")),
    "mi250": _amd("gfx90a", "AMD Instinct MI250", ("flash-attn", "2.8.3")),
    "mi300x-flashinfer": _amd("gfx942", "AMD Instinct MI300X", ("amd-flashinfer", "0.5.3")),
    "rx7900": _amd("gfx1100", "AMD Radeon RX 7900 XTX", ("flash-attn", "2.8.3")),
    "strix-halo": _amd("gfx1151", "Radeon 8060S", ("amd-aiter", "0.1.20")),
    "rx6900": _amd("gfx1030", "AMD Radeon RX 6900 XT", ("flash-attn", "2.8.3")),
    "amd-future": _amd("gfx1300", "AMD Radeon of 2028"),
    "b580": _intel("bmg", "Intel Arc B580", ("vllm-xpu-kernels", "0.1.16.2")),
    "pvc": _intel("pvc", "Intel Data Center GPU Max 1550", ("vllm-xpu-kernels", "0.1.16.2")),
    "a770": _intel("dg2", "Intel Arc A770", ("intel-extension-for-pytorch", "2.8.0")),
    "b580-bare": _intel("bmg", "Intel Arc B580"),
    "intel-future": _intel("xe40.0", "Intel GPU of 2028"),
    "cpu": _machine(Vendor.CPU, "x86_64", "", (("torch", "2.13.0+cpu"), ("triton", "3.7.1"))),
    "cpu-no-triton": _machine(Vendor.CPU, "aarch64", "", (("torch", "2.13.0"),)),
}


def asked(phase: str = "decode", **changes: object) -> Request:
    """A request with the model's shapes, changed where a test wants it."""
    values: dict[str, object] = {
        "phase": phase,
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "head_dim": 128,
        "group_size": 1,
        "block": 32,
        "block_size": 32,
        **changes,
    }
    return Request(**values)  # type: ignore[arg-type]
