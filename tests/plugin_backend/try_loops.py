"""One real step through the new backend."""

import torch

from dash_portable import DashConfig, DashStep, empty_cache, prompt_positions

cfg = DashConfig(index_dim=64, scale=(20.0,), floor=(1e-4,))
cache = empty_cache(cfg, num_blocks=8, num_kv_heads=2, block_size=64)
roles, blocks, slots = torch.zeros(300).int(), torch.arange(8)[None], torch.arange(300)
at = prompt_positions(roles)
step = DashStep.plan(
    [300], [300], blocks, slots, roles, at, config=cfg, cache=cache, backend="loops"
)
q, k, v = torch.randn(3, 300, 2, 64).bfloat16()
iq, ik = torch.randn(2, 300, 64).bfloat16()
out = step.run(q, k, v, iq, ik, cache, torch.randn(64), layer=0)
print(step.choice.backend.name, out.shape)
