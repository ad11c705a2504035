"""Are these tensors sane for any backend? Checked before anything is written.

What lies on the host is checked by value; what lies on a GPU is checked by shape and type only,
since looking at it would make the host wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dash_portable.errors import ArgumentError, found_needed
from dash_portable.pages import MAX_PAGES

INDEX = (torch.int32, torch.int64)
FLOAT = (torch.float16, torch.bfloat16, torch.float32)

Size = int | str | None


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
        isinstance(value, Tensor)
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
    if not isinstance(value, Tensor):
        return found_needed(name, type(value).__name__, f"a tensor {needed} of {types}")
    numbers = [sizes.get(s) if isinstance(s, str) else s for s in shape]
    if value.dim() != len(numbers) or any(
        n is not None and n != have for n, have in zip(numbers, value.shape, strict=True)
    ):
        return found_needed(name, list(value.shape), needed)
    if value.dtype not in dtypes:
        return found_needed(name, str(value.dtype).removeprefix("torch."), types)
    return found_needed(name, f"device {value.device}", f"{device}, where the cache is")


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


def host_lengths(name: str, value: Sequence[int] | Tensor) -> list[int] | None:
    """Lengths as host integers, or None when they lie on a device."""
    if isinstance(value, Tensor):
        if value.dim() != 1 or value.dtype not in INDEX:
            raise found_needed(
                name, f"{list(value.shape)} of {value.dtype}", "[R] of int32 or int64"
            )
        return value.tolist() if on_host(value) else None
    lengths = list(value)
    for i, length in enumerate(lengths):
        if not isinstance(length, int) or isinstance(length, bool):
            raise found_needed(f"{name}[{i}]", repr(length), "an integer")
    return lengths


def check_step_values(
    *,
    slots: Tensor,
    roles: Tensor,
    positions: Tensor | None,
    row_seq: Tensor,
    row_pos: Tensor,
    seq_lens: Sequence[int],
    block_table: Tensor,
    num_blocks: int,
    block_size: int,
    max_model_len: int | None,
    recomputed: bool,
) -> None:
    """The values of a step whose tensors lie on the host; only live rows and sequences count."""
    live = (slots >= 0).nonzero().flatten()
    if not len(live):
        return
    where = row_seq[live].long()
    total = num_blocks * block_size
    _all(
        "slots", slots[live], slots[live] < total, f"below {total} (num_blocks * block_size)", live
    )
    limit = block_table.shape[1] * block_size
    limit = limit if max_model_len is None else min(limit, max_model_len)
    lengths = torch.tensor(seq_lens, dtype=torch.int64, device=where.device)[where]
    named = "block_table" if max_model_len is None else "max_model_len or block_table"
    _all("seq_lens", lengths, lengths <= limit, f"at most {limit} (what {named} holds)", where)
    position = row_pos[live].long()
    if bool((position < 0).any()):
        row = live[position < 0][0]
        seq = int(row_seq[row])
        raise found_needed(
            f"seq_lens[{seq}]",
            seq_lens[seq],
            "at least the number of its rows that are not padding",
        )
    blocks = block_table[where, position // block_size].long()
    used = torch.arange(block_table.shape[1], device=where.device)
    for seq in where.unique().tolist():
        entries = block_table[seq][used * block_size < seq_lens[seq]].long()
        _all(
            f"block_table[{seq}]",
            entries,
            (entries >= 0) & (entries < num_blocks),
            f"0 to {num_blocks - 1}, the cache's blocks",
        )
    place = blocks * block_size + position % block_size
    wrong = place != slots[live]
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise found_needed(
            f"slots[{int(live[i])}]",
            int(slots[live[i]]),
            f"{int(place[i])}, where block_table puts token {int(position[i])} of sequence "
            f"{int(where[i])}",
        )
    role = roles[live].long()
    _all("roles", role, (role >= 0) & (role <= 2), "0 (text), 1 (image) or 2 (page marker)", live)
    decoded = torch.ones_like(live, dtype=torch.bool)
    if positions is not None:
        tok, raw, pages, extra = positions[:, live].long().unbind(0)
        decoded = extra >= 0
        ok = (tok >= 0) & (raw >= 0) & (pages >= 0) & (pages <= MAX_PAGES)
        # A server may leave anything in rows 0 to 2 of a decoded token.
        ok |= decoded & (not recomputed)
        _all("positions", tok, ok, f"rows 0 to 2 of at least 0, at most {MAX_PAGES} pages", live)
    orphan = decoded & (position == 0) & (not recomputed)
    if bool(orphan.any()):
        row = int(live[orphan][0])
        raise found_needed(
            "positions",
            f"no coordinates for row {row}, the first token of its sequence",
            "those of the prompt (prompt_positions)",
        )


def _all(name: str, values: Tensor, ok: Tensor, needed: str, index: Tensor | None = None) -> None:
    if not bool(ok.all()):
        i = int((~ok).nonzero()[0])
        at = i if index is None else int(index[i])
        raise ArgumentError(f"{name}[{at}]: found {int(values[i])}, needed {needed}")
