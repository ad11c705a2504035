"""`warmup`: compile what serving will need, before it serves."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from dash_portable.cli.explain import dtype_named
from dash_portable.errors import found_needed, unknown_word

if TYPE_CHECKING:
    from dash_portable.audit import Row
    from dash_portable.trial.warm import Warmed


def warmup(
    context: typer.Context,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 10,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; as many as heads.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    block_size: Annotated[int, typer.Option(help="Tokens of a cache block.")] = 64,
    max_model_len: Annotated[int, typer.Option(help="Tokens of the longest sequence.")] = 32768,
    max_rows: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 256,
    calls: Annotated[
        list[str] | None,
        typer.Option(help="step, established or sharing (a page table). May be repeated."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Force this backend.")] = None,
    graph: Annotated[bool, typer.Option(help="Decode steps as they are captured.")] = True,
    platform: Annotated[
        str | None,
        typer.Option(help="Without this card: cross-compile all of audit's cases for sm90, ..."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Compile all that steps of these shapes need, and list it; nothing compiles while serving.

    Give the shapes that the server will use: heads, dtype, cache blocks and the longest sequence
    are part of what is compiled. Kernels stay in Triton's cache folder.
    """
    if platform is not None:
        free = {"platform", "json"}
        for name in sorted(context.params.keys() - free):
            # By its name: typer carries a parser of its own in some versions.
            if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
                needed = "no shapes beside --platform: it compiles audit's cases, of the model's"
                raise found_needed(name, context.params[name], needed)
        _elsewhere(platform, json=json)
        return
    import torch

    from dash_portable.cli.terminal import console, progress, write_json
    from dash_portable.document import model_config
    from dash_portable.platform.detect import current_platform
    from dash_portable.trial import warm

    for call in calls or ():
        if call not in warm.CALLS:
            raise unknown_word("calls", call, warm.CALLS)
    here = current_platform()
    device = torch.device(here.device_type)
    server = warm.Server(
        config=model_config(),
        heads=heads,
        kv_heads=kv_heads or heads,
        dtype=getattr(torch, dtype_named(dtype)),
        device=device,
        block_size=block_size,
        max_model_len=max_model_len,
        backend=backend,
        graph=graph and device.type != "cpu",
    )
    with progress() as bar:
        task = bar.add_task("warm up", total=None)
        found = warm.warm_up(
            server,
            max_rows=max_rows,
            calls=calls or (warm.STEP, warm.ESTABLISHED),
            progress=lambda step, done, total: bar.update(
                task, completed=done, total=total, description=step
            ),
        )
    if json:
        write_json(
            {
                "platform": here.to_dict(),
                "steps": found.steps,
                "seconds": found.seconds,
                "backends": found.backends,
                "compiled": [one.to_dict() for one in found.compiled],
            }
        )
        return
    out = console()
    out.print(f"on {here}", markup=False)
    out.print(", ".join(f"{phase} by {name}" for phase, name in found.backends.items()))
    _show(found)


def _show(found: Warmed) -> None:
    from dash_portable.cli.terminal import console, table

    out = console()
    if found.compiled:
        made = table("kernel", "variants", "first asked for by", numbers=(1,))
        counts = Counter(one.kernel for one in found.compiled)
        first: dict[str, str] = {}
        for one in found.compiled:
            first.setdefault(one.kernel, one.step)
        for kernel, count in counts.items():
            made.add_row(kernel, str(count), first[kernel])
        out.print(made)
    what = f"{len(found.compiled)} kernels compiled or loaded" if found.compiled else "no kernel"
    out.print(f"{found.steps} steps, {what}, {found.seconds:.1f} s")


def _elsewhere(platform: str, *, json: bool) -> None:
    """Cross-compile the model's kernels for a card that is not here."""
    from dash_portable import audit
    from dash_portable.cli.terminal import console, progress, write_json

    with progress() as bar:
        task = bar.add_task(platform, total=None)

        def done(row: Row, count: int, total: int) -> None:
            bar.update(task, completed=count, total=total, description=row.case)

        rows = audit.run_audit([platform], progress=done)
    if json:
        write_json([row.to_json() for row in rows])
    else:
        console().print(audit.render(rows), markup=False)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)
