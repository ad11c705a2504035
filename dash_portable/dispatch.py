"""Who attends: gathers the facts for `choose`, remembers what came of it, and plans."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dash_portable import env
from dash_portable.backends import BACKENDS, SHARED, probe, records, sources
from dash_portable.backends.spec import (
    Backend,
    Facts,
    Forced,
    Policy,
    Runner,
)
from dash_portable.choice import Choice
from dash_portable.choose import choose
from dash_portable.errors import BackendError, UnsupportedError, found_needed, unknown_word
from dash_portable.platform.detect import current_platform, installed, is_capturing
from dash_portable.platform.facts import DISTRIBUTIONS, Platform, Vendor
from dash_portable.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dash_portable.step import Step

_LOG = logging.getLogger("dash_portable")
_SELF_TEST = "dash_portable.self_test"
AUTO = "AUTO"


@lru_cache(maxsize=8)
def _table(path: tuple[str, ...]) -> tuple[Backend, ...]:
    taken = {name for row in BACKENDS for name in (row.name, *row.families)}
    return (*probe.plugins(taken), *BACKENDS)


def table() -> tuple[Backend, ...]:
    """All rows: those of plug-ins, which somebody installed on purpose, then our own."""
    return _table(tuple(sys.path))


def policy_of(
    phase: str,
    settings: env.Settings,
    backends: tuple[Backend, ...],
    *,
    backend: str | None = None,
    disable: Iterable[str] | None = None,
    fa_version: int | None = None,
) -> Policy:
    """The user's will for a phase; an argument wins over the environment.

    Raises ArgumentError for a name that no backend and no family has, wherever it was written.
    """

    def known(label: str, name: str) -> str:
        if not any(row.is_named(name) for row in backends):
            names = {name for row in backends for name in (row.name, *row.families)}
            raise unknown_word(label, name, {*names, AUTO})
        return name.lower()

    for _, name in settings.backend:
        known("DASH_PORTABLE_BACKEND", name)
    forced = None
    written = settings.forced(phase)
    untested = "" if settings.self_test else settings.source("DASH_PORTABLE_SELF_TEST")
    if backend is not None and backend.upper() != AUTO:
        source, undo = f"backend={backend!r}", f"pass backend={AUTO!r}"
        forced = Forced(name=known("backend", backend), source=source, undo=undo, untested=untested)
    elif written is not None:
        source, undo = settings.source("DASH_PORTABLE_BACKEND"), "unset DASH_PORTABLE_BACKEND"
        forced = Forced(name=written.lower(), source=source, undo=undo, untested=untested)
    if disable is not None:
        disabled = tuple((known("disable", name), f"disable={name!r}") for name in disable)
    else:
        disabled = tuple(
            (known("DASH_PORTABLE_DISABLE", name), settings.source("DASH_PORTABLE_DISABLE"))
            for name in settings.disable
        )
    generation = None
    if fa_version is not None:
        if fa_version not in (2, 3, 4):
            raise found_needed("fa_version", fa_version, "2, 3 or 4")
        generation = (fa_version, f"fa_version={fa_version}")
    elif settings.fa_version is not None:
        generation = (settings.fa_version, settings.source("DASH_PORTABLE_FA_VERSION"))
    return Policy(forced=forced, disabled=disabled, generation=generation)


def run_self_test(backend: Backend, platform: Platform) -> str:
    """Test a backend on this machine against the oracle and remember it; "" is a pass.

    Raises BackendError while a graph is captured: the test would fail for that alone.
    """
    if is_capturing():
        raise BackendError(
            f"backend {backend.name!r}: found a graph being captured, needed a step planned before "
            "it (a backend that nobody ran on this card is tested at its first choice)"
        )
    try:
        test: Callable[[Backend, Platform], str] = probe.attribute(f"{_SELF_TEST}:run")
    except ModuleNotFoundError as error:
        if error.name != _SELF_TEST:
            raise
        return "not run: this version has no self-test"
    text = test(backend, platform)
    records.record_verdict(probe.tested_as(backend, platform), text)
    return text


_plans: dict[tuple[Request, Platform], dict[str, str]] = {}


def _remembered(request: Request, platform: Platform, backends: tuple[Backend, ...]) -> Facts:
    known = records.read()
    verdicts = {
        row.entry: known.verdicts.get(" ".join(probe.tested_as(row, platform)))
        for row in (*backends, *SHARED)
    }
    return Facts(
        self_tests={entry: text for entry, text in verdicts.items() if text is not None},
        plans=dict(_plans.get((request, platform), {})),
        recorded=known.measured,
    )


def _more(choice: Choice, facts: Facts) -> Facts | None:
    """Facts with one question more answered about those who would run; None: nothing is open."""
    platform = choice.platform
    for row in (choice.backend, choice.layer):
        if row is not None and row.entry not in facts.imports:
            text = probe.import_outcome(row, platform).text
            return replace(facts, imports={**facts.imports, row.entry: text})
    for row in (choice.layer, choice.backend):
        if row is None or not row.self_test or row.entry in facts.self_tests:
            continue
        if choice.forced and choice.forced.untested and row.is_named(choice.forced.name):
            continue
        if not probe.verified(row, platform):
            verdict = run_self_test(row, platform)
            return replace(facts, self_tests={**facts.self_tests, row.entry: verdict})
    return None


def settle(
    request: Request, platform: Platform, policy: Policy, backends: tuple[Backend, ...]
) -> Choice:
    """`choose`, asking about a library only when its row would win; a refusal moves on.

    On a pretended platform nothing is asked.
    """
    if platform.pretended:
        return choose(request, platform, policy, backends=backends)
    facts = _remembered(request, platform, backends)
    while True:
        choice = choose(request, platform, policy, backends=backends, facts=facts)
        more = _more(choice, facts)
        if more is None:
            return choice
        facts = more


def survey(
    request: Request,
    platform: Platform,
    backends: tuple[Backend, ...],
    policy: Policy | None = None,
    *,
    verdicts: bool = True,
) -> Choice:
    """The choice with every backend that could serve asked whether it imports, for `doctor`.

    verdicts   False: as if no self-test had been run yet
    """
    facts = _remembered(request, platform, backends)
    if not verdicts:
        facts = replace(facts, self_tests={})
    first = choose(request, platform, backends=backends, facts=facts)
    asked = [one.backend for one in (*first.decisions, *first.stages[0].decisions) if one.ok]
    imports = {row.entry: probe.import_outcome(row, platform).text for row in asked}
    facts = replace(facts, imports=imports)
    return choose(request, platform, policy, backends=backends, facts=facts)


def plugged(backends: tuple[Backend, ...]) -> tuple[tuple[str, str], ...]:
    """(distribution, version) of those that are installed and that only plug-ins ask about."""
    asked = {name for row in backends for name in row.capability.packages}
    extra = tuple(sorted(asked - set(DISTRIBUTIONS)))
    return installed(extra) if extra else ()


def platform_for(device: Any, backends: tuple[Backend, ...]) -> Platform:
    """The device's platform, with the packages that plug-ins ask about."""
    platform = current_platform(device)
    extra = plugged(backends)
    return replace(platform, packages=platform.packages + extra) if extra else platform


