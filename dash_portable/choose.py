"""Who attends, as a pure function of values: request, machine, the user's will, table and facts."""

from __future__ import annotations

from collections.abc import Iterable

from dash_portable.backends import BACKENDS, SHARED, probe
from dash_portable.backends.spec import (
    Backend,
    Decision,
    Facts,
    Forced,
    Measured,
    Policy,
    compare,
)
from dash_portable.choice import Choice, Stage
from dash_portable.platform.facts import Platform
from dash_portable.request import Request


def _figure(
    backend: Backend, request: Request, platform: Platform, facts: Facts
) -> Measured | None:
    """This machine's own figure of a backend, else ours, else None."""
    asked = (platform.arch, request.phase)
    own = [row for row in facts.recorded.get(backend.name, ()) if (row.arch, row.phase) == asked]
    return min(own, key=lambda row: row.figure) if own else backend.figure(*asked)


def _ordered(
    backends: Iterable[Backend], request: Request, platform: Platform, facts: Facts
) -> list[Backend]:
    """Last resorts last; else this machine's own figures, then ours, then the table's order."""
    asked = (platform.arch, request.phase)
    recorded = {
        name
        for name, rows in facts.recorded.items()
        if any((row.arch, row.phase) == asked for row in rows)
    }

    def key(backend: Backend) -> tuple[bool, int, float]:
        figure = _figure(backend, request, platform, facts)
        rank = 0 if backend.name in recorded else 1 if figure else 2
        return backend.fallback, rank, figure.figure if figure else 0.0

    return sorted(backends, key=key)


def _decide(
    backend: Backend, request: Request, platform: Platform, policy: Policy, facts: Facts
) -> Decision:
    rejections = compare(backend, request, platform, policy, facts)
    figure = _figure(backend, request, platform, facts)
    remarks = list[str]()
    if not rejections and figure is not None:
        remarks.append(str(figure))
    elif not rejections and not backend.fallback:
        ran = [str(row) for row in backend.ran if row.arch == platform.arch]
        remarks += ran or [f"not run by us on {platform.arch}"]
    if not rejections and backend.self_test and not probe.verified(backend, platform):
        remarks += _tested(backend, policy.forced, facts.self_tests.get(backend.entry))
    return Decision(backend=backend, rejections=rejections, remarks=tuple(remarks))


def _tested(backend: Backend, forced: Forced | None, verdict: str | None) -> tuple[str, ...]:
    """A remark on the self-test of a backend that serves, and that has to be tested here."""
    if forced and forced.untested and backend.is_named(forced.name):
        if verdict is None:
            return (f"not self-tested ({forced.untested})",)
        return (f"failed its self-test ({forced.untested}): {verdict}",) if verdict else ()
    return ("must pass the self-test first",) if verdict is None else ()


def choose(
    request: Request,
    platform: Platform,
    policy: Policy | None = None,
    *,
    backends: tuple[Backend, ...] = BACKENDS,
    shared: tuple[Backend, ...] = SHARED,
    facts: Facts | None = None,
) -> Choice:
    """Who attends, from values alone: no import, no device and no environment is asked.

    Nothing is raised when nobody can; `Choice.required` does. A forced backend that cannot is
    never replaced. What is not in `facts` counts as good.
    """
    policy, facts = policy or Policy(), facts or Facts()
    decisions = tuple(
        _decide(backend, request, platform, policy, facts)
        for backend in _ordered(backends, request, platform, facts)
    )
    forced = policy.forced
    able = [
        one.backend
        for one in decisions
        if one.ok and (forced is None or one.backend.is_named(forced.name))
    ]
    backend = able[0] if able else None
    stages = ("store", "select", *(backend.stages if backend else ()))
    return Choice(
        request=request,
        platform=platform,
        decisions=decisions,
        stages=_stages(stages, request, platform, policy, facts, shared),
        backend=backend,
        forced=forced,
    )


def _stages(
    names: tuple[str, ...],
    request: Request,
    platform: Platform,
    policy: Policy,
    facts: Facts,
    shared: tuple[Backend, ...],
) -> tuple[Stage, ...]:
    """The shared layer's verdict. A forced backend takes it along where it has one of its own."""
    forced = policy.forced
    own = [row for row in shared if forced and row.is_named(forced.name)]
    # The last resort cannot be disabled here: without it nothing could be stored.
    disabled = tuple(
        (name, source)
        for name, source in policy.disabled
        if not any(row.is_named(name) for row in shared if row.fallback)
    )
    rules = Policy(forced=forced if forced and forced.untested else None, disabled=disabled)
    decisions = tuple(
        Decision(backend=row, rejections=compare(row, request, platform, rules, facts))
        for row in own or shared
    )
    return tuple(Stage(name=name, decisions=decisions) for name in names)
