"""The cache layout: where token t of a sequence lies, and which element of the auxiliary head
holds what.

`cache [num_blocks, H + 1, block_size, 2 D]`. Heads 0..H-1 hold the rotated key in `[:D]` and the
value in `[D:]`. The last head is the auxiliary one: the rotated index key in `[:D]` and, behind it,
numbers
as bytes, one byte (0..255, exact in float16 and bfloat16) an element, little endian. A server that
already keeps such a cache can hand it over as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_portable.checks import FLOAT, check_device, check_integer, is_tensor
from dash_portable.config import DashConfig, check_block_size
from dash_portable.errors import ArgumentError, UnsupportedError, found_needed

# Offsets behind the index key, in elements. What lies from COUNT on stands on chosen rows only.
ROLE = 0  # every row
STATE = 2  # every row: tok, page, num_pages, query_page as int32
COUNT = 18  # row i <= num_pages of a sequence: tokens of page i up to the last image, int32
START = 22  # the same row: first token of page i, int32
LOW = 26  # first row of a complete block: smallest image_page + 1 in it, uint16, 0 for none
HIGH = 28  # the same row: the largest
BYTES_END = 30
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The sizes of one cache."""

    num_blocks: int
    kv_heads: int
    block_size: int
    head_dim: int

    @classmethod
    def of(cls, cache: Tensor, config: DashConfig) -> CacheShape:
        """Read the sizes off a cache and check them against the model.

        ArgumentError on another rank, width, dtype or last stride; UnsupportedError for fp8, whose
        numbers cannot carry the state's byte values.
        """
        if not isinstance(config, DashConfig):
            raise found_needed("config", type(config).__name__, "a DashConfig")
        form = "[num_blocks, H + 1, block_size, 2 D]"
        if not is_tensor(cache):
            raise found_needed("cache", type(cache).__name__, f"a tensor {form}")
        if cache.dim() != 4:
            raise found_needed("cache", list(cache.shape), form)
        if cache.is_meta:
            raise found_needed("cache", "device meta", "a device with memory, such as cpu")
        if cache.dtype.is_floating_point and cache.dtype.itemsize == 1:
            raise UnsupportedError(
                f"cache: found {cache.dtype}, needed float16, bfloat16 or float32 "
                "(8-bit numbers cannot hold all 256 byte values of the token state)"
            )
        if cache.dtype not in FLOAT:
            raise ArgumentError(f"cache: found {cache.dtype}, needed float16, bfloat16 or float32")
        blocks, heads, block_size, width = cache.shape
        if width != 2 * config.index_dim:
            raise ArgumentError(
                f"cache: found a last dimension of {width}, needed {2 * config.index_dim} "
                f"(twice the head width of the configuration)"
            )
        if heads < 2:
            raise ArgumentError(
                f"cache: found {heads} heads, needed at least 2 (kv heads and the auxiliary one)"
            )
        if blocks < 1:
            raise ArgumentError("cache: found no block, needed at least 1")
        check_block_size(block_size, config.block)
        check_strides(cache.shape, cache.stride())
        return cls(
            num_blocks=blocks, kv_heads=heads - 1, block_size=block_size, head_dim=width // 2
        )


