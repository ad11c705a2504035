"""Native builds of the Intel lane: what ends one, with a stand-in for Intel's offline compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.intel import spirv

WRITES = 'touch "${@: -1}/kernel.bin"'  # the last argument is the folder


def built(script: str, limit: float, monkeypatch: pytest.MonkeyPatch, folder: Path):
    tool = (["bash", "-c", script, "ocloc"], {"PATH": "/usr/bin:/bin"})
    monkeypatch.setattr(spirv, "_offline_compiler", lambda home: tool)
    return spirv.build(folder / "kernel.spv", "pvc", folder, limit)


@pytest.mark.parametrize(
    ("script", "limit", "clock", "said"),
    [
        ("while :; do :; done", 1, 100, "not built within 1 s of processor time"),
        ("exec sleep 60", 0.1, 10, "not built within 1 s"),
        ("echo no such device; exit 1", 1, 100, "no such device"),
        ("true", 1, 100, ""),  # said well and wrote nothing
    ],
    ids=["works", "waits-for-ever", "refuses", "nothing"],
)
def test_a_build_that_does_not_end_well(
    script: str,
    limit: float,
    clock: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.setattr(spirv, "CLOCK", clock)
    row = built(script, limit, monkeypatch, tmp_path)
    assert not row["ok"]
    assert said in row["words"]
    assert "spills" not in row


def test_a_build_that_waits_for_a_processor_is_not_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(spirv, "CLOCK", 100)
    row = built(f"sleep 1.5; {WRITES}", 1, monkeypatch, tmp_path)
    assert row["ok"]
    assert row["spills"] == 0


def test_spills_are_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    words = "kernel compiled SIMD16 allocated 128 regs and spilled around 894"
    row = built(f"echo {words}; {WRITES}", 5, monkeypatch, tmp_path)
    assert (row["simd"], row["registers"], row["spills"]) == ("SIMD16", 128, 894)
