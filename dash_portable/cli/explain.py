"""`explain`: who would attend for a request, here or elsewhere, and why not the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from dash_portable.config import BLOCKS, check_block_size, check_head_dim
from dash_portable.errors import found_needed, unknown_word
from dash_portable.request import DTYPES, FEATURES, PHASES, Request

_DTYPES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}


def dtype_named(name: str) -> str:
    """torch's name of a dtype given by it or by its short form; ArgumentError for another word."""
    found = _DTYPES.get(name.lower(), name.lower())
    if found not in DTYPES:
        raise unknown_word("dtype", name, [*DTYPES, *_DTYPES])
    return found


def requests(
    phase: str,
    dtype: str,
    head_dim: int,
    group_size: int,
    block: int,
    block_size: int,
    needs: list[str],
) -> tuple[Request, ...]:
    """A request for the phase, or one for each phase where it is "both"."""
    features = [word for words in needs for word in words.replace(",", " ").split()]
    for name in features:
        if name not in FEATURES:
            raise unknown_word("needs", name, FEATURES)
    if block not in BLOCKS:
        near = min(BLOCKS, key=lambda one: abs(one - block))
        raise found_needed("block", block, f"one of {' '.join(map(str, BLOCKS))} (nearest: {near})")
    check_block_size(block_size, block)
    check_head_dim(head_dim)
    if phase not in (*PHASES, "both"):
        raise unknown_word("phase", phase, [*PHASES, "both"])
    found = dtype_named(dtype)
    first = Request(
        phase=PHASES[0] if phase == "both" else phase,
        dtype=found,
        cache_dtype=found,
        head_dim=head_dim,
        group_size=group_size,
        block=block,
        block_size=block_size,
        **dict.fromkeys(features, True),
    )
    return tuple(replace(first, phase=one) for one in PHASES) if phase == "both" else (first,)


def explain(
    phase: Annotated[str, typer.Option(help="prefill, decode or both.")] = "both",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 128,
    group_size: Annotated[int, typer.Option(help="Query heads per kv head.")] = 1,
    block: Annotated[int, typer.Option(help="Tokens of a sparse block.")] = 32,
    block_size: Annotated[int, typer.Option(help="Tokens of a cache block.")] = 64,
    needs: Annotated[
        list[str] | None,
        typer.Option(help=f"What is needed besides: {', '.join(FEATURES)}. May be repeated."),
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="Pretend this arch or card: sm90, gfx942, B580, cpu, ...")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="As if this backend were forced.")] = None,
    disable: Annotated[
        list[str] | None, typer.Option(help="As if this backend were disabled. May be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Say who would attend for a request, here or on another platform, and why not the others."""
    from dash_portable.cli.terminal import choice_table, console, stage_lines, write_json
    from dash_portable.explanation import explain as explain_one

    choices = [
        choice
        for request in requests(phase, dtype, head_dim, group_size, block, block_size, needs or [])
        for choice in explain_one(request, platform, backend=backend, disable=disable).choices
    ]
    if json:
        write_json([choice.to_dict() for choice in choices])
        return
    out = console()
    out.print(f"[bold]platform[/]  {choices[0].platform}")
    for note in choices[0].platform.notes:
        out.print(f"          {note}", style="dim")
    for choice in choices:
        out.print()
        out.print(choice_table(choice, f"{choice.request}"))
        for line in stage_lines(choice):
            out.print(f"  {line}", style="dim", markup=False)
        if choice.backend is None:
            out.print(choice.refusal().splitlines()[-1], style="yellow", markup=False)
