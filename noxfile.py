"""One session a check: `nox -s audit`. The same steps as in CI; ci/test.sh holds what each of them
runs.
"""

import nox

nox.options.sessions = ["lint", "types", "matrix", "docs", "cpu", "interpreter", "audit"]
# The steps run in the environment that nox was started from: six copies of torch would gain
# nothing.
nox.options.default_venv_backend = "none"


def _step(session: nox.Session, *steps: str) -> None:
    session.run(
        "bash", "ci/test.sh", *steps, *session.posargs, env={"PYTHON": "python"}, external=True
    )


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: format and rules."""
    _step(session, "lint")


@nox.session
def types(session: nox.Session) -> None:
    """mypy."""
    _step(session, "types")


@nox.session
def matrix(session: nox.Session) -> None:
    """The lanes of ci/vendors.json are right, and the workflow is theirs."""
    _step(session, "matrix")


@nox.session
def docs(session: nox.Session) -> None:
    """The generated pages are current."""
    _step(session, "docs")


@nox.session
def cpu(session: nox.Session) -> None:
    """The tests, kernels excepted."""
    _step(session, "cpu")


@nox.session
def interpreter(session: nox.Session) -> None:
    """The kernels in Triton's interpreter, against the oracle."""
    _step(session, "interpreter")


@nox.session
def rehearsal(session: nox.Session) -> None:
    """Every invariant and the GPU's proofs through the kernels, in the interpreter."""
    _step(session, "rehearsal")


@nox.session
def audit(session: nox.Session) -> None:
    """Kernels compiled for six GPUs, held against their limits."""
    _step(session, "audit")


@nox.session(name="audit-full")
def audit_full(session: nox.Session) -> None:
    """Kernels compiled for all twelve GPUs."""
    _step(session, "audit-full")


@nox.session(name="kernels-page")
def kernels_page(session: nox.Session) -> None:
    """docs/kernels.md is current."""
    _step(session, "kernels-page")


@nox.session(name="audit-nvidia")
def audit_nvidia(session: nox.Session) -> None:
    """Kernels compiled for NVIDIA's six: Triton 3.4 brings no linker for AMD."""
    _step(session, "audit-nvidia")


@nox.session
def intel(session: nox.Session) -> None:
    """Intel's Triton: SPIR-V, native code, execution on the CPU."""
    _step(session, "intel")


@nox.session
def faults(session: nox.Session) -> None:
    """Planted faults are caught, each by the lane meant for it."""
    _step(session, "faults")


@nox.session
def device(session: nox.Session) -> None:
    """The tests on this machine's GPU; $LANE_VENDOR says whose it must be."""
    _step(session, "device")


@nox.session
def simulated(session: nox.Session) -> None:
    """Every lane that needs no GPU: all targets, oldest and newest Triton and torch, Intel."""
    session.run("bash", "ci/simulated.sh", *session.posargs, external=True)