@functools.lru_cache(maxsize=64)
def check_strides(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Last stride 1 and no number in two places, in whatever order the dimensions lie."""
    if strides[-1] != 1:
        raise ArgumentError(f"cache: found a last stride of {strides[-1]}, needed 1")
    end = 0  # the last number of what lies within the dimensions of smaller strides
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= end:
            raise ArgumentError(
                f"cache: found strides {list(strides)} of {list(shape)}, which put several numbers "
                "in one place, needed a place for each"
            )
        end += stride * (size - 1)


def empty_cache(
    config: DashConfig,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Tensor:
    """A cache for `num_blocks * block_size` tokens, zeroed.

    Gives `[num_blocks, num_kv_heads + 1, block_size, 2 D]` with D = `config.index_dim`.

    >>> config = DashConfig(index_dim=64, scale=(1.0,), floor=(1e-4,))
    >>> list(empty_cache(config, 4, 2, 16, dtype=torch.float16).shape)
    [4, 3, 16, 128]
    """
    if not isinstance(config, DashConfig):
        raise found_needed("config", type(config).__name__, "a DashConfig")
    check_integer("num_blocks", num_blocks, 1)
    check_integer("num_kv_heads", num_kv_heads, 1)
    if dtype not in FLOAT:
        raise found_needed("dtype", repr(dtype), "torch.float16, torch.bfloat16 or torch.float32")
    check_block_size(block_size, config.block)
    if device is not None:
        check_device(device)
    shape = (num_blocks, num_kv_heads + 1, block_size, 2 * config.index_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def to_bytes(values: Tensor, width: int) -> Tensor:
    """Integers to `width` byte values each, little endian: `[...]` to `[..., width]`, uint8."""
    whole = values.to(_INTEGERS[width]).contiguous().unsqueeze(-1).view(torch.uint8)
    return whole.flip(-1) if sys.byteorder == "big" else whole


def from_bytes(elements: Tensor) -> Tensor:
    """Byte values `[..., 4]` (or 2) of any float type to integers `[...]`, int64.

    Four bytes are an int32 (255, 255, 255, 255 is -1), two are a uint16.
    """
    width = elements.shape[-1]
    # Another owner's cache may hold anything here; what is no byte must not poison the others.
    numbers = elements.nan_to_num(0.0, 0.0, 0.0).clamp(0, 255).to(torch.uint8).contiguous()
    if sys.byteorder == "big":
        numbers = numbers.flip(-1)
    whole = numbers.view(_INTEGERS[width]).squeeze(-1).long()
    return whole & 0xFFFF if width == 2 else whole


def places(
    block_table: Tensor, rows: Tensor, tokens: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Cache block and offset of token `tokens[i]` of sequence `rows[i]`, int64, in their shape."""
    blocks = block_table[rows.long(), tokens.long() // block_size].long()
    return blocks, tokens.long() % block_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """The cache as lines of 2 D numbers, to be picked with `index_select`.

    Picking whole lines by number is several times faster than picking by block, head and place.

    data     [lines, 2 D]    line of (block, head, place) is `block * per_block + head * per_head +
                             place`
    """

    data: Tensor
    per_block: int
    per_head: int

    @classmethod
    def of(cls, cache: Tensor) -> Lines | None:
        """None where the strides of blocks and heads are no multiples of a token's."""
        blocks, heads, tokens, width = cache.shape
        block, head, token, last = cache.stride()
        if last != 1 or token == 0 or block % token or head % token:
            return None
        per_block, per_head = block // token, head // token
        count = (blocks - 1) * per_block + (heads - 1) * per_head + tokens
        data = cache.as_strided((count, width), (token, 1))
        return cls(data=data, per_block=per_block, per_head=per_head)

    def number(self, block: Tensor, head: Tensor | int, place: Tensor) -> Tensor:
        return block * self.per_block + head * self.per_head + place


def read_lines(cache: Tensor, block: Tensor, head: Tensor, place: Tensor) -> Tensor:
    """Whole lines `[..., 2 D]` at the given blocks, heads and places (int64, broadcast)."""
    lines = Lines.of(cache)
    if lines is None:
        return cache[block, head, place]
    number = lines.number(block, head, place)
    return lines.data.index_select(0, number.flatten()).view(*number.shape, -1)


def auxiliary(cache: Tensor) -> Tensor:
    """The auxiliary head, a view `[num_blocks, block_size, 2 D]`."""
    return cache[:, -1]


def summary_at(head_dim: int) -> int:
    """First element of half a summary; rows t and t + 1 of a block that begins at t hold one half
    each.
    """
    return head_dim + head_dim // 2
