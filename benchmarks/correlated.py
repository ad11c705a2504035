"""Index queries and summaries whose neighbours agree by a chosen amount, and how large the unions
of 64 rows are.

    python benchmarks/correlated.py                     the table (CPU, numpy only, about a minute)
    python benchmarks/correlated.py --lengths 8192 --tiles 8

A row's index query is `sqrt(c) * u + sqrt(1 - c) * noise`: `u` is common to neighbours and turns
slowly (to a new, independent direction every `turn` rows), so `c` is the correlation of the scores
of two adjacent rows: 0 is the worst case (every row chooses at random), 1 means that neighbours
choose alike.
"""

from __future__ import annotations

import argparse

import numpy as np

BLOCK, LOCAL_BLOCKS, TOPK = 32, 4, 12
PAGE_TOKENS = 274  # a marker and 273 image tokens
TILE_ROWS = 64


def index_queries(
    rows: int, dim: int, correlation: float, *, turn: int = 512, seed: int = 0
) -> np.ndarray:
    """`[rows, dim]` float32 of unit variance; adjacent rows' scores correlate by `correlation`."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((rows, dim), dtype=np.float32)
    knots = rng.standard_normal((rows // turn + 2, dim), dtype=np.float32)
    at = np.arange(rows) / turn
    angle = (at - np.floor(at)).astype(np.float32)[:, None] * np.float32(np.pi / 2)
    left = at.astype(np.int64)
    common = np.cos(angle) * knots[left] + np.sin(angle) * knots[left + 1]
    return np.float32(correlation**0.5) * common + np.float32((1 - correlation) ** 0.5) * noise


def summaries(blocks: int, dim: int, *, seed: int = 1) -> np.ndarray:
    """`[blocks, dim]` float32: block summaries of no structure (a mean of 32 keys is smaller than a
    key).
    """
    rng = np.random.default_rng(seed)
    return np.float32(0.4) * rng.standard_normal((blocks, dim), dtype=np.float32)


def page_blocks(rows: np.ndarray, page_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """First block of each row's own page and last remote block; first > last means that the row
    scans.
    """
    first = rows // page_tokens * page_tokens // BLOCK
    return first, rows // BLOCK - LOCAL_BLOCKS


def chosen_blocks(
    query: np.ndarray, summary: np.ndarray, rows: np.ndarray, page_tokens: int | None
) -> np.ndarray:
    """`[len(rows), TOPK]` block ids, -1 unused, of rows at positions `rows`."""
    last = rows // BLOCK - LOCAL_BLOCKS
    score = query @ summary[: max(int(last.max()) + 1, 1)].T
    block = np.arange(score.shape[1])
    allowed = block[None] <= last[:, None]
    if page_tokens is not None:
        first, _ = page_blocks(rows, page_tokens)
        own = allowed & (block[None] >= first[:, None])
        allowed = np.where(own.any(1, keepdims=True), own, allowed)
    score = np.where(allowed, score, -np.inf)
    best = np.argsort(-score, axis=1, kind="stable")[:, :TOPK]
    return np.where(np.take_along_axis(score, best, 1) > -np.inf, best, -1)


def row_classes(rows: int, page_tokens: int | None) -> dict[str, np.ndarray]:
    """Rows by class, ascending: with a remote block of their own page, and those that scan."""
    at = np.arange(rows)
    if page_tokens is None:
        return {"scan": at}
    first, last = page_blocks(at, page_tokens)
    return {"page": at[first <= last], "scan": at[first > last]}


def union_sizes(
    length: int, correlation: float, page_tokens: int | None, *, tiles: int, dim: int = 128
) -> dict[str, np.ndarray]:
    """Blocks in the union of 64 rows of one class, for up to `tiles` tiles of each class spread
    over the prompt.
    """
    query, summary = index_queries(length, dim, correlation), summaries(length // BLOCK, dim)
    sizes = {}
    for name, rows in row_classes(length, page_tokens).items():
        whole = len(rows) // TILE_ROWS
        picked = np.unique(np.linspace(whole // 4, whole - 1, tiles).astype(int))
        sizes[name] = np.array(
            [
                len(set(chosen_blocks(query[at], summary, at, page_tokens).ravel()) - {-1})
                for at in (rows[t * TILE_ROWS : (t + 1) * TILE_ROWS] for t in picked)
            ]
        )
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument(
        "--correlations", type=float, nargs="+", default=[0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0]
    )
    parser.add_argument("--tiles", type=int, default=12, help="tiles counted of each class")
    args = parser.parse_args()
    print("blocks in the union of 64 rows: mean (largest); random data, 12 of all candidates a row")
    print(
        f"| {'length':>7s} | {'c':>4s} | no pages | pages: rows of a page | pages: rows that scan |"
    )
    print("|---|---|---|---|---|")
    for length in args.lengths:
        for correlation in args.correlations:
            cells = []
            for page_tokens in (None, PAGE_TOKENS):
                found = union_sizes(length, correlation, page_tokens, tiles=args.tiles)
                cells += [f"{size.mean():.0f} ({size.max()})" for size in found.values()]
            print(f"| {length:7d} | {correlation:4.2f} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
