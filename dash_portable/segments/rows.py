"""Which keys a row reads: S remote segments and the local window, as starts and lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The runs of tokens that every row attends; the last column is the local window.

    start   [N, S + 1]  int32  first token, counted in the row's own sequence
    length  [N, S + 1]  int32  live tokens from there; 0 for an unused segment and for every segment
    of a padding row
    """

    start: Tensor
    length: Tensor


def spans(row_pos: Tensor, ids: Tensor, *, block: int, local: int) -> Spans:
    """Starts and lengths from positions int32 [N] (-1 padding) and block ids int32 [N, S] (-1
    unused).

    A remote block ends where the local window begins; a block that lies wholly inside the window is
    empty.
    """
    low = (row_pos + 1 - local).clamp(min=0)
    remote_start = ids.clamp(min=0) * block
    remote_length = (low[:, None] - remote_start).clamp(min=0, max=block)
    remote_length = torch.where((ids >= 0) & (row_pos >= 0)[:, None], remote_length, 0)
    local_length = torch.where(row_pos >= 0, row_pos + 1 - low, 0)
    return Spans(
        start=torch.cat((remote_start, low[:, None]), dim=1).to(torch.int32),
        length=torch.cat((remote_length, local_length[:, None]), dim=1).to(torch.int32),
    )


def slot_count(kept: int, *, block: int, local: int) -> int:
    """Key slots of a gathered row: one block for each kept id, then the window."""
    return kept * block + local


def slot_offsets(
    kept: int, *, block: int, local: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Segment of every slot, and the slot's place in that segment: two int64 [W]."""
    slot = torch.arange(slot_count(kept, block=block, local=local), device=device)
    segment = (slot // block).clamp(max=kept)
    return segment, slot - segment * block


def slot_tokens(where: Spans, *, block: int, local: int) -> tuple[Tensor, Tensor]:
    """Token of every slot int64 [N, W] (0 where unused) and whether the slot is used, bool [N,
    W]."""
    kept = where.start.shape[1] - 1
    segment, offset = slot_offsets(kept, block=block, local=local, device=where.start.device)
    used = offset < where.length[:, segment]
    token = where.start[:, segment] + offset
    return torch.where(used, token, 0), used
