"""`demo`: a document goes through prefill and decode on whatever is here, checked and drawn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dash_portable.cli.explain import dtype_named
from dash_portable.config import check_block_size
from dash_portable.errors import found_needed

if TYPE_CHECKING:
    from rich.console import Console

    from dash_portable.config import DashConfig
    from dash_portable.document import Document
    from dash_portable.trial.feed import Feed
    from dash_portable.trial.reading import Reading

_CPU_CHUNK = 512  # so that the progress bar moves


def chosen_document(
    sources: list[Path], pages: int, new_tokens: int | None, layers: int
) -> tuple[Document, DashConfig]:
    """The document that is meant: of a JSON file, of page images, or of `pages` pages."""
    from dash_portable import document

    answer = document.ANSWER if new_tokens is None else new_tokens
    config = document.model_config(layers)
    files = [source for source in sources if source.suffix.lower() == ".json"]
    if files and len(sources) > 1:
        raise found_needed("sources", f"{len(sources)} with JSON among them", "one JSON or images")
    if files:
        return document.from_json(files[0], answer=new_tokens, layers=layers)
    if sources:
        return document.from_images(sources, answer=answer), config
    return document.paged(pages, answer=answer), config


def _positive(name: str, value: int, least: int = 1) -> None:
    if value < least:
        raise found_needed(name, value, f"at least {least}")


def demo(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A JSON file (roles or token_ids, answer, config), or page images of which the "
            "sizes matter: one is tiled, several take 273 tokens each."
        ),
    ] = None,
    pages: Annotated[int, typer.Option(help="Pages, where no source is given.")] = 8,
    new_tokens: Annotated[
        int | None, typer.Option(help="Tokens to decode; 64 if a file does not say.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers, each with its own cache.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 10,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; as many as heads.")] = None,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    backend: Annotated[str | None, typer.Option(help="Force this backend.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a cache block.")] = 64,
    chunk: Annotated[
        int | None,
        typer.Option(help="Prompt tokens of one step; by default all on a GPU, 512 on a CPU."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the picture and the figures.")] = Path(
        "demo-out"
    ),
) -> None:
    """Read a document with attention of the model's true shapes, check rows, draw what was read.

    Status 1 when a row disagrees with the oracle.
    """
    import torch

    from dash_portable.cli.terminal import console, folder, progress
    from dash_portable.platform.detect import current_platform
    from dash_portable.trial.feed import Feed
    from dash_portable.trial.reading import read

    for name, value in (("layers", layers), ("heads", heads), ("pages", pages)):
        _positive(name, value)
    _positive("chunk", 1 if chunk is None else chunk)
    _positive("new-tokens", 0 if new_tokens is None else new_tokens, least=0)
    folder(out)
    begin = time.perf_counter()
    document, config = chosen_document(sources or [], pages, new_tokens, layers)
    check_block_size(block_size, config.block)
    screen, platform = console(), current_platform()
    screen.print(
        f"[bold]{document.name}[/]: {len(document.prompt)} prompt and {len(document.answer)} "
        f"answer tokens, {config.num_layers} layer{'s' * (config.num_layers > 1)} of {heads} heads "
        f"of {config.index_dim}, {dtype_named(dtype)}"
    )
    screen.print(f"on {platform}", markup=False)
    feed = Feed(
        document=document,
        config=config,
        heads=heads,
        kv_heads=kv_heads or heads,
        dtype=getattr(torch, dtype_named(dtype)),
        device=torch.device(platform.device_type),
        block_size=block_size,
        layers=config.num_layers,
        seed=seed,
    )
    with progress() as bar:
        task = bar.add_task("prefill", total=len(document))
        reading = read(
            feed,
            backend=backend,
            chunk=_CPU_CHUNK if chunk is None and feed.device.type == "cpu" else chunk,
            progress=lambda phase, done: bar.update(task, advance=done, description=phase),
        )
    figures = figures_of(feed, reading)
    figures["picture"] = _draw(out / "selection.png", feed, reading, figures)
    figures["seconds"] = time.perf_counter() - begin
    _show(screen, feed, reading, figures)
    path = out / "demo.json"
    path.write_text(_text(figures), encoding="utf-8")
    screen.print(f"figures  {path}", markup=False)
    screen.print(f"done in {figures['seconds']:.1f} s")
    if not reading.ok:
        raise typer.Exit(1)


def figures_of(feed: Feed, reading: Reading) -> dict[str, Any]:
    """Everything the demo found, ready for JSON."""
    prompt, tokens = feed.prompt_len, len(feed.document)
    spans = {"prefill": (0, prompt), "decode": (prompt, tokens)}
    phases: dict[str, Any] = {}
    for phase, choice in reading.choices.items():
        first, last = spans[phase]
        keys = int(reading.read[first:last].sum())
        dense = (last * (last + 1) - first * (first + 1)) // 2
        phases[phase] = {
            "backend": choice.backend.name if choice.backend else None,
            "shared_layer": choice.layer.name if choice.layer else None,
            "chosen_by": choice.chosen_by,
            "tokens": last - first,
            "layers": feed.layers,
            "seconds": reading.seconds[phase],
            "first_call_seconds": reading.first.get(phase),
            "keys_read": keys,
            "keys_dense": dense,
            "share_of_dense": keys / dense,
            "checks": [check.to_dict() for check in reading.checks.get(phase, [])],
            "choice": choice.to_dict(),
        }
    return {
        "ok": reading.ok,
        "document": feed.document.name,
        "prompt_tokens": prompt,
        "answer_tokens": tokens - prompt,
        "heads": feed.heads,
        "kv_heads": feed.kv_heads,
        "head_dim": feed.config.index_dim,
        "dtype": str(feed.dtype).removeprefix("torch."),
        "block_size": feed.block_size,
        "seed": feed.seed,
        "phases": phases,
    }


def _draw(path: Path, feed: Feed, reading: Reading, figures: dict[str, Any]) -> str | None:
    """Draw the selection; None, and no failure, where the plotting library is not installed."""
    try:
        from dash_portable.picture import selection
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "numpy"):
            raise
        return None
    names = " and ".join(
        dict.fromkeys(str(phase["backend"]) for phase in figures["phases"].values())
    )
    platform = next(iter(reading.choices.values())).platform
    selection(path, reading, feed.document, feed.config, f"first layer, {names} on {platform}")
    return str(path)


def _text(figures: dict[str, Any]) -> str:
    import json

    return json.dumps(figures, indent=2) + "\n"


def _show(screen: Console, feed: Feed, reading: Reading, figures: dict[str, Any]) -> None:
    from dash_portable.cli.terminal import choice_table, stage_lines, table, time_of
    from dash_portable.trial.reading import STAGES

    same = len({str(choice.backend) for choice in reading.choices.values()}) == 1
    for phase, choice in list(reading.choices.items())[: 1 if same else None]:
        screen.print()
        screen.print(
            choice_table(choice, "who attends" + ("" if same else f", {phase}"), brief=True)
        )
        for line in stage_lines(choice)[:2]:
            screen.print(line, style="dim", markup=False)
    screen.print()
    headings = ("", "tokens", *STAGES, "all, a token", "keys read", "of dense")
    made = table(*headings, title=f"times over {feed.layers} layer(s)", numbers=range(1, 10))
    for phase, row in figures["phases"].items():
        seconds = row["seconds"]
        made.add_row(
            phase,
            f"{row['tokens']}",
            *(time_of(seconds[stage]) for stage in STAGES),
            time_of(sum(seconds.values()) / row["tokens"]),
            f"{row['keys_read'] / row['tokens']:.0f} a row",
            f"{row['share_of_dense']:.1%}",
        )
    screen.print(made)
    for phase, took in reading.first.items():
        screen.print(f"first call of {phase} (compiles, not counted above): {time_of(took)}")
    screen.print()
    made = table(
        "check", "phase", "rows", "error", "allowed", "", title="against the oracle, float64"
    )
    for phase, checks in reading.checks.items():
        for check in checks:
            selecting = check.name == "selection"
            made.add_row(
                check.name,
                phase,
                str(check.rows),
                f"{check.error:.0f} rows differ" if selecting else f"{check.error:.2e}",
                "0" if selecting else f"{check.allowed:.2e}",
                f"{'ok' if check.ok else 'WRONG'} {check.note}".strip(),
                style=None if check.ok else "bold red",
            )
    screen.print(made)
    screen.print()
    if figures["picture"]:
        screen.print(f"picture  {figures['picture']}", markup=False)
    else:
        screen.print("no picture: python -m pip install 'dash-portable[plot]'", markup=False)
