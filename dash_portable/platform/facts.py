"""The facts of a machine as values: vendors, architectures, the platform of one process."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import Enum

from dash_portable.errors import found_needed, nearest


class Vendor(str, Enum):
    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    CPU = "cpu"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture: the exact token, the family it belongs to, and cards that have it."""

    token: str
    vendor: Vendor
    family: str
    cards: tuple[str, ...]


def _archs(vendor: Vendor, *rows: tuple[str, str, str]) -> tuple[Arch, ...]:
    return tuple(
        Arch(token=token, vendor=vendor, family=family, cards=tuple(cards.split(", ")))
        for tokens, family, cards in rows
        for token in tokens.split()
    )


# A card stands in one row; of a row with several tokens it means the first.
ARCHS = (
    *_archs(
        Vendor.NVIDIA,
        ("sm70 sm72", "Volta", "V100, Titan V"),
        ("sm75", "Turing", "T4, RTX 2080, RTX 2080 Ti"),
        ("sm80", "Ampere", "A100, A30, A800"),
        ("sm86", "Ampere", "RTX 3090, RTX 3080, RTX 3060, A10, A40, RTX A6000"),
        ("sm87 sm88", "Ampere", "Jetson Orin"),
        ("sm89", "Ada", "RTX 4090, RTX 4080, RTX 4070, RTX 4060, L4, L40, L40S, RTX 6000 Ada"),
        ("sm90", "Hopper", "H100, H200, H20, H800, GH200"),
        ("sm100", "Blackwell", "B200, B100, GB200"),
        ("sm103", "Blackwell", "B300, GB300"),
        ("sm110", "Blackwell", "Jetson Thor"),
        ("sm120", "Blackwell", "RTX 5090, RTX 5080, RTX 5070, RTX 5060, RTX PRO 6000"),
        ("sm121", "Blackwell", "DGX Spark, GB10"),
    ),
    *_archs(
        Vendor.AMD,
        ("gfx906 gfx900", "GCN5", "MI50, MI60, Radeon VII"),
        ("gfx908", "CDNA1", "MI100"),
        ("gfx90a", "CDNA2", "MI250, MI250X, MI210"),
        ("gfx942 gfx940 gfx941", "CDNA3", "MI300X, MI300A, MI325X, MI308X"),
        ("gfx950", "CDNA4", "MI355X, MI350X"),
        ("gfx1250", "CDNA5", "MI455X"),
        ("gfx1010 gfx1011 gfx1012", "RDNA1", "RX 5700, RX 5700 XT"),
        (
            "gfx1030 gfx1031 gfx1032 gfx1033 gfx1034 gfx1035 gfx1036",
            "RDNA2",
            "RX 6900, RX 6900 XT, RX 6800, RX 6800 XT",
        ),
        ("gfx1100", "RDNA3", "RX 7900, RX 7900 XT, RX 7900 XTX, RX 7900 GRE, PRO W7900"),
        ("gfx1101", "RDNA3", "RX 7800, RX 7800 XT, RX 7700, RX 7700 XT"),
        ("gfx1102 gfx1103", "RDNA3", "RX 7600, RX 7600 XT"),
        ("gfx1150", "RDNA3.5", "Strix Point, Radeon 890M"),
        ("gfx1151", "RDNA3.5", "Strix Halo, Radeon 8060S, Ryzen AI Max+ 395"),
        ("gfx1152 gfx1153", "RDNA3.5", "Krackan Point"),
        ("gfx1200", "RDNA4", "RX 9060, RX 9060 XT"),
        ("gfx1201", "RDNA4", "RX 9070, RX 9070 XT, Radeon AI PRO R9700"),
    ),
    *_archs(
        Vendor.INTEL,
        (
            "pvc",
            "Xe-HPC",
            "Data Center GPU Max, Data Center GPU Max 1100, Data Center GPU Max 1550",
        ),
        ("dg2", "Xe-HPG", "Arc A770, Arc A750, Arc A580, Arc A380"),
        ("mtl arl", "Xe-LPG", "Core Ultra 1, Meteor Lake"),
        ("bmg", "Xe2", "Arc B580, Arc B570, Arc Pro B60, Arc Pro B50, Battlemage"),
        ("lnl", "Xe2", "Arc 140V, Lunar Lake"),
        ("ptl wcl", "Xe3", "Core Ultra 3, Panther Lake"),
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

# Releases of Triton: the oldest that is taken (only Intel's own build is that old), and the oldest
# and newest that CI runs. A newer one is taken too.
TRITON_FLOOR = "3.3"
TRITON_RUN = ("3.4", "3.9")

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
    """The vendor of a token, known or such as it may give to a newer card; else None."""
    if token in KNOWN:
        return KNOWN[token].vendor
    if re.fullmatch(r"sm([7-9]\d|1\d\d|2\d\d)", token):
        return Vendor.NVIDIA
    return Vendor.AMD if re.fullmatch(r"gfx(9[0-9a-f]{2}|1[0-9][0-9a-f]{2})", token) else None


_MAKERS = "nvidia|amd|intel|tesla|geforce|quadro|rtx|instinct|radeon|rx|arc|data center gpu"


def _card_key(name: str) -> str:
    """A card's name without its maker's words: `NVIDIA GeForce RTX 4090` and `4090` are one."""
    return re.sub(rf"\b({_MAKERS})\b|[^a-z0-9+]", "", name.lower())


def arch_of_card(name: str) -> tuple[str, str] | None:
    """The architecture and the name in our table of a card such as `H200` or `Arc B580`."""
    for arch in ARCHS:
        for card in arch.cards:
            if _card_key(card) == _card_key(name):
                return arch.token, card
    return None


def unknown_arch(vendor: Vendor, token: str) -> str:
    """What is said of an architecture that our table does not have."""
    known = [arch.token for arch in ARCHS if arch.vendor is vendor]
    near = nearest(token, known, likeness=0.6)
    hint = f" (nearest known: {near})" if near else ""
    return f"unknown arch {token}{hint}: treated as a new {vendor} card, settings are conservative"


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
    """The platform of a named architecture or card, for reports: `sm90`, `gfx942`, `B580`, `cpu`.

    Tokens that a vendor may give to a newer card are taken, with a note; another word raises
    ArgumentError with the nearest known one.

    >>> str(pretended("gfx942")), str(pretended("Arc B580"))
    ('amd gfx942 MI300X, pretended', 'intel bmg Arc B580, pretended')
    """
    token = parse_arch(name)
    vendor = Vendor.CPU if token == "cpu" else vendor_of(token)
    known = KNOWN.get(token)
    card = known.cards[0] if known else ""
    if vendor is None:
        found = arch_of_card(name)
        if found is None:
            near = nearest(name, [*KNOWN, "cpu", *(card for arch in ARCHS for card in arch.cards)])
            hint = f" (nearest: {near})" if near else ""
            needed = f"an arch or a card that we know{hint}, such as sm90, gfx942, B580 or cpu"
            raise found_needed("platform", repr(name), needed)
        token, card = found
        vendor = KNOWN[token].vendor
    device_type = {Vendor.CPU: "cpu", Vendor.INTEL: "xpu"}.get(vendor, "cuda")
    familiar = vendor is Vendor.CPU or token in KNOWN
    return Platform(
        vendor=vendor,
        device_type=device_type,
        arch=token,
        device_name=card,
        packages=packages,
        notes=() if familiar else (unknown_arch(vendor, token),),
        pretended=True,
    )
