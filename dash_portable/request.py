"""What is asked of attention, without tensors, so that a choice can be cached and tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from dash_portable.errors import found_needed

PHASES = ("prefill", "decode")
DTYPES = ("float16", "bfloat16", "float32", "float64")
FEATURES = ("in_place", "lse", "graph", "deterministic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One way of asking for attention; nothing in it changes from step to step.

    dtype, cache_dtype   torch's names without "torch."
    head_dim             D
    group_size           query heads per kv head
    block                tokens of a sparse block
    block_size           tokens of a cache block (P)
    in_place             the cache may not be gathered first
    lse                  segments attended apart, each with its log-mass
    graph                the step will be captured in a graph
    deterministic        same inputs, same bits

    Raises ArgumentError for an unknown phase or dtype and for a size below 1.
    """

    phase: str
    dtype: str
    cache_dtype: str
    head_dim: int
    group_size: int
    block: int
    block_size: int
    in_place: bool = False
    lse: bool = False
    graph: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise found_needed("phase", repr(self.phase), " or ".join(PHASES))
        for name, dtype in (("dtype", self.dtype), ("cache_dtype", self.cache_dtype)):
            if dtype not in DTYPES:
                raise found_needed(name, dtype, " or ".join(DTYPES))
        for name, size in self._sizes().items():
            if size < 1:
                raise found_needed(name, size, "1 or more")

    def _sizes(self) -> Mapping[str, int]:
        return {
            "head_dim": self.head_dim,
            "group_size": self.group_size,
            "block": self.block,
            "block_size": self.block_size,
        }

    @property
    def features(self) -> tuple[str, ...]:
        """The features that are asked for."""
        return tuple(name for name in FEATURES if getattr(self, name))

    def to_dict(self) -> dict[str, str | int | bool]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self._sizes().items())
        needs = f" needs {' '.join(self.features)}" if self.features else ""
        return f"{self.phase} {self.dtype} cache={self.cache_dtype} {sizes}{needs}"
