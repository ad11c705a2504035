"""The command line: what it says, in which form, and with which status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
from dash_portable import dispatch
from dash_portable.__main__ import main
from dash_portable.choose import choose
from dash_portable.cli import doctor as doctor_module
from dash_portable.cli.explain import requests
from dash_portable.errors import ArgumentError
from dash_portable.platform.facts import ARCHS, Vendor

COMMANDS = ("doctor", "explain", "demo", "bench", "warmup", "audit")


@pytest.fixture(autouse=True)
def _own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command remembers of this machine stays in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def without(*names: str) -> str:
    """Code that makes packages unimportable and then runs the command line with sys.argv."""
    return (
        "import sys\n"
        f"for name in {names!r}: sys.modules[name] = None\n"
        "from dash_portable.__main__ import main\n"
    )


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {command} " in shown for command in COMMANDS)
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        assert "--" in capsys.readouterr().out


def test_help_loads_no_torch() -> None:
    done = python(
        "import sys; from dash_portable.__main__ import main; status = main(['--help'])\n"
        "assert status == 0 and 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_without_the_extra_it_says_which(name: str) -> None:
    done = python(without(name) + "sys.exit(main(['doctor']))")
    assert done.returncode == 2
    assert done.stdout == ""
    assert name in done.stderr
    assert "pip install 'dash-portable[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["demo", "bench", "warmup"])
def test_without_torch_it_says_what_to_install(command: str) -> None:
    done = python(without("torch") + f"sys.exit(main(['{command}']))")
    assert done.returncode == 2
    assert "torch is not installed" in done.stderr
    assert "dash-portable[cpu]" in done.stderr


def test_doctor_survives_without_torch() -> None:
    done = python(without("torch", "triton") + "sys.exit(main(['doctor', '--json']))")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "torch cannot be imported" in report["platform"]["notes"][0]
    assert report["self_tests"] == {}


def test_doctor_tells_facts_backends_and_verdicts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for text in ("'0,2'", "not obeyed here", "torch", "sdpa", "flash_attn3", "passed"):
        assert text in shown


def test_doctor_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["platform"]["vendor"] in [vendor.value for vendor in Vendor]
    assert report["self_tests"]["sdpa"] == ""
    assert {choice["request"]["phase"] for choice in report["choices"]} == {"prefill", "decode"}


def test_doctor_tries_nothing_if_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-self-test"]) == 0
    assert json.loads(capsys.readouterr().out)["self_tests"] == {}


def test_doctor_fails_when_a_backend_computes_wrongly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "_tested", lambda **_: {"sdpa": "off by 3"})
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    assert "off by 3" in shown


def test_doctor_fails_when_the_shared_layer_selects_wrongly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor_module, "_tested", lambda **_: {doctor_module.LAYER: "selection: 3 rows differ"}
    )
    assert main(["doctor"]) == 1
    assert "self-test FAILED: selection: 3 rows differ" in capsys.readouterr().out


def test_doctor_reports_a_wrong_environment_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASH_PORTABLE_BACKND", "eager")
    assert main(["doctor"]) == 2
    shown = capsys.readouterr().out
    assert "DASH_PORTABLE_BACKEND" in shown
    assert "platform" in shown


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("BACKEND", "flash_attn3", "vendor: asked cpu, offers nvidia"),
        ("BACKEND", "prefill=triton", "forced by DASH_PORTABLE_BACKEND=prefill=triton"),
        ("PLATFORM", "gfx942", "unset it to run an op"),
    ],
)
def test_doctor_begins_with_what_cannot_serve(
    variable: str,
    value: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(f"DASH_PORTABLE_{variable}", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["doctor", "--no-self-test"]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("refused ")
    assert words in first
    assert main(["doctor", "--no-self-test", "--json"]) == 2
    assert words in json.loads(capsys.readouterr().out)["refused"][0]


def test_doctor_shows_what_is_forced_and_can(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASH_PORTABLE_BACKEND", "eager")
    assert main(["doctor", "--no-self-test", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["refused"] == []
    assert [choice["chosen"] for choice in report["choices"]] == ["eager", "eager"]


@pytest.mark.parametrize("arch", ["sm90", "gfx942", "bmg", "cpu", "gfx1100", "sm120"])
def test_explain_knows_every_platform(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--platform", arch]) == 0
    shown = capsys.readouterr().out
    assert arch in shown
    for row in dispatch.table():
        assert row.name in shown.replace("\n", "")
    assert shown.count("chosen ") >= 2


def test_explain_gives_the_choice_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--phase", "decode", "--dtype", "fp16", "--head-dim", "96", "--group-size", "4"]
    arguments += ["--block-size", "16", "--needs", "lse,graph", "--platform", "gfx942", "--json"]
    assert main(["explain", *arguments]) == 0
    (choice,) = json.loads(capsys.readouterr().out)
    request = choice["request"]
    assert (request["dtype"], request["head_dim"], request["group_size"]) == ("float16", 96, 4)
    assert request["lse"]
    assert request["graph"]
    assert not request["in_place"]
    assert choice["platform"]["pretended"]


def test_explain_says_how_to_get_out_of_a_forced_backend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "--platform", "cpu", "--backend", "triton"]) == 0
    assert "pass backend='AUTO'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--platform", "bm"], "nearest: bmg"),
        (["--needs", "grafh"], "nearest: graph"),
        (["--dtype", "float17"], "nearest: float16"),
        (["--phase", "decod"], "both decode prefill (nearest: decode)"),
        (["--block", "33"], "block: found 33, needed one of 8 16 32 64 128 (nearest: 32)"),
        (["--block-size", "48"], "block_size: found 48, needed a multiple or a divisor"),
        (["--platform", "gfx9420"], "platform: found 'gfx9420', needed an arch or a card"),
        (["--backend", "triten"], "nearest: triton"),
        (["--disable", "aitre"], "nearest: aiter"),
    ],
)
def test_explain_names_what_is_wrong(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err


def test_requests_are_made_from_flags() -> None:
    both = requests("both", "bf16", 128, 1, 32, 64, ["in_place", "lse graph"])
    assert [one.phase for one in both] == ["prefill", "decode"]
    assert both[0].features == ("in_place", "lse", "graph")
    assert both[0].cache_dtype == "bfloat16"
    for width in (0, 100):
        with pytest.raises(ArgumentError, match=r"head_dim: .* a multiple of 16 from 64 to 256"):
            requests("decode", "bf16", width, 1, 32, 64, [])


def test_explain_and_the_dispatcher_agree(capsys: pytest.CaptureFixture[str]) -> None:
    from dash_portable.explanation import pretended_here

    for arch in [arch.token for arch in ARCHS][::7]:
        assert main(["explain", "--phase", "decode", "--platform", arch, "--json"]) == 0
        (shown,) = json.loads(capsys.readouterr().out)
        (request,) = requests("decode", "bfloat16", 128, 1, 32, 64, [])
        choice = choose(request, pretended_here(arch), backends=dispatch.table())
        assert shown["chosen"] == (choice.backend.name if choice.backend else None)


def test_bench_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert "decode 32K x 64" in capsys.readouterr().out
    assert main(["bench", "--size", "big"]) == 2
    assert main(["bench", "--only", "nothing like it"]) == 2
    capsys.readouterr()
    assert main(["bench", "--backend", "sdap"]) == 2
    said = capsys.readouterr()
    assert "(nearest: sdpa)" in said.err
    assert "measured" not in said.out  # nothing is timed before


def test_audit_lists_its_cards(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--list"]) == 0
    assert "gfx942" in capsys.readouterr().out


def test_bench_measures_checks_and_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "2K", "--backend", "sdpa", "--heads", "2", "--budget", "0.01"]
    out = tmp_path / "out"
    assert main(["bench", *arguments, "--record", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert (out / "bench.png").read_bytes()[:4] == b"\x89PNG"
    data = json.loads((out / "bench.json").read_text())
    ways = {one["way"]: one for one in data["results"]}
    assert set(ways) == {"sdpa", "dense sdpa"}
    assert ways["sdpa"]["error"] <= ways["sdpa"]["allowed"]
    assert 0 < ways["sdpa"]["floor"] < ways["sdpa"]["times"]["warm"]
    assert "recorded sdpa prefill" in shown
    kept = json.loads((tmp_path / "cache/dash_portable/records.json").read_text())
    assert [row["phase"] for row in kept["measured"]["sdpa"]] == ["prefill"]


def test_warmup_runs_every_kind_of_step(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--heads", "1", "--max-rows", "2", "--max-model-len", "512", "--json"]
    arguments += ["--calls", "step", "--calls", "sharing", "--calls", "established"]
    assert main(["warmup", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["backends"]) == {"prefill", "decode"}
    assert found["steps"] > 20
    assert main(["warmup", "--calls", "steps"]) == 2


def test_warmup_for_an_absent_card_takes_no_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--platform", "sm90", "--heads", "4"]) == 2
    assert "heads: found 4, needed no shapes beside --platform" in capsys.readouterr().err
    assert main(["warmup", "--platform", "sm9"]) == 2
    assert "nearest: sm90" in capsys.readouterr().err
