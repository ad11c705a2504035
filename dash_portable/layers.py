"""The attention of one layer of a model, router included, under the model's own weight names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dash_portable import ops
from dash_portable.checks import check_integer, check_tensor
from dash_portable.config import DashConfig
from dash_portable.errors import found_needed
from dash_portable.layer_form import layer_numbers
from dash_portable.plan import DashStep
from dash_portable.reference import LIMIT


class RouterNorm(nn.Module):
    """RMSNorm with weight `1 + w`, clamped before and after: `[..., D]` to `[..., D]`."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed = scaled.clamp(-LIMIT, LIMIT) * (1 + self.weight.float())
        return normed.clamp(-LIMIT, LIMIT).to(x.dtype)


class DashRouter(nn.Module):
    """One index query and one index key per row, for all heads; and the summary query.

    hidden `[N, hidden_size]` to `iq, ik [N, index_dim]`, both before rotation.
    """

    def __init__(self, hidden_size: int, index_dim: int, eps: float) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden_size, index_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, index_dim, bias=False)
        self.q_norm = RouterNorm(index_dim, eps)
        self.k_norm = RouterNorm(index_dim, eps)
        self.head_cls = nn.Parameter(torch.zeros(index_dim))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(self.q_proj(hidden)), self.k_norm(self.k_proj(hidden))


class DashAttention(nn.Module):
    """DASH attention of one layer: projections, router, cache and output.

    Weights are named as in the model, below `self_attn.`: `q_proj`, `k_proj`, `v_proj`, `o_proj`,
    and `dash_router.{q_proj.weight, k_proj.weight, q_norm.weight, k_norm.weight, head_cls}`.

    >>> config = DashConfig(index_dim=64, scale=(20.0,), floor=(1e-4,))
    >>> sorted(name for name, _ in DashAttention(config, 0, 128, 2).named_parameters())[:3]
    ['dash_router.head_cls', 'dash_router.k_norm.weight', 'dash_router.k_proj.weight']
    """

    def __init__(
        self,
        config: DashConfig,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rms_norm_eps: float = 1e-6,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(config, DashConfig):
            raise found_needed("config", type(config).__name__, "a DashConfig")
        layer_numbers(config, layer)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        width = config.index_dim if head_dim is None else head_dim
        if width != config.index_dim:
            raise found_needed("head_dim", width, f"{config.index_dim}, the index width")
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": kv_heads}
        for name, size in sizes.items():
            check_integer(name, size, 1)
        if num_heads % kv_heads:
            raise found_needed("num_heads", num_heads, f"a multiple of num_kv_heads ({kv_heads})")
        self.config = config
        self.hidden_size = hidden_size
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = width
        self.q_proj = nn.Linear(hidden_size, num_heads * width, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(num_heads * width, hidden_size, bias=bias)
        self.dash_router = DashRouter(hidden_size, config.index_dim, rms_norm_eps)

    def forward(self, hidden: Tensor, step: DashStep, cache: Tensor) -> Tensor:
        """`[N, hidden_size]` of a step's rows to `[N, hidden_size]`; the cache is written.

        No gradient flows through the attention.
        """
        if not torch.compiler.is_compiling():
            if not isinstance(step, DashStep):
                found = type(step).__name__
                raise found_needed("step", found, "a DashStep, made by DashStep.plan")
            weight = self.q_proj.weight
            shape = (None, self.hidden_size)
            check_tensor("hidden", hidden, shape, dtypes=(weight.dtype,), device=weight.device)
        q = self.q_proj(hidden).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(hidden).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(hidden).unflatten(-1, (self.num_kv_heads, self.head_dim))
        iq, ik = self.dash_router(hidden)
        head_cls = self.dash_router.head_cls
        if torch.compiler.is_compiling():
            out = ops.run(step, q, k, v, iq, ik, cache, head_cls, self.layer)
        else:
            out = step.run(q, k, v, iq, ik, cache, head_cls, self.layer)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected
