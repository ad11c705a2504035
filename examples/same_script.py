"""One script for every vendor: a document's prompt and ten answer tokens through one layer of DASH.

    python examples/same_script.py

Nothing here asks which GPU there is: torch says where to put tensors, the package who attends.
"""

from __future__ import annotations

import torch

from dash_portable import DashConfig, DashStep, current_platform, empty_cache, prompt_positions

HEADS, WIDTH, CACHE_BLOCK = 10, 128, 64
TEXT, IMAGE, MARKER = 0, 1, 2


def main() -> None:
    device = torch.device(current_platform().device_type)
    torch.manual_seed(0)
    config = DashConfig(index_dim=WIDTH, scale=(60.0,), floor=(1e-4,))
    prompt = ([MARKER] + [IMAGE] * 273) * 3 + [TEXT] * 20  # three pages and an instruction
    answer = [MARKER] + [TEXT] * 9  # reads the first page
    blocks = -(-(len(prompt) + len(answer)) // CACHE_BLOCK)
    cache = empty_cache(config, blocks, HEADS, CACHE_BLOCK, device=device)
    table = torch.randperm(blocks).int().to(device)[None]
    head_cls = torch.randn(WIDTH, dtype=cache.dtype, device=device)

    def rows(count: int, *shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, WIDTH, dtype=cache.dtype, device=device)

    def layer(roles: list[int], before: int, positions: torch.Tensor | None) -> torch.Tensor:
        """Attend `roles` after `before` tokens: plan the step once, run it for every layer."""
        token = torch.arange(before, before + len(roles), device=device)
        slots = table[0, token // CACHE_BLOCK].long() * CACHE_BLOCK + token % CACHE_BLOCK
        step = DashStep.plan(
            [len(roles)],
            [before + len(roles)],
            table,
            slots,
            torch.tensor(roles, device=device),
            positions,
            config=config,
            cache=cache,
        )
        n = len(roles)
        q, k, v, iq, ik = rows(n, HEADS), rows(n, HEADS), rows(n, HEADS), rows(n), rows(n)
        out = step.run(q, k, v, iq, ik, cache, head_cls, layer=0)
        backend = step.choice.required().name
        print(f"{before:5d} + {n:4d} tokens  {backend:8s} mean |out| {out.abs().mean():.4f}")
        return out

    print(current_platform())
    layer(prompt, 0, prompt_positions(torch.tensor(prompt)).to(device))
    for i, role in enumerate(answer):
        layer([role], len(prompt) + i, None)


if __name__ == "__main__":
    main()
