"""Compile one launch row of one case for a GPU that is not here. Imports triton, in whichever build
is installed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .case import Case, Launch
from .targets import Target


def compile_launch(case: Case, launch: Launch, target: Target) -> Any:
    """What `triton.compile` returns for the row, specialised as a real launch specialises it.

    Raises whatever the compiler raises, and KeyError when an argument of the kernel is neither
    typed nor constant.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    consts = {**case.consts, **launch.consts}
    names = case.kernel.arg_names
    texts = {name: "constexpr" if name in consts else case.types[name] for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if texts[name].startswith("*") or texts[name].endswith(":16")
    }
    source = ASTSource(
        fn=case.kernel,
        signature={name: text.removesuffix(":16") for name, text in texts.items()},
        constexprs={(names.index(name),): value for name, value in consts.items()},
        attrs=aligned,
    )
    options = {"num_warps": launch.warps, **launch.options}
    if launch.stages:
        options["num_stages"] = launch.stages
    if target.vendor == "intel":
        _without_sycl()
        options["grf_mode"] = "default"
    gpu = GPUTarget(target.backend, target.arch, target.threads)
    return triton.compile(source, target=gpu, options=options)


def _without_sycl() -> None:
    """Intel's build compiles a SYCL helper only to turn an architecture number into a name; answer
    that ourselves.
    """
    from triton.backends import backends

    answer = SimpleNamespace(parse_device_arch=lambda number: "")
    scope = backends["intel"].compiler.__init__.__globals__
    scope["compile_module_from_src"] = lambda source, name: answer
