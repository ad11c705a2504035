"""What every test session does: one thread, the vendor that a lane wants, markers of vendors.

torch is imported by the fixtures: other conftests say things to Triton before anything imports it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

VENDORS = ("nvidia", "amd", "intel")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-vendor",
        choices=(*VENDORS, "cpu"),
        metavar="VENDOR",
        help="fail at once unless this machine's device is VENDOR's (nvidia, amd, intel or cpu)",
    )

    parser.addoption(
        "--full", action="store_true", help="also what is marked full: whole grids of cases"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU of any vendor")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def missing(vendor: str) -> str:
    """Why a vendor's tests cannot run here; "" when they can."""
    import torch  # noqa: F401  (what is imported decides what the detector can ask)

    from dash_portable import current_platform

    platform = current_platform()
    return "" if platform.vendor.value == vendor else f"no {vendor} device: this is {platform}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """A lane without its device fails here, not by skipping all that it was made for."""
    vendor = session.config.getoption("--require-vendor")
    reason = missing(vendor) if vendor else ""
    if reason:
        pytest.exit(f"--require-vendor {vendor}: {reason}", returncode=1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        from tests.device import DEVICE

        if DEVICE.type == "cpu":
            pytest.skip("no GPU")
    for vendor in VENDORS:
        reason = missing(vendor) if item.get_closest_marker(vendor) else ""
        if reason:
            pytest.skip(reason)


@pytest.fixture(autouse=True, scope="session")
def records_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test makes the package remember of this machine is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The tensors of tests are small: threads that wait for each other cost thirty times more."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
