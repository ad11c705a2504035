"""The only reader of the process's environment, and the table of variables that it knows."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dash_portable.errors import found_needed, unknown_word
from dash_portable.request import PHASES

PREFIX = "DASH_PORTABLE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable: its name, what it may hold, and what it does."""

    name: str
    values: str
    about: str


VARIABLES = (
    Variable(
        name="DASH_PORTABLE_BACKEND",
        values="a backend or family, or prefill=NAME,decode=NAME",
        about="force this backend; AUTO or empty leaves the choice to the dispatcher",
    ),
    Variable(
        name="DASH_PORTABLE_DISABLE",
        values="backends or families, separated by commas",
        about="never choose these",
    ),
    Variable(
        name="DASH_PORTABLE_FA_VERSION",
        values="2, 3 or 4",
        about="of the flash_attn family only this generation",
    ),
    Variable(
        name="DASH_PORTABLE_DETERMINISTIC",
        values="0 or 1",
        about="ask every request for equal bits from equal inputs",
    ),
    Variable(
        name="DASH_PORTABLE_PLATFORM",
        values="an arch or a card, such as sm90, gfx942, B580, or cpu",
        about="pretend this platform in reports; running an op under it raises",
    ),
    Variable(
        name="DASH_PORTABLE_SELF_TEST",
        values="0 or 1",
        about="0: run a forced backend whatever its self-test says or would say; what is chosen by "
        "itself is tested all the same",
    ),
    Variable(
        name="DASH_PORTABLE_LOG",
        values="choice or table",
        about="write each new choice to stderr: its line, or every backend's reasons",
    ),
)

VISIBLE_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
    "ZE_FLAT_DEVICE_HIERARCHY",
    "ONEAPI_DEVICE_SELECTOR",
    "SYCL_DEVICE_FILTER",
    "NVIDIA_VISIBLE_DEVICES",
)

# Other projects' switches that a user may expect to work here.
FOREIGN = (
    "VLLM_ATTENTION_BACKEND",
    "VLLM_FLASH_ATTN_VERSION",
    "SGLANG_ATTENTION_BACKEND",
    "DIFFUSERS_ATTN_BACKEND",
    "VLLM_ROCM_USE_AITER",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asked for; None and empty mean that it did not say.

    backend   the forced name of each phase, as written
    self_test   a forced backend is held to its self-test
    sources   variable and value as set, for messages
    """

    backend: tuple[tuple[str, str], ...] = ()
    disable: tuple[str, ...] = ()
    fa_version: int | None = None
    deterministic: bool = False
    platform: str | None = None
    self_test: bool = True
    log: str | None = None
    sources: tuple[tuple[str, str], ...] = ()

    def forced(self, phase: str) -> str | None:
        """The backend forced for a phase, or None."""
        return dict(self.backend).get(phase)

    def source(self, name: str) -> str:
        """`NAME=value` as it was set."""
        return f"{name}={dict(self.sources)[name]}"


def _backend(name: str, value: str) -> tuple[tuple[str, str], ...]:
    if "=" not in value:
        return tuple((phase, value) for phase in PHASES) if value.upper() != "AUTO" else ()
    forced: dict[str, str] = {}
    for part in value.split(","):
        phase, equals, backend = (word.strip() for word in part.partition("="))
        phase = phase.lower()
        if phase not in PHASES or not equals or not backend or phase in forced:
            raise found_needed(name, repr(value), f"NAME or {'=NAME,'.join(PHASES)}=NAME")
        if backend.upper() != "AUTO":
            forced[phase] = backend
    return tuple(forced.items())


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> str:
    if value.lower() not in valid:
        raise found_needed(name, repr(value), " or ".join(valid))
    return value.lower()


_VISIBLE = frozenset(os.fsencode(name) for name in VISIBLE_DEVICES)


def _names(wanted: Callable[[bytes], bool]) -> list[str]:
    """The wanted names in the process's environment.

    Asked at every choice: where names are bytes they are compared as such, four times as fast.
    """
    if not os.supports_bytes_environ:
        return [name for name in os.environ if wanted(os.fsencode(name))]
    return [os.fsdecode(name) for name in os.environb if wanted(name)]


def _is_ours(name: bytes) -> bool:
    """In any case, so that a misspelt one is found."""
    return name[: len(PREFIX)].upper() == PREFIX.encode()


def deterministic() -> bool:
    """What `read` says of DASH_PORTABLE_DETERMINISTIC, without looking at the other variables."""
    name = PREFIX + "DETERMINISTIC"
    value = os.environ.get(name, "").strip()
    return bool(value) and _one_of(name, value, ("0", "1")) == "1"


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this moment; an unknown variable or value raises ArgumentError.

    An empty variable counts as unset.

    >>> read({"DASH_PORTABLE_BACKEND": "prefill=triton"}).forced("prefill")
    'triton'
    """
    names = _names(_is_ours) if environ is None else environ
    environ = os.environ if environ is None else environ
    known = [variable.name for variable in VARIABLES]
    ours = {name: environ[name].strip() for name in names if name.upper().startswith(PREFIX)}
    for name in ours:
        if name not in known:
            raise unknown_word("environment variable", name, known)
    ours = {name: value for name, value in ours.items() if value}

    def value(suffix: str) -> str:
        return ours.get(PREFIX + suffix, "")

    def choice(suffix: str, *valid: str) -> str | None:
        return _one_of(PREFIX + suffix, value(suffix), valid) if value(suffix) else None

    version = choice("FA_VERSION", "2", "3", "4")
    return Settings(
        backend=_backend(PREFIX + "BACKEND", value("BACKEND")) if value("BACKEND") else (),
        disable=tuple(word.strip() for word in value("DISABLE").split(",") if word.strip()),
        fa_version=int(version) if version else None,
        deterministic=choice("DETERMINISTIC", "0", "1") == "1",
        platform=value("PLATFORM") or None,
        self_test=choice("SELF_TEST", "0", "1") != "0",
        log=choice("LOG", "choice", "table"),
        sources=tuple(sorted(ours.items())),
    )


def visible_devices(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The vendors' device-hiding variables that are set, verbatim; never obeyed, only reported."""
    if environ is None:
        environ = {name: os.environ[name] for name in _names(_VISIBLE.__contains__)}
    return {name: environ[name] for name in VISIBLE_DEVICES if name in environ}


def foreign(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Other projects' switches that are set; they have no effect here."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in FOREIGN if name in environ}


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The user's folder for what this package remembers of this machine; it may not exist.

    A user without a home, as in some containers, has one below the system's temporary folder.
    """
    environ = os.environ if environ is None else environ
    name = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    if environ.get(name):
        return Path(environ[name]) / "dash_portable"
    try:
        return Path.home() / ".cache" / "dash_portable"
    except RuntimeError:
        user = os.getuid() if hasattr(os, "getuid") else "user"
        return Path(tempfile.gettempdir()) / f"dash_portable-{user}"