# --- what others call -----------------------------------------------------------------------

_choices: dict[tuple[Request, Platform, Policy], Choice] = {}


def forget() -> None:
    """Drop remembered choices, imports and refusals, after facts have changed in this process."""
    _choices.clear()
    _plans.clear()
    probe.forget()
    sources.forget()
    _table.cache_clear()


def pretending(settings: env.Settings) -> str:
    """Why nothing runs while the environment pretends a platform."""
    return f"{settings.source('DASH_PORTABLE_PLATFORM')} is for reports: unset it to run an op"


def choice_for(
    request: Request,
    device: Any = None,
    *,
    backend: str | None = None,
    disable: Iterable[str] | None = None,
    fa_version: int | None = None,
) -> Choice:
    """The choice for tensors on a device, with the environment as it is now; remembered.

    Raises UnsupportedError, which carries the choice, when nobody or not the forced one can serve,
    or when the environment pretends a platform; ArgumentError for unknown names and values.
    """
    settings, backends = env.read(), table()
    if settings.platform is not None:
        raise UnsupportedError(pretending(settings))
    if settings.deterministic and not request.deterministic:
        request = replace(request, deterministic=True)
    policy = policy_of(
        request.phase,
        settings,
        backends,
        backend=backend,
        disable=disable,
        fa_version=fa_version,
    )
    key = (request, platform_for(device, backends), policy)
    choice = _choices.get(key)
    if choice is None:
        choice = settle(*key, backends)
        choice.required()
        _choices[key] = choice
        _announce(choice, settings.log)
    return choice


_warned: set[tuple[str, str]] = set()


def _announce(choice: Choice, log: str | None) -> None:
    """Say a new choice once: a log line, the table for DEBUG, and what deserves a warning."""
    backend, platform = choice.required(), choice.platform
    layer = choice.layer.name if choice.layer else ""
    line = f"{backend.name} attends, {layer} stores and selects ({choice.chosen_by}): "
    line += f"{choice.request} on {platform}"
    _LOG.info("%s", line)
    _LOG.debug("%s", choice)
    if log is not None:
        sys.stderr.write(f"dash_portable: {line}\n" if log == "choice" else f"{choice}\n")
    if (backend.name, platform.arch) in _warned or platform.vendor is Vendor.CPU:
        return
    _warned.add((backend.name, platform.arch))
    remarks = next(one.remarks for one in choice.decisions if one.backend is backend)
    if backend.fallback and not choice.forced:
        warnings.warn(f"{backend.name} attends on a GPU, slowly\n{choice}", RuntimeWarning, 3)
    elif choice.layer and choice.layer.fallback and not choice.forced:
        text = f"{layer} stores and selects on a GPU, slowly"
        warnings.warn(f"{text}\n{choice}", RuntimeWarning, 3)
    elif any(remark.startswith("not run by us") for remark in remarks):
        _LOG.warning("%s: %s", backend.name, ", ".join(remarks))


def plan(step: Step, request: Request, *, backend: str | None = None) -> tuple[Choice, Runner]:
    """Choose for a step and plan it: the choice, and the runner that serves the step's layers.

    A library that refuses to plan (BackendError) is remembered and the next one is asked, unless it
    was forced. Raises BackendError, naming backend, chooser and versions, for anything else that
    fails while planning.
    """
    while True:
        choice = choice_for(request, step.device, backend=backend)
        row = choice.required()
        try:
            return choice, row.load()(step)
        except Exception as error:  # re-raised with who chose what, or remembered as a refusal
            refused = isinstance(error, BackendError) and choice.forced is None
            if not refused:
                raise BackendError(_failure(choice, error)) from error
            text = probe.failed(error).text
            _plans.setdefault((choice.request, choice.platform), {})[row.entry] = text
            for key in [key for key, known in _choices.items() if known is choice]:
                del _choices[key]


def _failure(choice: Choice, error: Exception) -> str:
    row = choice.required()
    versions = " ".join(probe.identity(row, choice.platform)[2:])
    return (
        f"backend {row.name!r} ({choice.chosen_by}) failed while planning: "
        f"{probe.failed(error).text}\nrequest   {choice.request}\nversions  {versions}"
    )
