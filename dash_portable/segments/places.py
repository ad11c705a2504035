"""Addresses of keys in the strided cache, in the forms that paged libraries understand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_portable.errors import BackendError
from dash_portable.segments.rows import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """The cache as pages of `size` tokens, nothing copied.

    key, value  [pages, size, H, D], with the cache's own strides
    per_block   page ids that one cache block spans: the page of token t is
                `block * per_block + t % block_size // size`
    """

    key: Tensor
    value: Tensor
    size: int
    per_block: int


def page_size(block_size: int, block: int) -> int:
    """The largest page that starts both at every sparse block and at every cache block.

    >>> page_size(64, 32), page_size(16, 32), page_size(24, 32)
    (32, 16, 8)
    """
    return math.gcd(block_size, block)


def cache_pages(cache: Tensor, *, size: int) -> Pages:
    """Keys and values of `cache` [NB, H + 1, P, 2D] as pages of `size` tokens; raises BackendError
    where strides forbid it.

    A page smaller than a cache block is a view with overlapping extents: page i begins i pages
    after the first one, its heads lie where the cache's head stride says. That needs a block stride
    that is a multiple of the page's.
    """
    blocks, planes, tokens, twice = cache.shape
    block_stride, head_stride, token_stride, last = cache.stride()
    width = twice // 2
    if last != 1 or tokens % size:
        raise BackendError(
            f"cache: found last stride {last} and cache blocks of {tokens} tokens, "
            f"needed 1 and a multiple of {size}"
        )
    if size == tokens:
        page_stride, per_block = block_stride, 1
    else:
        page_stride = size * token_stride
        if block_stride % page_stride:
            raise BackendError(
                f"cache: found a block stride of {block_stride}, needed a multiple of "
                f"{page_stride} (pages of {size} tokens) to be read in place"
            )
        per_block = block_stride // page_stride
    count = (blocks - 1) * per_block + tokens // size
    shape = (count, size, planes - 1, width)
    strides = (page_stride, token_stride, head_stride, 1)
    at = cache.storage_offset()
    return Pages(
        key=cache.as_strided(shape, strides, at),
        value=cache.as_strided(shape, strides, at + width),
        size=size,
        per_block=per_block,
    )


def token_places(
    token: Tensor, used: Tensor, row_seq: Tensor, block_table: Tensor, *, block_size: int
) -> tuple[Tensor, Tensor]:
    """Cache block and place in it of every token, int64 [N, W] each; (0, 0) where unused, and no
    table entry is read there."""
    column = torch.where(used, token // block_size, 0)
    live = used.any(dim=1)
    table = block_table[torch.where(live, row_seq, 0).long()]
    cache_block = table.gather(1, column.long()).long()
    return torch.where(used, cache_block, 0), torch.where(used, token % block_size, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A page table with one line for each segment.

    pages   [N * (S + 1), C]  int32  page ids, 0 where unused
    length  [N * (S + 1)]     int32  keys from the first page's start; 1 for an empty segment, so
    that no call is without keys
    """

    pages: Tensor
    length: Tensor


def page_table(
    where: Spans,
    row_seq: Tensor,
    block_table: Tensor,
    *,
    size: int,
    per_block: int,
    block_size: int,
    local: int,
) -> Table:
    """Pages of every segment. The local window begins inside its first page: the library's left
    window of `local - 1` cuts what lies before it, and a remote block, which starts at a page, is
    shorter than that window."""
    rows, segments = where.start.shape
    first = where.start // size * size
    end = where.start + where.length
    step = torch.arange(local // size + 1, device=first.device) * size
    token = first[:, :, None] + step
    used = (token < end[:, :, None]) & (where.length > 0)[:, :, None]
    block, place = token_places(
        token.flatten(1), used.flatten(1), row_seq, block_table, block_size=block_size
    )
    pages = block * per_block + place // size
    length = torch.where(where.length > 0, end - first, 1)
    return Table(
        pages=pages.view(rows * segments, -1).to(torch.int32),
        length=length.flatten().to(torch.int32),
    )
