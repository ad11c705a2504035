"""The rows that this package adds; no torch here, so that listing backends costs nothing."""

from dash_portable.backends.spec import Backend, Capability

BACKENDS = (
    Backend(
        name="loops",
        entry="dash_portable_loops_adapter:Gathered",
        check="dash_portable_loops_adapter:check",
        stages=("gather",),
        self_test=True,
        capability=Capability(
            packages=("dash-portable-loops",),
            versions=("1.0", None),
            dtypes=frozenset({"float16", "bfloat16"}),
            head_dims=frozenset(range(8, 249, 8)),
        ),
    ),
)
