"""Does a backend compute right on this machine? A tiny document is held against the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dash_portable.backends import SHARED
from dash_portable.backends.spec import Backend
from dash_portable.document import Document, paged
from dash_portable.platform.facts import Platform

if TYPE_CHECKING:
    import torch

    from dash_portable.plan import SharedLayer
    from dash_portable.trial.verify import Check

_TYPES = ("bfloat16", "float16", "float32")
HEADS = 2
_LOOKED = 24  # rows of a step that are held against the oracle


def tiny() -> Document:
    """Two pages with rows of every kind: none, some and more remote blocks than are kept."""
    return paged(2, answer=4, instruction=8)


def run(backend: Backend, platform: Platform) -> str:
    """Take a tiny document through a backend; "" when all of it agrees with the oracle.

    Store and select are the backend's own where it has them, else plain torch: what is tested is
    who attends. Whatever goes wrong in a library comes back as text.
    """
    import torch

    device = torch.device(platform.device_type)
    takes = backend.capability.dtypes
    for name in [one for one in _TYPES if takes is None or one in takes][:2]:
        try:
            checks = _checks(backend, device, getattr(torch, name))
        except Exception as error:  # a library may fail with anything: its words are the verdict
            return " ".join(f"{name}: {type(error).__name__}: {error}".split())
        for check in checks:
            if not check.ok:
                return f"{name}: {check.name} off by {check.error:.3g}, allowed {check.allowed:.3g}"
    return ""


def _checks(backend: Backend, device: torch.device, dtype: torch.dtype) -> list[Check]:
    import torch

    from dash_portable.document import model_config
    from dash_portable.trial.feed import Feed, watch
    from dash_portable.trial.inputs import layer_inputs
    from dash_portable.trial.verify import Oracle, worst

    row = next((row for row in SHARED if row.name == backend.name), SHARED[-1])
    document, config = tiny(), model_config()
    feed = Feed(
        document=document,
        config=config,
        heads=HEADS,
        kv_heads=HEADS,
        dtype=dtype,
        device=device,
        block_size=32,
    )
    inputs = layer_inputs(
        document, config, heads=HEADS, kv_heads=HEADS, dtype=dtype, device=device, seed=0
    )
    oracle, prompt = Oracle(feed), feed.prompt_len
    checks: list[Check] = []
    middle = prompt // 2 + 5
    spans = [(0, middle), (middle, prompt)]
    spans += [(token, token + 1) for token in range(prompt, len(document))]
    for first, last in spans:
        step = feed.describe(first, last)
        layer: SharedLayer = row.load()(step)  # type: ignore[assignment]
        rows, cache = inputs.rows(first, last), feed.caches[0]
        ran = watch(step, layer, backend.load()(step), rows, cache, inputs.head_cls, 0)
        looked = torch.linspace(0, last - first - 1, min(_LOOKED, last - first)).long()
        checks += oracle.check(inputs, 0, step, ran, looked)
    return worst(checks)
