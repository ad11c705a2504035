"""How adapters reach their libraries: by leaf module, with the symbol and the arguments they need,
in the library's words."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from dash_portable.errors import BackendError


def symbol(module: str, name: str) -> Any:
    """`name` of a vendor's module; BackendError with the original text, whatever the import raised.

    Vendor packages fail with ImportError, OSError (a shared library), RuntimeError and KeyError (an
    unlisted device) alike, so every Exception is one answer here: it is kept as the cause.
    """
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise BackendError(f"import {module}: {type(error).__name__}: {error}") from error
    if not hasattr(found, name):
        place = getattr(found, "__file__", None) or "a namespace package"
        raise BackendError(f"{module} has no {name} (imported from {place})")
    return getattr(found, name)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a library function, by name."""
    return dict(inspect.signature(function).parameters)


def function(module: str, name: str, arguments: Iterable[str] = ()) -> Callable[..., Any]:
    """A callable of a vendor's module that takes the named arguments; BackendError names those it
    lacks."""
    found: Callable[..., Any] = symbol(module, name)
    wanted = set(arguments)
    lacking = sorted(wanted - set(parameters(found))) if wanted else []
    if lacking:
        raise BackendError(f"{module}.{name} takes no {' '.join(lacking)}")
    return found


def reason(*wanted: tuple[str, str, tuple[str, ...]]) -> str:
    """Why one of the wanted (module, name, arguments) cannot be used, or ""."""
    for module, name, arguments in wanted:
        try:
            function(module, name, arguments)
        except BackendError as error:
            return str(error)
    return ""
