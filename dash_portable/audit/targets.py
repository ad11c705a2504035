"""The GPUs that kernels are compiled for, and what one program may use on each. Values only: a card
is a row.

shared   bytes of shared memory: NVIDIA the opt-in maximum of a block, AMD the LDS of a work-group,
         Intel the local memory of a work-group. No compiler checks it: a kernel far over it is
         built without a word and fails when it is launched.
regs     registers of one thread: NVIDIA 255, AMD 512 on CDNA (vector and accumulation registers
         together), 256 on RDNA; 0 where the compiler does not say (Intel: see ci/intel, Intel's
         offline compiler says it).
threads  in a warp (wavefront, sub-group). A program has at most 1024 threads on all of them.
matrix   False where Triton makes no matrix instructions for the target.
wide     in the names of the instructions of a second matrix unit, for wide tiles; empty: none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MAX_THREADS = 1024


class Target(NamedTuple):
    vendor: str
    arch: int | str | dict[str, Any]
    threads: int
    shared: int
    regs: int
    cards: str
    matrix: bool = True
    wide: str = ""

    @property
    def backend(self) -> str:
        """Triton's word for the vendor's compiler."""
        return {"nvidia": "cuda", "amd": "hip", "intel": "xpu"}[self.vendor]


def _nvidia(arch: int, shared: int, cards: str) -> Target:
    return Target("nvidia", arch, 32, shared, 255, cards)


def _amd(arch: str, threads: int, shared: int, regs: int, cards: str) -> Target:
    return Target("amd", arch, threads, shared, regs, cards)


# Intel's compiler takes a property set instead of a name. "generic" asks for no matrix unit and no
# 2-D block loads: it is what the CPU executes in the Intel lane, not a card.
_PVC: dict[str, Any] = {
    "name": "xpu",
    "platform_name": "Level-Zero",
    "vendor": "Intel",
    "version": "1.6",
    "architecture": 0,
    "gpu_eu_count": 512,
    "gpu_subslice_count": 64,
    "max_work_group_size": 1024,
    "max_num_sub_groups": 64,
    "sub_group_sizes": [16, 32],
    "has_fp64": True,
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
    "has_subgroup_2d_block_io": True,
    "has_bfloat16_conversions": True,
}
_DG2 = _PVC | {
    "sub_group_sizes": [8, 16, 32],
    "has_fp64": False,
    "has_subgroup_2d_block_io": False,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": False,
}
_GENERIC = _PVC | {
    "has_subgroup_2d_block_io": False,
    "has_subgroup_matrix_multiply_accumulate": False,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": False,
    "has_bfloat16_conversions": False,
}

# What the Triton of the main environment compiles for.
TARGETS: dict[str, Target] = {
    "sm80": _nvidia(80, 166912, "A100"),
    "sm86": _nvidia(86, 101376, "A10, RTX 30"),
    "sm89": _nvidia(89, 101376, "L4, L40S, RTX 40"),
    "sm90": _nvidia(90, 232448, "H100, H200")._replace(wide="GMMA"),
    "sm100": _nvidia(100, 232448, "B200")._replace(wide="UTC"),
    "sm120": _nvidia(120, 101376, "RTX 50, RTX PRO 6000"),
    "gfx90a": _amd("gfx90a", 64, 65536, 512, "MI210, MI250"),
    "gfx942": _amd("gfx942", 64, 65536, 512, "MI300A, MI300X, MI325X"),
    "gfx950": _amd("gfx950", 64, 163840, 512, "MI350X, MI355X"),
    "gfx1100": _amd("gfx1100", 32, 65536, 256, "RX 7900"),
    "gfx1151": _amd("gfx1151", 32, 65536, 256, "Strix Halo"),
    "gfx1201": _amd("gfx1201", 32, 65536, 256, "RX 9070"),
}

# What Intel's own build of Triton compiles for, in the Intel lane's environment.
INTEL_TARGETS: dict[str, Target] = {
    "pvc": Target("intel", _PVC, 32, 131072, 0, "Data Center GPU Max"),
    "dg2": Target("intel", _DG2, 32, 65536, 0, "Arc A", matrix=False),
    "generic": Target("intel", _GENERIC, 32, 65536, 0, "none: executed on a CPU", matrix=False),
}
ALL_TARGETS: dict[str, Target] = TARGETS | INTEL_TARGETS

# One of each memory size and each kind of matrix unit: what every change is held to in a quick run.
QUICK = ("sm80", "sm90", "sm120", "gfx942", "gfx950", "gfx1100")
