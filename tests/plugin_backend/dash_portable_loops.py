"""The row; no torch here, so that listing backends costs nothing."""

from dash_portable.backends.spec import Backend, Capability
from dash_portable.platform.facts import Vendor

BACKENDS = (
    Backend(
        name="loops",
        entry="dash_portable_loops_adapter:Gathered",
        check="dash_portable_loops_adapter:check",
        stages=("gather",),  # what is done before and after it; with Segments: "gather", "merge"
        self_test=True,  # tested against the oracle before it first runs on a kind of device
        capability=Capability(
            vendors=frozenset({Vendor.CPU}),  # NVIDIA, AMD, INTEL; left out: any
            packages=("dash-portable-loops",),  # distributions, of which one must be installed
            versions=("1.0", None),  # from, and up to but not including
            dtypes=frozenset({"float16", "bfloat16"}),  # float32 too; left out: any
            head_dims=frozenset(range(8, 249, 8)),  # of the model; its keys are 8 columns wider
            features=frozenset(),  # of in_place, lse, graph, deterministic
        ),
    ),
)
