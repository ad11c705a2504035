"""Documents for trying things out: roles of a prompt and its answer, in the model's true shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dash_portable.config import DashConfig
from dash_portable.errors import ArgumentError, found_needed

TEXT, IMAGE, MARKER = 0, 1, 2
PATCHES = 16  # a page's overview is 16 rows of 16 patches and a row end each, and one token more
PAGE_IMAGE_TOKENS = PATCHES * (PATCHES + 1) + 1
TILE_PATCHES = 10  # a tile is 10 x 10 patches; a row of patches through all tiles ends in one token
TILE_PIXELS = 640
TILES = range(2, 17)
INSTRUCTION = 40
ANSWER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A prompt and its answer, as roles: 0 text, 1 image, 2 page marker.

    grid   columns and rows of tiles of the one page, (0, 0) where nothing is tiled
    """

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    grid: tuple[int, int] = (0, 0)

    @property
    def roles(self) -> tuple[int, ...]:
        return self.prompt + self.answer

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def model_config(layers: int = 1) -> DashConfig:
    """The published model's numbers: heads of 128, 12 of the blocks of 32, four local ones."""
    return DashConfig(index_dim=128, scale=(60.0,) * layers, floor=(1e-4,) * layers)


def answer_roles(pages: int, tokens: int) -> tuple[int, ...]:
    """An answer of `tokens`: a marker for every page that has room, then equal runs of text.

    >>> answer_roles(2, 6)
    (2, 0, 0, 2, 0, 0)
    """
    shown = min(pages, tokens)
    if not shown:
        return (TEXT,) * tokens
    starts = {i * tokens // shown for i in range(shown)}
    return tuple(MARKER if i in starts else TEXT for i in range(tokens))


def paged(pages: int, *, answer: int = ANSWER, instruction: int = INSTRUCTION) -> Document:
    """Pages of a marker and 273 image tokens each, then a short instruction.

    >>> len(paged(8).prompt)
    2232
    """
    if pages < 1:
        raise found_needed("pages", pages, "at least 1")
    page = (MARKER,) + (IMAGE,) * PAGE_IMAGE_TOKENS
    return Document(
        name=f"{pages} page{'s' * (pages > 1)}",
        prompt=page * pages + (TEXT,) * instruction,
        answer=answer_roles(pages, answer),
    )


def tiled(
    columns: int, rows: int, *, answer: int = ANSWER, instruction: int = INSTRUCTION
) -> Document:
    """One page in `columns * rows` tiles: a marker, its overview's 273 tokens, then the tiles'."""
    if columns < 1 or rows < 1 or columns * rows not in TILES:
        raise found_needed(
            "tiles", f"{columns} x {rows}", f"{TILES[0]} to {TILES[-1]} tiles in all"
        )
    tokens = PAGE_IMAGE_TOKENS + (TILE_PATCHES * columns + 1) * TILE_PATCHES * rows
    return Document(
        name=f"one page of {columns} x {rows} tiles",
        prompt=(MARKER,) + (IMAGE,) * tokens + (TEXT,) * instruction,
        answer=answer_roles(1, answer),
        grid=(columns, rows),
    )


def plain(tokens: int, *, answer: int = ANSWER) -> Document:
    """Text without any image: no row has a page, all of them choose among all remote blocks."""
    if tokens < 1:
        raise found_needed("tokens", tokens, "at least 1")
    return Document(
        name=f"plain text of {tokens} tokens",
        prompt=(TEXT,) * tokens,
        answer=(TEXT,) * answer,
    )


def best_grid(width: int, height: int) -> tuple[int, int]:
    """Columns and rows of tiles for an image, the grid of 2 to 16 tiles nearest to its shape.

    Among grids of the same shape the larger is taken when the image fills half of its pixels.

    >>> best_grid(1240, 1754), best_grid(3000, 1500)
    ((2, 3), (4, 2))
    """
    grids = [(n // rows, rows) for n in TILES for rows in range(1, n + 1) if n % rows == 0]
    best, least = (1, 2), float("inf")
    for columns, rows in grids:
        off = abs(width / height - columns / rows)
        filled = 2 * width * height > columns * rows * TILE_PIXELS**2
        if off < least or (off == least and filled):
            best, least = (columns, rows), off
    return best


def from_image_sizes(sizes: Sequence[tuple[int, int]], *, answer: int = ANSWER) -> Document:
    """Images by (width, height) in pixels: one is tiled, several take 273 tokens each."""
    if not sizes:
        raise found_needed("images", "none", "at least 1")
    for width, height in sizes:
        if width < 1 or height < 1:
            raise found_needed("image", f"{width} x {height} pixels", "at least 1 x 1")
    if len(sizes) > 1 or max(sizes[0]) <= TILE_PIXELS:
        return paged(len(sizes), answer=answer)
    return tiled(*best_grid(*sizes[0]), answer=answer)


def from_images(paths: Sequence[Path], *, answer: int = ANSWER) -> Document:
    """Page images; only their sizes are looked at. Needs the extra `plot` (Pillow)."""
    from PIL import Image

    sizes = []
    for path in paths:
        try:
            with Image.open(path) as image:
                sizes.append(image.size)
        except OSError as error:  # Pillow's own word for "no image" is one, too
            raise ArgumentError(f"{path}: found no readable image ({error})") from error
    return from_image_sizes(sizes, answer=answer)


def from_json(
    path: Path, *, answer: int | None = None, layers: int = 1
) -> tuple[Document, DashConfig]:
    """A document from a file, and the configuration in it (else the model's with `layers`).

    The file is a list of roles, or an object with `roles` or `token_ids`, and if wanted `answer` or
    `answer_token_ids`, and `config`: a `sparse_attention_config` or a model's whole config.json.
    Token ids need a config with `image_token_id` and `page_token_id`. `answer` tokens are made up
    where the file has none. Raises ArgumentError and ConfigError with what was found and needed.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: found no readable JSON ({error})") from error
    if isinstance(data, list):
        data = {"roles": data}
    if not isinstance(data, Mapping) or ("roles" in data) == ("token_ids" in data):
        raise found_needed(
            str(path), "another form", "a list of roles, or an object with roles or token_ids"
        )
    config = _config(data, path) or model_config(layers)
    ids = "token_ids" in data
    prompt = _roles(data["token_ids" if ids else "roles"], f"{path}: prompt", config, ids=ids)
    if not prompt:
        raise found_needed(f"{path}: prompt", "no token", "at least 1")
    key = "answer_token_ids" if ids else "answer"
    if key in data:
        said = _roles(data[key], f"{path}: {key}", config, ids=ids)
    else:
        pages = prompt.count(MARKER) if IMAGE in prompt else 0
        said = answer_roles(pages, ANSWER if answer is None else answer)
    return Document(name=path.name, prompt=prompt, answer=said), config


def _config(data: Mapping[str, Any], path: Path) -> DashConfig | None:
    found = data.get("config", data.get("sparse_attention_config"))
    if found is None:
        return None
    if isinstance(found, Mapping):
        found = found.get("sparse_attention_config", found)
    return DashConfig.from_model(found)


def _roles(values: object, name: str, config: DashConfig, *, ids: bool) -> tuple[int, ...]:
    if not isinstance(values, list) or any(
        not isinstance(value, int) or isinstance(value, bool) for value in values
    ):
        raise found_needed(name, type(values).__name__, "a list of integers")
    if ids:
        if config.image_token_id is None or config.page_token_id is None:
            raise found_needed(
                name, "token ids and no config", "image_token_id and page_token_id in its config"
            )
        special = {config.image_token_id: IMAGE, config.page_token_id: MARKER}
        return tuple(special.get(value, TEXT) for value in values)
    for i, value in enumerate(values):
        if value not in (TEXT, IMAGE, MARKER):
            raise found_needed(f"{name}[{i}]", value, "0 (text), 1 (image) or 2 (page marker)")
    return tuple(values)
