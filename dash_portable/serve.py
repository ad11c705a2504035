"""From a described step to who serves it: the request, the choice, the shared layer, the runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dash_portable import dispatch, env
from dash_portable.platform.detect import is_capturing
from dash_portable.request import Request

if TYPE_CHECKING:
    from dash_portable.backends.spec import Runner
    from dash_portable.choice import Choice
    from dash_portable.shared_layer import SharedLayer
    from dash_portable.step import Step


def dtype_name(dtype: Any) -> str:
    """torch's name of a type, without "torch."."""
    return str(dtype).removeprefix("torch.")


def request_of(step: Step) -> Request:
    """What a step asks of attention."""
    return Request(
        phase="decode" if step.max_query_len == 1 else "prefill",
        dtype=dtype_name(step.dtype),
        cache_dtype=dtype_name(step.dtype),
        head_dim=step.head_dim,
        group_size=step.group,
        block=step.config.block,
        block_size=step.block_size,
        # Nothing is captured on a CPU: such a step is only refilled. A call may be captured without
        # having said so: whoever cannot be has to refuse then, too.
        graph=(step.graph or is_capturing()) and step.device.type != "cpu",
        deterministic=step.deterministic,
    )


def serve(step: Step, backend: str | None) -> tuple[Choice, SharedLayer, Runner]:
    """Choose for a step and plan it; raises as `dispatch.plan`."""
    choice, runner = dispatch.plan(step, request_of(step), backend=backend)
    return choice, _layer(choice, step), runner


def shared_layer(step: Step) -> SharedLayer:
    """Who stores and selects for a step that attends nothing."""
    return _layer(dispatch.choice_for(request_of(step), step.device), step)


def _layer(choice: Choice, step: Step) -> SharedLayer:
    choice.required()
    assert choice.layer is not None  # required() raises where there is none
    layer: SharedLayer = choice.layer.load()(step)  # type: ignore[assignment]
    return layer


def deterministic(argument: bool | None) -> bool:
    """Whether equal inputs must give equal bits; the argument wins over the environment."""
    return env.deterministic() if argument is None else argument
