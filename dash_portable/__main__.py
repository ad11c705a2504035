"""The command line: `python -m dash_portable` and `dash-portable`."""

from __future__ import annotations

import sys

_NEEDED = "dash-portable[cli]"


def main(arguments: list[str] | None = None) -> int:
    """Run a command; gives its exit status: 0 well, 1 a check failed, 2 a wrong argument."""
    try:
        import rich  # noqa: F401 - asked here, so that its absence is not met half way
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f"the command line needs {error.name}, which is not installed: "
            f"python -m pip install '{_NEEDED}'",
            file=sys.stderr,
        )
        return 2
    from dash_portable.cli.app import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
