"""The module and the operators: names, opcheck, compiled against eager."""

from __future__ import annotations

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
    # mean square 9 / 64, so the one entry becomes sqrt(64) = 8, doubled by 1 + w
    assert torch.allclose(norm(wide)[0, 0], torch.tensor(16.0), rtol=1e-4)
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


def test_compiles_without_a_break_and_equals_eager() -> None:
    module, hidden = layer(), torch.randn(len(ROLES), HIDDEN)
    caches = new_cache(), new_cache()
    with torch.no_grad():
        expected = module(hidden, planned(caches[0]), caches[0])
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        found = compiled(hidden, planned(caches[1]), caches[1])
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(*caches)
