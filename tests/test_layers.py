"""The module and the operators: names, opcheck, compiled against eager."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import Tensor, nn

from dash_portable import DashAttention, DashConfig, DashStep, empty_cache, prompt_positions
from dash_portable.ops import tensors_of

CONFIG = DashConfig(index_dim=64, scale=(30.0, 40.0), floor=(1e-4, 1e-3), local_blocks=2)
ROLES = torch.tensor([2] + [1] * 150 + [2] + [1] * 90 + [0] * 20)
HIDDEN, HEADS, KV_HEADS, SIZE = 96, 4, 2, 16


def layer() -> DashAttention:
    torch.manual_seed(0)
    module = DashAttention(CONFIG, 1, HIDDEN, HEADS, KV_HEADS)
    nn.init.normal_(module.dash_router.head_cls)
    return module


def planned(cache: Tensor, roles: Tensor = ROLES) -> DashStep:
    tokens = len(roles)
    table = torch.randperm(cache.shape[0], generator=torch.Generator().manual_seed(1))[None].int()
    at = torch.arange(tokens)
    return DashStep.plan(
        [tokens],
        [tokens],
        table,
        table[0, at // SIZE].long() * SIZE + at % SIZE,
        roles,
        prompt_positions(roles),
        config=CONFIG,
        cache=cache,
        num_heads=HEADS,
    )


def new_cache() -> Tensor:
    return empty_cache(CONFIG, 20, KV_HEADS, SIZE, dtype=torch.float32)


def test_weight_names_are_the_models() -> None:
    names = {name for name, _ in layer().named_parameters()}
    router = {f"dash_router.{n}.weight" for n in ("q_proj", "k_proj", "q_norm", "k_norm")}
    projections = {f"{n}_proj.weight" for n in "qkvo"}
    assert names == router | projections | {"dash_router.head_cls"}


def test_router_norm_clamps_before_and_after() -> None:
    norm = layer().dash_router.q_norm
    norm.weight.data.fill_(1.0)
    wide = torch.zeros(1, 64)
    wide[0, 0] = 3.0
    # mean square 9 / 64, so the one entry becomes sqrt(64) = 8, doubled by 1 + w; less what eps
    # adds below the root, and four roundings
    exact = 2 * 3 / math.sqrt(9 / 64 + norm.eps)
    assert (
        abs(float(norm(wide).detach()[0, 0]) - exact) <= 4 * torch.finfo(torch.float32).eps * exact
    )
    norm.weight.data.fill_(1e5)
    assert float(norm(wide).detach().max()) == 1e4


def test_operators_pass_opcheck() -> None:
    cache = new_cache()
    step = planned(cache)
    rows = len(ROLES)
    q = torch.randn(rows, HEADS, 64)
    k, v = torch.randn(2, rows, KV_HEADS, 64)
    iq, ik = torch.randn(2, rows, 64)
    head_cls = torch.randn(64)
    rest = (*tensors_of(step.step), step.facts)
    operators = torch.ops.dash_portable
    store = (q, k, v, iq, ik, cache, head_cls, *rest)
    torch.library.opcheck(operators.store.default, store)
    query, index_query, coordinates = operators.store(*store)
    select = (index_query, coordinates, cache, head_cls, 40.0, 1e-3, *rest)
    torch.library.opcheck(operators.select.default, select)
    ids, bias = operators.select(*select)
    attend = (query, cache, ids, bias, "sdpa", *rest)
    torch.library.opcheck(operators.attend.default, attend)
    expected = step.run(q, k, v, iq, ik, cache, head_cls, 1)
    assert torch.equal(operators.attend(*attend), expected)


def ran(hidden: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Output and cache of the module, compiled if a backend is given."""
    cache, module = new_cache(), layer()
    torch.compiler.reset()
    with torch.no_grad():
        call = torch.compile(module, fullgraph=True, backend=backend) if backend else module
        return call(hidden, planned(cache), cache), cache


def hidden_states() -> Tensor:
    return torch.randn(len(ROLES), HIDDEN, generator=torch.Generator().manual_seed(2))


def test_compiles_without_a_break_and_equals_eager() -> None:
    found, expected = ran(hidden_states(), "aot_eager"), ran(hidden_states())
    assert all(map(torch.equal, found, expected))


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
def test_inductor_compiles_it() -> None:
    """Its code for the router's norms rounds otherwise, about as a changed input would: eight
    roundings are allowed of what one rounding of the hidden states changes.
    """
    hidden = hidden_states()
    found, expected = ran(hidden, "inductor"), ran(hidden)
    moved = ran(torch.nextafter(hidden, torch.full_like(hidden, torch.inf)))
    for ours, exact, other in zip(found, expected, moved, strict=True):
        assert float((ours - exact).abs().max()) <= 8 * float((other - exact).abs().max())
