"""Are these tensors sane for any backend? Checked before anything is written.

What lies on the host is checked by value; what lies on a GPU is checked by shape and type only,
since looking at it would make the host wait.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from dash_portable.errors import ArgumentError, found_needed
from dash_portable.pages import MAX_PAGES
from dash_portable.platform.detect import current_platform

INDEX = (torch.int32, torch.int64)
FLOAT = (torch.float16, torch.bfloat16, torch.float32)

Size = int | str | None
_INT32, _INT64 = 2**31, 2**63


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor of ordinary memory: not sparse, not nested."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def check_integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """The integer, if it is one and within its bounds; ArgumentError otherwise."""
    needed = "an integer"
    if low is not None:
        needed += f" of at least {low}" if high is None else f" from {low} to {high}"
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or (low is not None and value < low)
        or (high is not None and value > high)
    ):
        raise found_needed(name, repr(value), needed)
    return value


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise found_needed(name, repr(value), "True or False")
    return value


def check_device(value: object) -> None:
    """ArgumentError unless torch has such a device here."""
    if not isinstance(value, (str, torch.device)):
        raise found_needed("device", repr(value), "a torch device, such as 'cpu' or 'cuda:0'")
    current_platform(value)


def check_backend(value: object) -> None:
    """A backend is named by a word; which words there are is the dispatcher's to say."""
    if value is not None and not isinstance(value, str):
        raise found_needed("backend", repr(value), "a name, such as 'AUTO'")


def check_tensor(
    name: str,
    value: object,
    shape: Sequence[Size],
    *,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    sizes: Mapping[str, int] | None = None,
) -> Tensor:
    """The tensor, if it is one of this shape, type and device; ArgumentError otherwise.

    `shape` holds numbers, letters whose number is in `sizes`, and None for any size.
    """
    known = sizes or {}
    numbers = [known.get(s) if isinstance(s, str) else s for s in shape]
    if (
        is_tensor(value)
        and value.dim() == len(numbers)
        and all(n is None or n == have for n, have in zip(numbers, value.shape, strict=True))
        and value.dtype in dtypes
        and value.device == device
    ):
        return value
    raise _unfit(name, value, shape, known, dtypes, device)


def _unfit(
    name: str,
    value: object,
    shape: Sequence[Size],
    sizes: Mapping[str, int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> ArgumentError:
    """What is wrong with a tensor: no tensor, then shape, then type, then device."""
    meaning = ", ".join(
        f"{s}={sizes[s]}" for s in dict.fromkeys(shape) if isinstance(s, str) and s in sizes
    )
    needed = "[" + ", ".join("any" if s is None else str(s) for s in shape) + "]"
    needed += f" with {meaning}" if meaning else ""
    types = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    if not is_tensor(value):
        return found_needed(name, type(value).__name__, f"a tensor {needed} of {types}")
    numbers = [sizes.get(s) if isinstance(s, str) else s for s in shape]
    if value.dim() != len(numbers) or any(
        n is not None and n != have for n, have in zip(numbers, value.shape, strict=True)
    ):
        return found_needed(name, list(value.shape), needed)
    if value.dtype not in dtypes:
        return found_needed(name, str(value.dtype).removeprefix("torch."), types)
    return found_needed(name, f"device {value.device}", f"{device}, where the others are")


def fits(
    value: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> bool:
    """What `check_tensor` asks, quickly and without saying what is wrong: for a layer's run."""
    return (
        isinstance(value, Tensor)
        and value.dtype in dtypes
        and value.layout is torch.strided
        and not value.is_nested
        and value.shape == shape
        and value.device == device
    )


def check_rows(
    tensors: Mapping[str, tuple[object, Sequence[Size]]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    sizes: Mapping[str, int],
) -> None:
    """Every one of q, k, v, iq, ik has its shape, the cache's type and its device."""
    for name, (value, shape) in tensors.items():
        check_tensor(name, value, shape, dtypes=(dtype,), device=device, sizes=sizes)


def on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"


def host_lengths(
    name: str, value: Sequence[int] | Tensor, device: torch.device
) -> list[int] | None:
    """Lengths as host integers, or None when they lie on `device`.

    Those of padding may be anything: what 64 bits cannot hold becomes what they can.
    """
    if isinstance(value, Tensor):
        where = value.device if on_host(value) else device
        value = check_tensor(name, value, (None,), dtypes=INDEX, device=where)
        return value.tolist() if on_host(value) else None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise found_needed(name, repr(value), "a list of integers or a tensor [R]")
    lengths = list[int]()
    for i, length in enumerate(value):
        try:
            lengths.append(operator.index(length))
        except TypeError:
            raise found_needed(f"{name}[{i}]", repr(length), "an integer") from None
    if lengths and not (min(lengths) >= -_INT64 and max(lengths) < _INT64):
        lengths = [min(max(length, -_INT64), _INT64 - 1) for length in lengths]
    return lengths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepValues:
    """What is looked at in a step whose tensors lie on the host; shapes and types are right.

    slots, row_seq, row_pos, roles [N]    positions [4, N]    seq_lens [R]    block_table [R, max]
    page_table [R, pages, 2]    longest: tokens that a sequence may have
    """

    slots: Tensor
    row_seq: Tensor
    row_pos: Tensor
    roles: Tensor
    positions: Tensor | None
    seq_lens: Tensor
    block_table: Tensor
    page_table: Tensor | None
    num_blocks: int
    block_size: int
    longest: int
    recomputed: bool

    def check(self) -> None:
        """ArgumentError for the first wrong value of a live row, or of a sequence that has one."""
        live = (self.slots >= 0).nonzero().flatten()
        if not len(live):
            return
        seq, position = self.row_seq[live].long(), self.row_pos[live].long()
        self._check_lengths(seq, position)
        check_blocks(
            self.block_table, self.seq_lens, seq.unique(), self.num_blocks, self.block_size
        )
        self._check_slots(live, seq, position)
        role = self.roles[live]
        _all("roles", role, (role >= 0) & (role <= 2), "0 (text), 1 (image) or 2 (marker)", live)
        self._check_positions(live, seq, position)

    def _check_lengths(self, seq: Tensor, position: Tensor) -> None:
        length = self.seq_lens[seq].long()
        ok = length <= self.longest
        _all("seq_lens", length, ok, f"at most {self.longest} (max_model_len, block_table)", seq)
        # The rows of a sequence are its last tokens: too many of them begin before its first.
        rows = torch.bincount(seq)[seq]
        short = (position < 0).nonzero()
        if len(short):
            i = int(short[0])
            needed = f"at least its rows that are not padding ({int(rows[i])})"
            raise found_needed(f"seq_lens[{int(seq[i])}]", int(length[i]), needed)

    def _check_slots(self, live: Tensor, seq: Tensor, position: Tensor) -> None:
        slot, block = self.slots[live], self.block_table[seq, position // self.block_size].long()
        place = block * self.block_size + position % self.block_size
        wrong = (place != slot).nonzero()
        if len(wrong):
            i = int(wrong[0])
            raise found_needed(
                f"slots[{int(live[i])}]",
                int(slot[i]),
                f"{int(place[i])}, where block_table puts token {int(position[i])} of sequence "
                f"{int(seq[i])}",
            )
        ordered, order = slot.sort()
        twice = (ordered[1:] == ordered[:-1]).nonzero()
        if len(twice):
            first, second = sorted(live[order[int(twice[0]) :][:2]].tolist())
            found = f"{int(self.slots[second])}, as in slots[{first}]"
            raise found_needed(f"slots[{second}]", found, "a place of its own for each new token")

    def _check_positions(self, live: Tensor, seq: Tensor, position: Tensor) -> None:
        decoded = torch.ones_like(live, dtype=torch.bool)
        if self.positions is not None:
            tok, raw, pages, extra = self.positions[:, live].long().unbind(0)
            whole = (extra >= -_INT32) & (extra < _INT32)
            _all("positions[3]", extra, whole, "an integer of 32 bits", live)
            decoded = extra >= 0
            # A server may leave anything in rows 0 to 2 of a decoded token.
            free = decoded & (not self.recomputed)
            limits = (_INT32 - 1, _INT32 - 1, MAX_PAGES)
            for i, values, limit in zip(range(3), (tok, raw, pages), limits, strict=True):
                ok = free | ((values >= 0) & (values <= limit))
                _all(f"positions[{i}]", values, ok, f"0 to {limit}", live)
            if self.page_table is not None:
                known = self.page_table.shape[1]
                needed = f"below {known}, the pages of page_table"
                _all("positions[2]", pages, free | (pages < known), needed, live)
        orphan = live[decoded & (position == 0) & (not self.recomputed)]
        if len(orphan):
            raise found_needed(
                "positions",
                f"no coordinates for row {int(orphan[0])}, the first token of its sequence",
                "those of the prompt (prompt_positions)",
            )


def check_blocks(
    block_table: Tensor, seq_lens: Tensor, seqs: Tensor, num_blocks: int, block_size: int
) -> None:
    """The entries of `seqs` that hold tokens are blocks of the cache, each at most once."""
    table, length = block_table[seqs].long(), seq_lens[seqs].long()
    used = torch.arange(table.shape[1], device=table.device) * block_size < length[:, None]
    wrong = (used & ((table < 0) | (table >= num_blocks))).nonzero()
    if len(wrong):
        row, at = wrong[0].tolist()
        name = f"block_table[{int(seqs[row])}][{at}]"
        raise found_needed(name, int(table[row, at]), f"0 to {num_blocks - 1}, the cache's blocks")
    # What is not used becomes a number of its own.
    ordered = torch.where(used, table, -1 - torch.arange(table.shape[1], device=table.device))
    ordered = ordered.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).nonzero()
    if len(twice):
        row, at = twice[0].tolist()
        found = f"block {int(ordered[row, at])} twice"
        raise found_needed(f"block_table[{int(seqs[row])}]", found, "a block for each place")


def _all(name: str, values: Tensor, ok: Tensor, needed: str, index: Tensor) -> None:
    wrong = (~ok).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise found_needed(f"{name}[{int(index[i])}]", int(values[i]), needed)
