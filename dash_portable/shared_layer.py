"""What store and select look like to a step, whoever does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from dash_portable.step import Step


class SharedLayer(Protocol):
    """Store and select: written once in Triton and once in torch, for all backends."""

    coordinates: Tensor

    def __init__(self, step: Step) -> None: ...

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        cache: Tensor,
        head_cls: Tensor,
        scale: float,
        floor: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store the rows; rotated queries, selected blocks and their biases."""

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        cache: Tensor,
        head_cls: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Write the rows' tokens; the rotated queries and index queries."""

    def select(
        self, index_query: Tensor, cache: Tensor, head_cls: Tensor, scale: float, floor: float
    ) -> tuple[Tensor, Tensor]:
        """Blocks of every row, and their biases."""

    def rebuild(self, cache: Tensor, head_cls: Tensor) -> None:
        """Summaries, page ranges and page starts of whole sequences that another owner stored."""

    def refresh(self) -> None:
        """Take over what was changed in place in the step's tensors."""
