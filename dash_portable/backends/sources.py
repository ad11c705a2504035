"""Which source a verdict is about: a mark of the files that an adapter is made of."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import sys
from pathlib import Path

_INSTALLED = ("site-packages", "dist-packages")


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """A module's spec, with nothing imported: a package of a vendor may be slow, or fail."""
    places, found = None, None
    parts = name.split(".")
    for i in range(len(parts)):
        found = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            found = find(".".join(parts[: i + 1]), places) if find else None
            if found is not None:
                break
        if found is None:
            return None
        places = found.submodule_search_locations
    return found


def _files(name: str) -> list[Path]:
    """The module's file; where it is not an installed copy, which has a version, but a folder that
    somebody works in, every source of its package, or the ones beside a module without a package.
    """
    if not all(name.split(".")):  # a row of what could not be loaded has no module
        return []
    loaded = sys.modules.get(name)
    spec = (getattr(loaded, "__spec__", None) if loaded else None) or _spec(name)
    if spec is None or not spec.has_location or spec.origin is None:
        return []
    file = Path(spec.origin)
    if any(part in _INSTALLED for part in file.parts):
        return [file]
    depth = name.count(".") + (spec.submodule_search_locations is not None)
    if depth == 0:
        return sorted({file, *file.parent.glob("*.py")})
    return sorted({file, *file.parents[depth - 1].rglob("*.py")})


@functools.lru_cache(maxsize=64)
def _hashed(files: tuple[Path, ...]) -> str:
    made = hashlib.sha256()
    for file in files:
        try:
            made.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        except OSError:  # gone between the two looks: other files, so another mark
            continue
    return made.hexdigest()[:12] if files else "none"


@functools.lru_cache(maxsize=256)
def mark(name: str) -> str:
    """A short hash of the contents of a module's files, "none" where it has none to be found.

    Taken once a process, before the module is imported, since what is loaded stays.
    """
    return _hashed(tuple(_files(name)))


def forget() -> None:
    """Look at the files again."""
    mark.cache_clear()
    _hashed.cache_clear()
