"""How adapters reach their libraries: by leaf module, with the symbol and the arguments they need,
in the library's words."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from dash_portable.errors import BackendError


def drop_half(before: set[str], modules: Iterable[str]) -> None:
    """Forget what a library that stopped half way has imported since `before`, so that nobody meets
    the half."""
    roots = {module.partition(".")[0] for module in modules} - {"torch", "dash_portable"}
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in roots:
            del sys.modules[name]


def _absent(module: str, error: Exception) -> bool:
    """Whether an import failed only because there is no such module: what is above it is whole."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return missing is not None and f"{module}.".startswith(f"{missing}.")


def symbol(module: str, name: str) -> Any:
    """`name` of a vendor's module; BackendError with the original text, whatever the import raised.

    Vendor packages fail with ImportError, OSError (a shared library), RuntimeError and KeyError (an
    unlisted device) alike, so every Exception is one answer here: it is kept as the cause.
    """
    before = set(sys.modules)
    try:
        found = importlib.import_module(module)
    except Exception as error:
        if not _absent(module, error):
            drop_half(before, (module,))
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
