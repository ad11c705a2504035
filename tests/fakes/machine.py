"""Install a fake for one test: its modules in `sys.modules`, its distribution where metadata finds
it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest


@dataclass(frozen=True, kw_only=True)
class Fake:
    """One library in one version family.

    distributions  (name, version) as pip would list them
    modules        makes the modules anew, by dotted name; parents are made if they are missing
    arch           a device on which the real one works
    """

    name: str
    distributions: tuple[tuple[str, str], ...]
    modules: Callable[[], dict[str, ModuleType]]
    arch: str
    roots: tuple[str, ...] = field(default=())

    def install(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, ModuleType]:
        """Put the fake in place until the test ends, and hide any real library of that name."""
        made = self.modules()
        roots = {name.partition(".")[0] for name in made} - {"torch"}
        for name in list(sys.modules):
            if name.partition(".")[0] in roots:
                monkeypatch.delitem(sys.modules, name)
        for name in sorted(made):
            _parents(name, made)
        for name, module in made.items():
            monkeypatch.setitem(sys.modules, name, module)
        for name, version in self.distributions:
            info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (info / "METADATA").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder))
        return made


def _parents(name: str, made: dict[str, ModuleType]) -> None:
    parent, _, leaf = name.rpartition(".")
    if not parent or parent == "torch.nn.attention":
        return
    if parent not in made:
        made[parent] = package(parent)
        _parents(parent, made)
    setattr(made[parent], leaf, made[name])


def package(name: str, **contents: object) -> ModuleType:
    """A module of that name with these attributes; a package, so that it may have children."""
    module = ModuleType(name)
    module.__path__ = []
    for key, value in contents.items():
        setattr(module, key, value)
    return module
