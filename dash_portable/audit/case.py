"""Case: one kernel as it is launched, written down so that it can be compiled where there is no
GPU.

Values only; needs neither triton nor torch. `dash_portable.kernels.cases.CASES` maps a name to a
Case, and the audit, the Intel lane, the disassembly checks and docs/kernels.md all read that one
table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

NOTHING: Mapping[str, Any] = MappingProxyType({})
EVERYWHERE = "*"  # the key of `Case.launch` for targets that have no rows of their own


class Launch(NamedTuple):
    """One launch row: what a row of `kernels/launch.py` says about this kernel on one arch."""

    warps: int = 4
    stages: int = 0  # 0: the compiler's own default
    consts: Mapping[str, Any] = NOTHING  # constexpr arguments this row sets: tiles, splits
    options: Mapping[str, Any] = NOTHING  # further compiler options (`waves_per_eu`, ...)
    label: str = ""  # tells two rows of one arch apart in reports


class Case(NamedTuple):
    """A kernel with the types and constants of one real launch.

    kernel      a @triton.jit function
    types       run-time arguments: name -> Triton's type text. "*bf16" is a pointer, taken as
                aligned to 16 bytes; "i32", "i64", "fp32" a scalar; "i32:16" an integer known to be
                a multiple of 16, which is what a launch tells the compiler about most strides: the
                hint changes the code, so give it where it is real
    consts      constexpr arguments: name -> value, also arguments that are launched as None or as
                the integer 1
    launch      target -> its launch rows; EVERYWHERE ("*") serves the targets that are not named
    matrix      True when the kernel is meant to use the matrix units (checked in the disassembly)
    wide        with matrix: True when its tiles are wide enough for the units that Hopper and
                data-centre Blackwell have beside mma (wgmma, tcgen05), which are then wanted there
    may_spill   targets on which a spill is accepted, with the reason; anywhere else a spill is a
                failure
    absent      targets that cannot have this kernel, with the reason: shown, not compiled. A
                vendor's name ("intel") covers all its targets
    """

    kernel: Any
    types: Mapping[str, str]
    consts: Mapping[str, Any] = NOTHING
    launch: Mapping[str, tuple[Launch, ...]] = MappingProxyType({EVERYWHERE: (Launch(),)})
    matrix: bool = False
    wide: bool = False
    may_spill: Mapping[str, str] = NOTHING
    absent: Mapping[str, str] = NOTHING

    def rows(self, target: str) -> tuple[Launch, ...]:
        """The launch rows shipped for a target; KeyError when the table has none for it."""
        found = self.launch.get(target, self.launch.get(EVERYWHERE))
        if found is None:
            raise KeyError(f"no launch row for {target} and none for {EVERYWHERE!r}")
        return found
