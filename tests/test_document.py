"""Documents for trying things out: true shapes, files, images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dash_portable import document
from dash_portable.document import IMAGE, MARKER, TEXT
from dash_portable.errors import ArgumentError, ConfigError

SP = {
    "sparse_block_size": 32,
    "sparse_local_block": 4,
    "sparse_index_dim": 64,
    "dash_topk_blocks": 12,
    "dash_scale_per_layer": [60.0, 50.0],
    "dash_floor_per_layer": [1e-4, 1e-4],
    "sparse_main_rope_mode": "page2d",
    "training_stage": "dash",
    "dash_stage0": "head_cls",
}


def written(folder: Path, data: object) -> Path:
    path = folder / "document.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_page_is_a_marker_and_273_image_tokens() -> None:
    made = document.paged(3, answer=9, instruction=5)
    page = (MARKER,) + (IMAGE,) * 273
    assert made.prompt == page * 3 + (TEXT,) * 5
    assert made.answer == (MARKER, TEXT, TEXT) * 3
    assert len(made) == 3 * 274 + 5 + 9


@pytest.mark.parametrize(
    ("columns", "rows", "tokens"), [(2, 1, 273 + 210), (4, 4, 273 + 1640), (2, 8, 273 + 1680)]
)
def test_a_tiled_page_has_its_overview_and_its_tiles(columns: int, rows: int, tokens: int) -> None:
    made = document.tiled(columns, rows, answer=0)
    assert made.prompt.count(IMAGE) == tokens
    assert made.prompt.count(MARKER) == 1


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (5, 4), (0, 3)])
def test_a_grid_of_too_many_or_too_few_tiles_is_refused(columns: int, rows: int) -> None:
    with pytest.raises(ArgumentError, match="2 to 16 tiles"):
        document.tiled(columns, rows)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1240, 1754), (2, 3)),
        ((3000, 1500), (4, 2)),
        ((1400, 700), (2, 1)),
        ((2600, 2600), (4, 4)),
        ((700, 700), (2, 2)),
        ((100, 5000), (1, 16)),
    ],
)
def test_one_image_is_tiled_by_its_shape(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert document.from_image_sizes([size]).grid == grid


def test_a_small_image_and_several_images_are_not_tiled() -> None:
    assert document.from_image_sizes([(640, 480)]) == document.paged(1)
    assert document.from_image_sizes([(2000, 2000)] * 3) == document.paged(3)
    with pytest.raises(ArgumentError, match="at least 1 x 1"):
        document.from_image_sizes([(0, 10)])


def test_images_are_read_for_their_sizes(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "page.png"
    image.new("L", (1240, 1754)).save(path)
    assert document.from_images([path]).grid == (2, 3)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    with pytest.raises(ArgumentError, match="no readable image"):
        document.from_images([broken])


@pytest.mark.parametrize(
    ("pages", "tokens", "roles"),
    [
        (0, 3, (TEXT, TEXT, TEXT)),
        (2, 0, ()),
        (2, 5, (MARKER, TEXT, MARKER, TEXT, TEXT)),
        (9, 2, (MARKER, MARKER)),
    ],
)
def test_an_answer_has_a_marker_a_page(pages: int, tokens: int, roles: tuple[int, ...]) -> None:
    assert document.answer_roles(pages, tokens) == roles


def test_a_list_of_roles_is_a_document(tmp_path: Path) -> None:
    made, config = document.from_json(written(tmp_path, [2, 1, 1, 0]), answer=3, layers=2)
    assert made.prompt == (2, 1, 1, 0)
    assert made.answer == (MARKER, TEXT, TEXT)
    assert config == document.model_config(2)


@pytest.mark.parametrize("whole", [False, True], ids=["sparse config", "model config"])
def test_token_ids_become_roles_by_their_config(tmp_path: Path, whole: bool) -> None:
    sp = {**SP, "image_token_id": 7, "page_token_id": 9}
    config = {"hidden_size": 640, "sparse_attention_config": sp} if whole else sp
    data = {"token_ids": [9, 7, 7, 3], "answer_token_ids": [9, 4], "config": config}
    made, found = document.from_json(written(tmp_path, data))
    assert made.prompt == (MARKER, IMAGE, IMAGE, TEXT)
    assert made.answer == (MARKER, TEXT)
    assert found.index_dim == 64
    assert found.num_layers == 2


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ({"role": [1]}, ArgumentError, "roles or token_ids"),
        ({"roles": [1], "token_ids": [1]}, ArgumentError, "roles or token_ids"),
        ({"roles": []}, ArgumentError, "at least 1"),
        ({"roles": [0, 3]}, ArgumentError, r"prompt\[1\]: found 3"),
        ({"roles": [True]}, ArgumentError, "list of integers"),
        ({"token_ids": [1, 2]}, ArgumentError, "image_token_id"),
        ({"roles": [0], "config": {"sparse_block_size": 32}}, ConfigError, "sparse_local_block"),
    ],
)
def test_a_wrong_file_is_told_with_what_is_needed(
    tmp_path: Path, data: object, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        document.from_json(written(tmp_path, data))


def test_a_file_that_is_no_json_is_told(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ArgumentError, match="no readable JSON"):
        document.from_json(path)
    with pytest.raises(ArgumentError, match="no readable JSON"):
        document.from_json(tmp_path / "nothing.json")
