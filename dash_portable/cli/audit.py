"""`audit`: compile every kernel for every card, and hold its needs against what the card has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dash_portable.audit import Row


def audit(
    targets: Annotated[
        str, typer.Option(help="Comma list of cards' archs (see --list), or quick, or all.")
    ] = "all",
    only: Annotated[str, typer.Option(help="Comma list of cases; all if empty.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Compiles at a time.")] = 1,
    limit: Annotated[float, typer.Option(help="Seconds of processor time for one compile.")] = 120,
    listing: Annotated[
        bool, typer.Option("--list", help="Only name the cards, with their limits.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of lines.")] = False,
) -> None:
    """Compile every kernel for every card, without the cards; status 1 when one does not fit."""
    from dash_portable import audit as auditing
    from dash_portable.cli.terminal import console, progress, write_json

    named = {"all": list(auditing.TARGETS), "quick": list(auditing.QUICK)}
    cases = [name for name in only.split(",") if name] or None
    out = console()
    if listing:
        typer.echo(auditing.listing())
        return
    with progress() as bar:
        task = bar.add_task("compile", total=None)

        def done(row: Row, count: int, total: int) -> None:
            bar.update(task, completed=count, total=total, description=f"{row.target} {row.case}")
            if not json:
                bar.console.print(auditing.line(row), markup=False, style="" if row.ok else "red")

        rows = auditing.run_audit(
            named.get(targets, targets.split(",")), cases, jobs, limit, progress=done
        )
    if json:
        write_json([row.to_json() for row in rows])
    else:
        out.print(auditing.render(rows).splitlines()[-1], markup=False)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)
