"""The form of one layer's tensors: what a planned step expects of them, asked once a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dash_portable.cache import check_strides
from dash_portable.checks import FLOAT, check_rows, check_tensor, fits
from dash_portable.config import DashConfig
from dash_portable.errors import found_needed
from dash_portable.step import Step

_SHAPES = {
    "q": ("N", "Hq", "D"),
    "k": ("N", "H", "D"),
    "v": ("N", "H", "D"),
    "iq": ("N", "D"),
    "ik": ("N", "D"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """Shapes, types and device of q, k, v, iq, ik, head_cls, the cache and the output of a step.

    Made with the plan, so that a layer's run compares and computes nothing.
    """

    query: tuple[int, int, int]
    rows: tuple[int, int, int]
    index: tuple[int, int]
    cache: tuple[int, int, int, int]
    width: tuple[int]
    types: tuple[torch.dtype]
    device: torch.device

    @classmethod
    def of(cls, step: Step) -> LayerForm:
        rows, shape = step.num_rows, step.cache_shape
        heads, width = shape.kv_heads, shape.head_dim
        return cls(
            query=(rows, step.heads, width),
            rows=(rows, heads, width),
            index=(rows, width),
            cache=(shape.num_blocks, heads + 1, shape.block_size, 2 * width),
            width=(width,),
            types=(step.dtype,),
            device=step.device,
        )

    def check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        iq: Tensor,
        ik: Tensor,
        head_cls: Tensor | None,
        cache: Tensor,
    ) -> None:
        """ArgumentError for the first tensor that does not fit, before anything is written."""
        types, device = self.types, self.device
        if not (
            fits(cache, self.cache, types, device)
            and fits(q, self.query, types, device)
            and fits(k, self.rows, types, device)
            and fits(v, self.rows, types, device)
            and fits(iq, self.index, types, device)
            and fits(ik, self.index, types, device)
        ):
            check_tensor("cache", cache, self.cache, dtypes=types, device=device)
            given = zip(_SHAPES.items(), (q, k, v, iq, ik), strict=True)
            self._check_rows({name: (value, shape) for (name, shape), value in given})
        check_strides(cache.shape, cache.stride())
        if head_cls is not None and not fits(head_cls, self.width, FLOAT, device):
            sizes = {"D": self.width[0]}
            check_tensor("head_cls", head_cls, ("D",), dtypes=FLOAT, device=device, sizes=sizes)

    def check_out(self, out: Tensor) -> None:
        """ArgumentError unless the result may be written to `out`."""
        if not fits(out, self.query, self.types, self.device):
            self._check_rows({"out": (out, _SHAPES["q"])})
        if not out.is_contiguous():
            raise found_needed("out", f"strides {list(out.stride())}", "a contiguous tensor")

    def _check_rows(self, given: dict[str, tuple[Tensor, tuple[str, ...]]]) -> None:
        rows, heads, width = self.query
        sizes = {"N": rows, "Hq": heads, "H": self.rows[1], "D": width}
        check_rows(given, dtype=self.types[0], device=self.device, sizes=sizes)


def layer_numbers(config: DashConfig, layer: int) -> tuple[float, float]:
    """Scale and floor of one layer."""
    if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < config.num_layers:
        last = config.num_layers - 1
        needed = f"0 to {last}, the layers that the configuration has numbers for"
        raise found_needed("layer", repr(layer), needed)
    return config.scale[layer], config.floor[layer]
