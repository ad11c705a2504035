"""What we measured: per backend the figures that put it first on an architecture.

A row here also says that the library's version was run and found right on that architecture; any
other version or architecture must pass the self-test first. `bench` prints rows to paste.
"""

from __future__ import annotations

from collections.abc import Mapping

from dash_portable.backends.spec import Measured

FIGURES: Mapping[str, tuple[Measured, ...]] = {}
