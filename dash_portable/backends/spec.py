"""What a backend offers, and the one comparison of offer with ask. Values and pure functions."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from dash_portable.platform.facts import Platform, Vendor
from dash_portable.request import FEATURES, PHASES, Request

if TYPE_CHECKING:
    from torch import Tensor

    from dash_portable.step import Step


class Code(str, Enum):
    """Why a backend does not serve."""

    DISABLED = "disabled"
    VENDOR = "vendor"
    ARCH = "arch"
    MISSING = "missing"
    VERSION = "version"
    IMPORT = "import"
    SELF_TEST = "self_test"
    PLAN = "plan"
    PHASE = "phase"
    DTYPE = "dtype"
    HEAD_DIM = "head_dim"
    BLOCK_SIZE = "block_size"
    FEATURE = "feature"
    COMBINATION = "combination"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One thing asked and not offered, in data; the text is made at the edge."""

    code: Code
    asked: str
    offers: str
    hint: str = ""

    def to_dict(self) -> dict[str, str]:
        reason = {"code": self.code.value, "asked": self.asked, "offers": self.offers}
        return {**reason, "hint": self.hint} if self.hint else reason

    def __str__(self) -> str:
        hint = f"    hint: {self.hint}" if self.hint else ""
        return f"{self.code}: asked {self.asked}, offers {self.offers}{hint}"


