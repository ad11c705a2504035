"""The demo: documents through prefill and decode, held to the oracle, drawn and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dash_portable import document
from dash_portable.backends.sdpa import Runner
from dash_portable.document import IMAGE, MARKER, TEXT, Document
from dash_portable.trial import inputs
from dash_portable.trial.feed import Feed
from dash_portable.trial.reading import Reading, keys_read, read

pytest.importorskip("typer")
from dash_portable.__main__ import main


def small(made: Document, **changed: object) -> Feed:
    sizes = {"config": document.model_config(), "heads": 2, "kv_heads": 2, "block_size": 32}
    return Feed(document=made, **{**sizes, **changed})  # type: ignore[arg-type]


def demo(folder: Path, *arguments: str) -> tuple[int, dict[str, object]]:
    status = main(["demo", "--heads", "2", "--out", str(folder), *arguments])
    found = json.loads((folder / "demo.json").read_text()) if status in (0, 1) else {}
    return status, found


DOCUMENTS = {
    "pages": document.paged(2, answer=6, instruction=9),
    "tiles": document.tiled(2, 2, answer=4),
    "text": document.plain(700, answer=3),
    "short": Document(name="short", prompt=(MARKER, IMAGE, TEXT), answer=(MARKER, TEXT)),
    "ends in an image": Document(
        name="image", prompt=(TEXT, IMAGE) * 90 + (MARKER,) + (IMAGE,) * 250, answer=(TEXT,) * 3
    ),
    "no answer": document.paged(1, answer=0),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_kind_of_document_agrees_with_the_oracle(name: str) -> None:
    reading = read(small(DOCUMENTS[name]))
    assert reading.ok, reading.checks
    names = [check.name for check in reading.checks["prefill"]]
    assert names == ["rotation", "selection", "attention"]
    assert ("decode" in reading.checks) == bool(DOCUMENTS[name].answer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_types_and_backends_agree_with_the_oracle(dtype: torch.dtype, backend: str) -> None:
    reading = read(small(DOCUMENTS["pages"], dtype=dtype, kv_heads=1), backend=backend)
    assert reading.ok, reading.checks
    assert reading.choices["decode"].required().name == backend


def test_chunks_choose_the_same_blocks() -> None:
    whole, cut = (read(small(DOCUMENTS["pages"]), chunk=chunk) for chunk in (None, 97))
    assert torch.equal(whole.ids, cut.ids)
    assert torch.equal(whole.read, cut.read)


def test_rows_read_their_blocks_and_window_once() -> None:
    config = document.model_config()
    ids = torch.tensor([[-1, -1], [0, -1], [2, 0]], dtype=torch.int32)
    # 200 - 127 = 73: block 2 is read up to token 73, the window has the rest.
    assert keys_read(ids, torch.tensor([50, 300, 200]), config).tolist() == [51, 160, 128 + 9 + 32]


def test_rows_bound_to_their_page_choose_only_there() -> None:
    reading = read(small(DOCUMENTS["pages"]))
    answer = slice(len(DOCUMENTS["pages"].prompt), None)
    assert bool(reading.own[answer].all())
    first = reading.ids[answer][0]
    assert int(first.max()) <= 273 // 32
    assert not bool(reading.own[:128].any())


def test_inputs_are_the_same_whatever_comes_first() -> None:
    pages, height = inputs.heights(Document(name="", prompt=(2, 1, 1, 2, 1, 0), answer=(2, 0)))
    assert pages == [1, 1, 1, 2, 2, 0, 1, 1]
    assert height[:3] == [0.0, 1 / 3, 2 / 3]
    assert height[6:] == [0.0, 0.5]


def test_the_command_writes_figures_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    status, found = demo(tmp_path / "out", "--pages", "2", "--new-tokens", "4", "--layers", "2")
    shown = capsys.readouterr().out
    assert status == 0
    assert found["ok"] is True
    phases = found["phases"]
    assert isinstance(phases, dict)
    assert set(phases) == {"prefill", "decode"}
    assert 0 < phases["prefill"]["keys_read"] < phases["prefill"]["keys_dense"]
    assert {"plan", "store", "select", "attend"} == set(phases["decode"]["seconds"])
    assert (tmp_path / "out/selection.png").read_bytes().startswith(b"\x89PNG")
    for word in ("chosen", "against the oracle", "keys read", "selection.png"):
        assert word in shown


def test_the_command_fails_when_a_row_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Runner.run

    def wrong(self: Runner, query, cache, ids, bias, out) -> None:  # type: ignore[no-untyped-def]
        right(self, query, cache, ids, bias, out)
        out += 0.5

    monkeypatch.setattr(Runner, "run", wrong)
    status, found = demo(tmp_path, "--pages", "1", "--new-tokens", "1", "--backend", "sdpa")
    assert status == 1
    assert found["ok"] is False
    assert "WRONG" in capsys.readouterr().out


def test_the_command_takes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(json.dumps({"roles": [2, *[1] * 200, 0], "answer": [2, 0]}))
    status, found = demo(tmp_path / "out", str(path))
    assert (status, found["prompt_tokens"], found["answer_tokens"]) == (0, 202, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pages", "0"], "pages: found 0, needed at least 1"),
        (["--chunk", "0"], "chunk: found 0"),
        (["--dtype", "bf17"], "nearest: bf16"),
        (["--backend", "spda"], "nearest: sdpa"),
        (["--heads", "3", "--kv-heads", "2"], "multiple"),
        (["--block-size", "48"], "block_size"),
        (["--block-size", "0"], "block_size: found 0"),
        (["--out", "/dev/null/x"], "out: found /dev/null/x, needed a folder"),
        (["none.json"], "no readable JSON"),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(tmp_path, "--pages", "1", *arguments)[0] == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_picture_of_a_long_document_stays_small(tmp_path: Path) -> None:
    picture = pytest.importorskip("dash_portable.picture")
    made = document.paged(200, answer=40)
    tokens = len(made)
    ids = torch.full((tokens, 12), -1, dtype=torch.int32)
    ids[2000:, 0] = torch.arange(2000, tokens) // 64 - 4
    own = torch.arange(tokens) % 2 == 0
    reading = Reading(ids=ids, own=own, read=torch.full((tokens,), 128))
    path = tmp_path / "selection.png"
    picture.selection(path, reading, made, document.model_config())
    assert path.stat().st_size < 2 << 20
