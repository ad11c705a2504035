"""The facts of a machine as values: vendors, architectures, the platform of one process."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import Enum

from dash_portable.errors import unknown_word


class Vendor(str, Enum):
    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    CPU = "cpu"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture: the exact token, the family it belongs to, and a card that has it."""

    token: str
    vendor: Vendor
    family: str
    card: str


def _archs(vendor: Vendor, *rows: tuple[str, str, str]) -> tuple[Arch, ...]:
    return tuple(
        Arch(token=token, vendor=vendor, family=family, card=card)
        for tokens, family, card in rows
        for token in tokens.split()
    )


ARCHS = (
    *_archs(
        Vendor.NVIDIA,
        ("sm70 sm72", "Volta", "V100"),
        ("sm75", "Turing", "T4"),
        ("sm80", "Ampere", "A100"),
        ("sm86 sm87 sm88", "Ampere", "RTX 3090"),
        ("sm89", "Ada", "RTX 4090"),
        ("sm90", "Hopper", "H100"),
        ("sm100 sm103 sm110", "Blackwell", "B200"),
        ("sm120 sm121", "Blackwell", "RTX 5090"),
    ),
    *_archs(
        Vendor.AMD,
        ("gfx900 gfx906", "GCN5", "MI50"),
        ("gfx908", "CDNA1", "MI100"),
        ("gfx90a", "CDNA2", "MI250"),
        ("gfx940 gfx941 gfx942", "CDNA3", "MI300X"),
        ("gfx950", "CDNA4", "MI355X"),
        ("gfx1250", "CDNA5", "MI455X"),
        ("gfx1010 gfx1011 gfx1012", "RDNA1", "RX 5700"),
        ("gfx1030 gfx1031 gfx1032 gfx1033 gfx1034 gfx1035 gfx1036", "RDNA2", "RX 6900"),
        ("gfx1100 gfx1101 gfx1102 gfx1103", "RDNA3", "RX 7900"),
        ("gfx1150 gfx1151 gfx1152 gfx1153", "RDNA3.5", "Strix Halo"),
        ("gfx1200 gfx1201", "RDNA4", "RX 9070"),
    ),
    *_archs(
        Vendor.INTEL,
        ("pvc", "Xe-HPC", "Data Center GPU Max"),
        ("dg2", "Xe-HPG", "Arc A770"),
        ("mtl arl", "Xe-LPG", "Core Ultra 1"),
        ("bmg", "Xe2", "Arc B580"),
        ("lnl", "Xe2", "Arc 140V"),
        ("ptl wcl", "Xe3", "Core Ultra 3"),
    ),
)

KNOWN = {arch.token: arch for arch in ARCHS}

# Names under which distributions of Triton are installed; all provide the same module.
TRITONS = (
    "triton",
    "pytorch-triton",
    "pytorch-triton-rocm",
    "pytorch-triton-xpu",
    "triton-rocm",
    "triton-xpu",
    "triton-windows",
)

# What `installed` looks up: distributions, not import names, because the registry's `aiter`
# is not AMD's and `flashinfer` is the module of two vendors' packages.
DISTRIBUTIONS = (
    "torch",
    *TRITONS,
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "vllm",
    "flashinfer-python",
    "amd-flashinfer",
    "amd-aiter",
    "vllm-xpu-kernels",
    "intel-extension-for-pytorch",
)


def tokens(*families: str) -> frozenset[str]:
    """The known tokens of some families, for a backend's list of architectures.

    >>> sorted(tokens("CDNA2", "CDNA4"))
    ['gfx90a', 'gfx950']
    """
    return frozenset(arch.token for arch in ARCHS if arch.family in families)


def parse_arch(text: str) -> str:
    """A vendor's spelling as our token: `gfx942:sramecc+` gives `gfx942`, `sm_90a` gives `sm90`.

    A name of no known form comes back in lower case: an architecture may be newer than we are.
    """
    token = text.partition(":")[0].strip().lower()
    nvidia = re.fullmatch(r"sm_?(\d{2,3})[a-z]?", token)
    return f"sm{nvidia[1]}" if nvidia else token


def vendor_of(token: str) -> Vendor | None:
    """The vendor of a token, known or of a known form; None when it could be anyone's."""
    if token in KNOWN:
        return KNOWN[token].vendor
    if re.fullmatch(r"sm\d{2,3}", token):
        return Vendor.NVIDIA
    return Vendor.AMD if re.fullmatch(r"gfx[0-9a-f]{3,4}", token) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What one device of this process is.

    device_type   torch's word, "cuda" on AMD too: never branch on it
    arch          the exact token, compared whole
    device_name   for display
    packages      (distribution, version) of what is installed; "" is an unknown version
    notes         what a user may want to know: other vendors' devices, failed probes
    pretended     written down for a report; nothing can run on it
    """

    vendor: Vendor
    device_type: str
    arch: str
    device_name: str = ""
    runtime: str = ""
    packages: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    pretended: bool = False

    @property
    def family(self) -> str:
        """The architecture's family, or "unknown"."""
        known = KNOWN.get(self.arch)
        return known.family if known else "unknown"

    @property
    def known(self) -> bool:
        """Whether our table has this architecture."""
        return self.vendor is Vendor.CPU or self.arch in KNOWN

    def version(self, distribution: str) -> str | None:
        """The installed version of a distribution, or None."""
        return dict(self.packages).get(distribution)

    def to_dict(self) -> dict[str, object]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **values,
            "vendor": self.vendor.value,
            "family": self.family,
            "packages": dict(self.packages),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        parts = (self.device_name, self.runtime, "pretended" if self.pretended else "")
        described = ", ".join(part for part in parts if part)
        return f"{self.vendor} {self.arch} {described}".rstrip()


def pretended(name: str, packages: tuple[tuple[str, str], ...] = ()) -> Platform:
    """The platform of a named architecture, for reports: `sm90`, `gfx942`, `bmg`, `cpu`.

    Tokens of a known form but newer than our table are taken; another word raises ArgumentError.

    >>> str(pretended("gfx942"))
    'amd gfx942 MI300X, pretended'
    """
    token = parse_arch(name)
    vendor = Vendor.CPU if token == "cpu" else vendor_of(token)
    if vendor is None:
        raise unknown_word("platform", name, [*KNOWN, "cpu"])
    device_type = {Vendor.CPU: "cpu", Vendor.INTEL: "xpu"}.get(vendor, "cuda")
    known = KNOWN.get(token)
    return Platform(
        vendor=vendor,
        device_type=device_type,
        arch=token,
        device_name=known.card if known else "",
        packages=packages,
        pretended=True,
    )
