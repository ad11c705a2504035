"""The exception tree, and the one form in which a wrong value is reported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dash_portable.choice import Choice


_FEW = 12  # words that can be read at a glance


class DashError(Exception):
    """Everything this package raises on purpose."""


class ConfigError(DashError, ValueError):
    """A model's configuration misses a key, or a key holds what the rule cannot use."""


class ArgumentError(DashError, ValueError):
    """An argument or an environment variable holds a value that no backend could use."""


class UnsupportedError(DashError, RuntimeError):
    """No backend serves the request, or the forced one does not; `choice` holds every reason."""

    def __init__(self, text: str, choice: Choice | None = None) -> None:
        super().__init__(text)
        self.choice = choice


class DtypeError(UnsupportedError, ValueError):
    """The forced backend takes no such dtype on any machine: as much a wrong argument."""


class BackendError(DashError, RuntimeError):
    """A library failed while planning or running; it is not retried elsewhere by itself."""


def found_needed(name: str, found: object, needed: object) -> ArgumentError:
    """An error that says in one sentence what was found under a name and what is needed there."""
    return ArgumentError(f"{name}: found {found}, needed {needed}")


def nearest(found: str, valid: Iterable[str], likeness: float = 0.3) -> str | None:
    """The valid word that is most like what was found, if any is like it."""
    words = {word.lower(): word for word in valid}
    near = difflib.get_close_matches(found.lower(), words, 1, likeness)
    return words[near[0]] if near else None


def unknown_word(name: str, found: str, valid: Iterable[str]) -> ArgumentError:
    """The error for a word that is not in a list, with the nearest one that is."""
    words = sorted(valid)
    near = nearest(found, words)
    hint = f" (nearest: {near})" if near else ""
    listed = " ".join(words)
    # Of a long list the nearest is what will be read.
    needed = f"these{hint}: {listed}" if len(words) > _FEW else f"{listed}{hint}"
    return found_needed(name, repr(found), f"one of {needed}")
