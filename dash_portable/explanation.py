"""Reports on choices for people: `explain`, on this machine or on one that is only named."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dash_portable import env
from dash_portable.backends import probe, records
from dash_portable.choice import Choice
from dash_portable.dispatch import (
    platform_for,
    plugged,
    policy_of,
    pretending,
    settle,
    survey,
    table,
)
from dash_portable.errors import found_needed
from dash_portable.platform import detect
from dash_portable.platform.detect import installed
from dash_portable.platform.facts import Platform, pretended
from dash_portable.request import PHASES, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Choices for several requests, as text or JSON."""

    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        return "\n\n".join(
            str(one) if one.backend and one.layer else one.refusal() for one in self.choices
        )

    def to_json(self) -> str:
        return json.dumps([one.to_dict() for one in self.choices], indent=2)


def typical_requests(dtype: str = "bfloat16") -> tuple[Request, ...]:
    """A request per phase with the shapes of the model: heads of 128, blocks of 32."""
    return tuple(
        Request(
            phase=phase,
            dtype=dtype,
            cache_dtype=dtype,
            head_dim=128,
            group_size=1,
            block=32,
            block_size=32,
        )
        for phase in PHASES
    )


def _as_set(asked: tuple[Request, ...], settings: env.Settings) -> tuple[Request, ...]:
    """Requests as the environment asks of each."""
    return tuple(
        replace(one, deterministic=True) if settings.deterministic else one for one in asked
    )


def pretended_here(name: str) -> Platform:
    """A named platform with what is installed here; torch and Triton are taken to be there."""
    packages = {"torch": "", "triton": "", **dict(installed()), **dict(plugged(table()))}
    platform = pretended(name, tuple(packages.items()))
    note = "pretended: torch and triton are taken to be there, other packages as installed here"
    return replace(platform, notes=(*platform.notes, note))


def report(device: Any = None) -> dict[str, object]:
    """Everything `doctor` tells, ready for JSON: the machine, the settings, every backend.

    Each backend that could serve is imported; tracebacks of those that failed are included.
    `refused` has a line for each thing that the environment insists on and this machine cannot do.
    Raises ArgumentError for a wrong environment.
    """
    settings, backends = env.read(), table()
    platform = platform_for(device, backends)
    choices = [
        survey(one, platform, backends, policy_of(one.phase, settings, backends))
        for one in _as_set(typical_requests(), settings)
    ]
    refused = [
        one.refusal().splitlines()[0]
        for one in choices
        if one.forced and not (one.backend and one.layer)
    ]
    if settings.platform is not None:
        refused.append(pretending(settings))
    asked = {one.backend.name: one.backend for choice in choices for one in choice.decisions}
    traces = {name: probe.known_trace(row, platform) for name, row in asked.items()}
    return {
        **detect.report(device),
        "platform": platform.to_dict(),
        "settings": dict(settings.sources),
        "records": str(records.path()),
        "refused": list(dict.fromkeys(refused)),
        "choices": [choice.to_dict() for choice in choices],
        "tracebacks": {name: trace for name, trace in traces.items() if trace},
    }


def explain(
    request: Request | None = None,
    platform: Platform | str | None = None,
    *,
    backend: str | None = None,
    disable: Iterable[str] | None = None,
    fa_version: int | None = None,
) -> Explanation:
    """Which backend would attend and why not the others; never raises because none can.

    request    None: one typical request per phase
    platform   a platform, an architecture or card to pretend (`gfx942`, `H200`), or None: what
               DASH_PORTABLE_PLATFORM pretends, else this process's own

    The other arguments are those of `choice_for`. `str()` gives tables, `.to_json()` the data.
    Raises ArgumentError for unknown names.
    """
    settings, backends = env.read(), table()
    if platform is None:
        platform = settings.platform or platform_for(None, backends)
    if isinstance(platform, str):
        platform = pretended_here(platform)
    if not isinstance(platform, Platform):
        raise found_needed("platform", repr(platform), "a Platform or a name, such as 'H200'")
    if request is not None and not isinstance(request, Request):
        raise found_needed("request", repr(request), "a Request, or None for typical ones")
    asked = _as_set(typical_requests() if request is None else (request,), settings)
    return Explanation(
        choices=tuple(
            settle(
                one,
                platform,
                policy_of(
                    one.phase,
                    settings,
                    backends,
                    backend=backend,
                    disable=disable,
                    fa_version=fa_version,
                ),
                backends,
            )
            for one in asked
        )
    )
