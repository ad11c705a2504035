"""The commands under one name, and how their errors are told."""

from __future__ import annotations

import importlib.metadata
import sys

import typer

import dash_portable
from dash_portable.cli.audit import audit
from dash_portable.cli.bench import bench
from dash_portable.cli.demo import demo
from dash_portable.cli.doctor import doctor
from dash_portable.cli.explain import explain
from dash_portable.cli.warmup import warmup
from dash_portable.errors import DashError

# What is missing -> what to install; torch comes from the vendor, so there is no one line for it.
_INSTALL = {
    "torch": "install the torch build of your GPU's vendor first, "
    "or for a CPU: python -m pip install 'dash-portable[cpu]'",
    "numpy": "python -m pip install 'dash-portable[cpu]'",
    "triton": "python -m pip install 'dash-portable[cpu]'",
    "matplotlib": "python -m pip install 'dash-portable[plot]'",
    "PIL": "python -m pip install 'dash-portable[plot]'",
}

app = typer.Typer(
    name="dash-portable",
    help="DASH block-sparse attention on NVIDIA, AMD and Intel GPUs and on a CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (doctor, explain, demo, bench, warmup, audit):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(dash_portable.__version__)
        except importlib.metadata.PackageNotFoundError:
            typer.echo("not installed: run from its source tree")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """DASH block-sparse attention on NVIDIA, AMD and Intel GPUs and on a CPU."""


def run(arguments: list[str] | None = None) -> int:
    """Run a command; errors of ours are one line on stderr, other ones keep their traceback."""
    try:
        app(arguments)
    except SystemExit as stop:  # a command always ends so; only its status is wanted here
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except DashError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    except ModuleNotFoundError as error:
        if error.name not in _INSTALL:
            raise
        sys.stderr.write(f"{error.name} is not installed: {_INSTALL[error.name]}\n")
        return 2
    return 0
