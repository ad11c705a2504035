"""`doctor`: what is this machine, what is installed, who can attend, and does it compute right?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dash_portable.backends.spec import Backend
    from dash_portable.platform.facts import Platform


LAYER = "store and select"  # under which the shared layer's self-test is told


def _gathered() -> dict[str, Any]:
    """The package's report; in a wrong environment, the machine's facts and what is wrong."""
    from dash_portable.errors import ArgumentError
    from dash_portable.explanation import report
    from dash_portable.platform import detect

    try:
        return report()
    except ArgumentError as error:
        return {
            **detect.report(),
            "error": str(error),
            "choices": [],
            "tracebacks": {},
            "refused": [],
        }


def _able(platform: Platform, *, unverified: bool) -> dict[str, Backend]:
    """Backends that can serve a typical request here, and so can be tried; the shared layer too.

    A library that was never verified here may compile for minutes at its first call, so it is
    only among them if it would be chosen, which tests it anyway, or if asked for. A verdict of
    before keeps nobody away: it may be about what has been mended since.
    """
    from dash_portable.backends import probe, records
    from dash_portable.dispatch import survey, table
    from dash_portable.explanation import typical_requests

    found: dict[str, Backend] = {}
    for request in typical_requests():
        choice = survey(request, platform, table(), verdicts=False)
        for one in choice.decisions:
            row = one.backend
            known = records.verdict(probe.tested_as(row, platform)) is not None
            easy = known or not row.self_test or row is choice.backend
            if one.ok and (unverified or easy):
                found[row.name] = row
        if choice.layer is not None and choice.layer.self_test:
            found[LAYER] = choice.layer
    return found


def _tested(*, unverified: bool) -> dict[str, str]:
    """Backend -> "" when it agrees with the oracle here, else what is wrong."""
    from dash_portable.cli.terminal import progress
    from dash_portable.dispatch import platform_for, run_self_test, table

    platform = platform_for(None, table())
    rows, verdicts = _able(platform, unverified=unverified), dict[str, str]()
    with progress() as bar:
        for name, row in bar.track(rows.items(), description="self-test"):
            verdicts[name] = run_self_test(row, platform)
    return verdicts


def _refused(report: dict[str, Any]) -> bool:
    """Whether a verdict, of now or of before, keeps somebody from serving here."""
    answers = [
        one
        for choice in report["choices"]
        for decisions in (
            choice["decisions"],
            *(stage["decisions"] for stage in choice["stages"].values()),
        )
        for one in decisions
    ]
    return any(reason["code"] == "self_test" for one in answers for reason in one["rejections"])


def doctor(
    json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test", help="Also try libraries that nobody verified here; some compile first."
        ),
    ] = False,
    no_self_test: Annotated[
        bool, typer.Option("--no-self-test", help="Try nothing, only report.")
    ] = False,
) -> None:
    """Tell the machine's facts, every backend's reasons, and whether each computes right.

    A poor machine is no error. Status 1 when a backend computes wrongly, or did when it was last
    tested and is refused for that; 2 when a variable of ours holds something unknown or forces what
    cannot serve here; that is then the first line.
    """
    from dash_portable.cli.terminal import console, write_json

    report = _gathered()
    usable = "error" not in report and bool(report["probes"])
    tests = _tested(unverified=self_test) if usable and not no_self_test else {}
    if tests:  # who is chosen, and why not the others, as the tests leave it
        report = _gathered()
    report["self_tests"] = tests
    if json:
        write_json(report)
    else:
        _show(console(), report)
    if "error" in report or report["refused"]:
        raise typer.Exit(2)
    if any(tests.values()) or _refused(report):
        raise typer.Exit(1)


def _show(out: Console, report: dict[str, Any]) -> None:
    from rich.markup import escape

    from dash_portable.cli.terminal import facts

    platform = report["platform"]
    if "error" in report:
        out.print(f"[bold red]wrong environment[/]  {escape(report['error'])}", soft_wrap=True)
    for line in report["refused"]:
        out.print(f"refused  {line}", style="bold red", markup=False, soft_wrap=True)
    name = " ".join(str(platform[key]) for key in ("vendor", "arch", "device_name", "runtime"))
    rows = {"platform": " ".join(name.split()), "python": report["python"]}
    rows["system"] = report["system"]
    rows["installed"] = ", ".join(f"{k} {v}" for k, v in platform["packages"].items()) or "nothing"
    for finding in report["probes"]:
        what = f"{finding['count']} devices" if finding["count"] else finding["text"]
        rows[str(finding["vendor"])] = what
    for i, gpu in enumerate(report["seen"]):
        rows[f"seen {i}"] = f"{gpu['vendor']} {gpu['arch']} {gpu['name']}"
    for title in ("visible_devices", "ignored_variables", "settings"):
        for variable, value in report.get(title, {}).items():
            ignored = "  (another project's, not obeyed here)" if title.startswith("ign") else ""
            rows[variable] = f"{value!r}{ignored}"
    for i, note in enumerate(platform["notes"]):
        rows[f"note {i + 1}"] = note
    if "records" in report:
        rows["records"] = report["records"]
    out.print(facts(rows))
    _show_backends(out, report)
    for backend, trace in report["tracebacks"].items():
        out.print(f"\n[bold]{backend}[/] failed to import:")
        out.print(trace, style="dim", markup=False)


def _show_backends(out: Console, report: dict[str, Any]) -> None:
    """One line a backend; those that decline for the same reason are told together."""
    from rich.markup import escape

    from dash_portable.cli.terminal import table

    if not report["choices"]:
        return
    phases = {choice["request"]["phase"]: choice for choice in report["choices"]}
    made = table("backend", *phases, "self-test", "remarks, or why not", title="backends")
    declined: dict[str, list[str]] = {}
    names = dict.fromkeys(one["backend"] for c in phases.values() for one in c["decisions"])
    for name in names:
        cells, why = [], list[str]()
        verdict = report["self_tests"].get(name)
        for phase in phases.values():
            one = next(one for one in phase["decisions"] if one["backend"] == name)
            cells.append("chosen" if phase["chosen"] == name else "ok" if one["ok"] else "-")
            texts = list[str]()
            for r in one["rejections"]:
                if r["code"] == "self_test":  # of now or of before
                    verdict = r["offers"]
                else:
                    texts.append(f"{r['code']}: asked {r['asked']}, offers {r['offers']}")
            why += [text for text in [*texts, *one["remarks"]] if text not in why]
        if set(cells) == {"-"} and not verdict:
            declined.setdefault("\n".join(why), []).append(name)
            continue
        said = "not run" if verdict is None else "FAILED" if verdict else "passed"
        style = "bold red" if verdict else "green" if "chosen" in cells else None
        made.add_row(
            name, *cells, said, escape("\n".join([verdict] * bool(verdict) + why)), style=style
        )
    out.print()
    out.print(made)
    refusing = table("cannot serve", "why", title="\nnot for this machine or these requests")
    for text, group in declined.items():
        refusing.add_row(", ".join(group), escape(text), style="dim")
    if declined:
        out.print(refusing)
    out.print()
    stages = next(iter(phases.values()))["stages"]
    line = "  ".join(f"{stage}: {found['chosen']}" for stage, found in stages.items())
    verdict = report["self_tests"].get(LAYER)
    said = "" if verdict is None else f"  self-test FAILED: {verdict}" if verdict else "  passed"
    out.print(f"{line}{said}", style="bold red" if verdict else None, markup=False)
