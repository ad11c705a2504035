"""Facts about installed libraries, found outside the choice: do they import, do they answer right.

Nothing here is asked before a row is about to be chosen, and each answer is remembered for one
library version on one device.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dash_portable.backends import sources
from dash_portable.backends.imports import drop_half
from dash_portable.backends.spec import Backend, Capability
from dash_portable.errors import BackendError
from dash_portable.platform.facts import Platform

GROUP = "dash_portable.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of trying: text "" is success, else the library's own words and its traceback."""

    text: str = ""
    trace: str = ""


def attribute(path: str) -> Any:
    """What "module:attribute" names; BackendError when the module lacks it."""
    module_name, _, name = path.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        place = getattr(module, "__file__", None) or "a folder without __init__.py"
        raise BackendError(f"{module_name} has no {name} (imported from {place})")
    return getattr(module, name)


def failed(error: BaseException) -> Outcome:
    """An error as an outcome, traceback kept."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return Outcome(text=text, trace="".join(traceback.format_exception(error)))


def try_import(backend: Backend, platform: Platform) -> Outcome:
    """Import what a backend needs: its library's symbols, its adapter, then its own check.

    A library may fail with anything; its words become the outcome. Errors in a check of ours are
    bugs and propagate.
    """
    before = set(sys.modules)
    try:
        for path in backend.symbols:
            attribute(path)
        backend.load()
    except Exception as error:  # any exception of a library is a reason not to choose it
        drop_half(before, (path.partition(":")[0] for path in backend.symbols))
        return failed(error)
    return Outcome(text=attribute(backend.check)(platform) if backend.check else "")


_imports: dict[tuple[object, ...], Outcome] = {}


@functools.cache
def _own_version() -> str:
    try:
        return importlib.metadata.version("dash-portable")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def identity(backend: Backend, platform: Platform) -> tuple[str, ...]:
    """What an answer is about: the row, our version and its library's, the device."""
    versions = [f"{name} {platform.version(name)}" for name in backend.capability.packages]
    present = [text for text in versions if not text.endswith(" None")]
    ours = f"dash-portable {_own_version()}"
    return (backend.name, backend.entry, ours, *present, platform.arch, platform.runtime)


def tested_as(backend: Backend, platform: Platform) -> tuple[str, ...]:
    """What a verdict is about: `identity` and the adapter's source, which may change without a
    version.
    """
    module = backend.entry.partition(":")[0]
    return (*identity(backend, platform), f"source {sources.mark(module)}")


def verified(backend: Backend, platform: Platform) -> bool:
    """Whether we ran the library's installed version on this architecture."""
    packages = [(name, platform.version(name)) for name in backend.capability.packages]
    present = [f"{name} {version.partition('+')[0]}" for name, version in packages if version]
    figures = [row for row in backend.measured if row.arch == platform.arch]
    return any(all(text in row.versions.split(", ") for text in present) for row in figures)


def import_outcome(backend: Backend, platform: Platform) -> Outcome:
    """`try_import`, remembered per row, library version and device."""
    key = identity(backend, platform)
    if key not in _imports:
        _imports[key] = try_import(backend, platform)
    return _imports[key]


def forget() -> None:
    """Try imports again: what was missing may be there now, and a version need not tell."""
    _imports.clear()


def known_trace(backend: Backend, platform: Platform) -> str:
    """The traceback of an import that failed here, "" where none did or none was tried."""
    return _imports.get(identity(backend, platform), Outcome()).trace


def plugins(taken: Iterable[str]) -> tuple[Backend, ...]:
    """Rows that installed packages add through the entry-point group `dash_portable.backends`.

    An entry point gives a Backend or several. One that fails, gives something else, or takes a
    name that is used already becomes a row that declines with the reason.
    """
    used, found = set(taken), list[Backend]()
    points = importlib.metadata.entry_points(group=GROUP)
    for point in sorted(points, key=lambda point: point.name):
        try:
            loaded = point.load()
        except Exception as error:  # a broken plug-in must not take the others down
            loaded = failed(error).text
        rows = (loaded,) if isinstance(loaded, (Backend, str)) else loaded
        for row in rows if isinstance(rows, (tuple, list)) else (f"gives {rows!r}, no Backend",):
            if isinstance(row, Backend) and row.name not in used:
                used.add(row.name)
                found.append(row)
                continue
            reason = row if isinstance(row, str) else f"gives {row!r}, no Backend"
            if isinstance(row, Backend):
                reason = f"the name {row.name} is taken"
            name = point.name.lower()
            name = name if name not in used else f"{name} of {point.value}"
            used.add(name)
            found.append(Backend(name=name, capability=Capability(), broken=reason))
    return tuple(found)