Rule = Callable[[Platform, Request], Rejection | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What a backend can take; None is anything.

    archs         the exact architectures, where they can be listed
    except_archs  architectures that are too old, where newer ones are no reason to refuse
    packages      distributions of which one must be installed
    versions      lowest version taken, and the first one no longer taken
    block_sizes   cache block sizes it reads in place
    features      what of `request.FEATURES` it can give
    rules         couplings of several fields
    """

    vendors: frozenset[Vendor] | None = None
    archs: frozenset[str] | None = None
    except_archs: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    versions: tuple[str | None, str | None] = (None, None)
    phases: frozenset[str] = frozenset(PHASES)
    dtypes: frozenset[str] | None = None
    head_dims: frozenset[int] | None = None
    block_sizes: frozenset[int] | None = None
    features: frozenset[str] = frozenset()
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted((self.features - set(FEATURES)) | (self.phases - set(PHASES)))
        if unknown:
            raise ValueError(f"features or phases: found {unknown}, needed {FEATURES} {PHASES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One figure: microseconds on an architecture in a phase, with its origin.

    versions   distributions as "name version", those of the backend's library among them
    """

    arch: str
    phase: str
    figure: float
    versions: str
    date: str

    def __str__(self) -> str:
        return f"measured {self.figure:g} us on {self.arch} ({self.versions}, {self.date})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Where an answer was held against the oracle and was right, without a figure."""

    arch: str
    versions: str
    date: str

    def __str__(self) -> str:
        return f"found right on {self.arch}, not timed ({self.versions}, {self.date})"


class Runner(Protocol):
    """What an adapter module gives: made once per step, run once per layer."""

    def __init__(self, step: Step) -> None:
        """Plan the step and allocate scratch; BackendError when the library refuses."""

    def run(self, query: Tensor, cache: Tensor, ids: Tensor, bias: Tensor, out: Tensor) -> None:
        """Attend one layer into `out`; no checks, no host sync.

        query [N, Hq, D] rotated     cache [NB, H + 1, P, 2 D], any strides, last 1
        ids   [N, S] int32, best first, -1 unused     bias [N, S] float32, 0 where unused
        out   [N, Hq, D]; rows of padding get 0
        """

    def refresh(self) -> None:
        """Take over what was changed in place in the step's tensors, before a graph's next replay.

        Nothing to do where they are read in `run`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to attend: a library, and how it is fed.

    name        unique; `families` are further names that mean this row and its like
    entry       "module:Runner", imported when the row is reached
    symbols     "module:attribute" that the library must have, imported just before
    check       "module:function" of ours, `(Platform) -> str`: why the library cannot be used,
                "" when it can; called after the symbols were found
    stages      what it needs of the shared layer beyond store and select
    generation  of the flash_attn family: 2, 3 or 4
    self_test   must pass the self-test where nobody has run it
    fallback    of last resort: on a GPU it is never chosen without a warning
    broken      the error text of a plug-in that could not be loaded
    measured    our figures
    ran         where we ran it without a figure; both empty: not run by us
    """

    name: str
    capability: Capability
    entry: str = ""
    families: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    check: str = ""
    stages: tuple[str, ...] = ()
    generation: int | None = None
    self_test: bool = False
    fallback: bool = False
    broken: str = ""
    measured: tuple[Measured, ...] = ()
    ran: tuple[Ran, ...] = ()

    def is_named(self, name: str) -> bool:
        """Whether a name, in any case, means this row or a family it is in."""
        return name.lower() in (self.name, *self.families)

    def load(self) -> type[Runner]:
        """The Runner class; the adapter's module is imported here and nowhere else."""
        module, _, name = self.entry.partition(":")
        runner: type[Runner] = getattr(importlib.import_module(module), name)
        return runner

    def figure(self, arch: str, phase: str) -> Measured | None:
        """Our fastest figure on an architecture, or None."""
        rows = [row for row in self.measured if (row.arch, row.phase) == (arch, phase)]
        return min(rows, key=lambda row: row.figure, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """A backend somebody insisted on, and how: `DASH_PORTABLE_BACKEND=triton`.

    untested   what lets it run whatever its self-test says, "" where nothing does
    """

    name: str
    source: str
    undo: str
    untested: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What may be chosen, apart from what can: the user's will, with its source for messages.

    disabled    (name, source) pairs
    generation  (of flash_attn, source)
    """

    forced: Forced | None = None
    disabled: tuple[tuple[str, str], ...] = ()
    generation: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found out about backends on one platform, by entry; absent is not yet known.

    imports     "" when the library can be imported and has what we need, else its own words
    self_tests  "" when it passed here, else what was wrong
    plans       why it refused to plan this request
    recorded    this machine's own figures, by name; they win over ours
    """

    imports: Mapping[str, str] = field(default_factory=dict)
    self_tests: Mapping[str, str] = field(default_factory=dict)
    plans: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, tuple[Measured, ...]] = field(default_factory=dict)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without pre-release and local parts.

    >>> release("2.8.3.post2+cu130"), release("4.0.0b36")
    ((2, 8, 3), (4, 0, 0))
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _listed(offers: frozenset[str] | frozenset[int] | frozenset[Vendor]) -> str:
    """A set in words; long runs of numbers as `8..256 step 8`."""
    values = sorted(offers)
    numbers = [value for value in values if isinstance(value, int)]
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 6 and len(steps) == 1:
        return f"{numbers[0]}..{numbers[-1]} step {steps.pop()}"
    return " ".join(str(value) for value in values) or "none"


def _policy(backend: Backend, policy: Policy) -> tuple[Rejection, ...]:
    found = [
        Rejection(code=Code.DISABLED, asked=f"nothing named {name}", offers=backend.name, hint=hint)
        for name, hint in policy.disabled
        if backend.is_named(name)
    ]
    if policy.generation and backend.generation not in (None, policy.generation[0]):
        asked = f"flash_attn {policy.generation[0]}"
        offers = f"flash_attn {backend.generation}"
        hint = policy.generation[1]
        found.append(Rejection(code=Code.DISABLED, asked=asked, offers=offers, hint=hint))
    return tuple(found)


def _machine(backend: Backend, platform: Platform) -> tuple[Rejection, ...]:
    offer = backend.capability
    if offer.vendors is not None and platform.vendor not in offer.vendors:
        offers = _listed(offer.vendors)
        return (Rejection(code=Code.VENDOR, asked=platform.vendor.value, offers=offers),)
    if offer.archs is not None and platform.arch not in offer.archs:
        return (Rejection(code=Code.ARCH, asked=platform.arch, offers=_listed(offer.archs)),)
    if platform.arch in offer.except_archs:
        offers = f"all but {_listed(offer.except_archs)}"
        return (Rejection(code=Code.ARCH, asked=platform.arch, offers=offers),)
    return ()


def runs_on(backend: Backend, platform: Platform) -> bool:
    """Whether a backend is for this machine, installed or not."""
    return not _machine(backend, platform)


def _version(offer: Capability, version: str) -> Rejection | None:
    low, high = offer.versions
    found = release(version)
    if not found or (
        (low is None or found >= release(low)) and (high is None or found < release(high))
    ):
        return None
    bounds = [f">={low}"] * (low is not None) + [f"<{high}"] * (high is not None)
    return Rejection(code=Code.VERSION, asked=version, offers=" ".join(bounds))


def _install(backend: Backend, platform: Platform, facts: Facts) -> tuple[Rejection, ...]:
    offer, found = backend.capability, list[Rejection]()
    if backend.broken:
        return (Rejection(code=Code.IMPORT, asked="a plug-in", offers=backend.broken),)
    installed = [(name, platform.version(name)) for name in offer.packages]
    present = [(name, version) for name, version in installed if version is not None]
    if offer.packages and not present:
        asked = " or ".join(offer.packages)
        found.append(Rejection(code=Code.MISSING, asked=f"{asked} installed", offers="nothing"))
    too_old = [_version(offer, version) for _, version in present]
    if present and all(too_old):
        name, refused = present[0][0], too_old[0]
        assert refused is not None
        asked = f"{name} {refused.asked}"
        found.append(Rejection(code=Code.VERSION, asked=asked, offers=refused.offers))
    provided = " ".join(f"{name} {version}" for name, version in present) or backend.entry
    for code, known in (
        (Code.IMPORT, facts.imports),
        (Code.SELF_TEST, facts.self_tests),
        (Code.PLAN, facts.plans),
    ):
        if known.get(backend.entry):
            asked = f"{provided} to pass" if code is Code.SELF_TEST else f"{provided} to work"
            found.append(Rejection(code=code, asked=asked, offers=known[backend.entry]))
    return tuple(found)


_AGAIN = "DASH_PORTABLE_SELF_TEST=0 runs it all the same, `doctor --self-test` tests it again"


def _insisted(found: tuple[Rejection, ...], forced: Forced) -> tuple[Rejection, ...]:
    """What is missing for a forced backend: its verdict with the way out, or left out."""
    if forced.untested:
        return tuple(one for one in found if one.code is not Code.SELF_TEST)
    return tuple(replace(one, hint=_AGAIN) if one.code is Code.SELF_TEST else one for one in found)


def _request(backend: Backend, platform: Platform, request: Request) -> tuple[Rejection, ...]:
    offer, found = backend.capability, list[Rejection]()
    if request.phase not in offer.phases:
        offers = _listed(offer.phases)
        found.append(Rejection(code=Code.PHASE, asked=request.phase, offers=offers))
    for what, dtype in (("", request.dtype), ("a cache of ", request.cache_dtype)):
        if offer.dtypes is not None and dtype not in offer.dtypes:
            asked, offers = f"{what}{dtype}", _listed(offer.dtypes)
            found.append(Rejection(code=Code.DTYPE, asked=asked, offers=offers))
    for code, size, sizes in (
        (Code.HEAD_DIM, request.head_dim, offer.head_dims),
        (Code.BLOCK_SIZE, request.block_size, offer.block_sizes),
    ):
        if sizes is not None and size not in sizes:
            found.append(Rejection(code=code, asked=str(size), offers=_listed(sizes)))
    lacking = [name for name in request.features if name not in offer.features]
    if lacking:
        asked, offers = " ".join(lacking), _listed(offer.features)
        found.append(Rejection(code=Code.FEATURE, asked=asked, offers=offers))
    refused = (rule(platform, request) for rule in offer.rules)
    return (*found, *(rejection for rejection in refused if rejection is not None))


def takes(backend: Backend, platform: Platform, request: Request) -> bool:
    """Whether a backend declares all that a request asks, wherever it could be installed."""
    return not _request(backend, platform, request)


def compare(
    backend: Backend, request: Request, platform: Platform, policy: Policy, facts: Facts
) -> tuple[Rejection, ...]:
    """All reasons of the first layer that has any: policy, machine, install, request. Of a backend
    that somebody insists on, everything that is missing here and that the request asks in vain.
    """
    earlier = _policy(backend, policy) or _machine(backend, platform)
    if earlier:
        return earlier
    here = _install(backend, platform, facts)
    forced = policy.forced if policy.forced and backend.is_named(policy.forced.name) else None
    if here and not forced:
        return here
    return (_insisted(here, forced) if forced else here) + _request(backend, platform, request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One backend's answer, and remarks on it."""

    backend: Backend
    rejections: tuple[Rejection, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.rejections

    def to_dict(self) -> dict[str, object]:
        return {
            "backend": self.backend.name,
            "ok": self.ok,
            "rejections": [rejection.to_dict() for rejection in self.rejections],
            "remarks": list(self.remarks),
        }
