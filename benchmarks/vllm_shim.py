"""vLLM's `flash_attn_varlen_func` over its bare extension modules, where vLLM itself is not
installed.

Only for measuring: `install(folder)` loads `_vllm_fa2_C.abi3.so` and `_vllm_fa3_C.abi3.so`, packed
or not, from a folder, and puts a module in vLLM's place that the adapters cannot tell from it.

    python -m benchmarks.vllm_shim FOLDER -m pytest tests/test_contracts.py -k real

runs a module as `python -m` does, with these in place.
"""

from __future__ import annotations

import lzma
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor


def install(folder: Path) -> list[int]:
    """The generations that were found and loaded."""
    found = [version for version in (2, 3) if _load(folder, f"_vllm_fa{version}_C.abi3.so")]

    def fa_version_unsupported_reason(fa_version: int) -> str | None:
        return None if fa_version in found else f"FA{fa_version} was not packed"

    def is_fa_version_supported(fa_version: int) -> bool:
        return fa_version in found

    module = ModuleType("vllm.vllm_flash_attn")
    module.__dict__.update(
        flash_attn_varlen_func=flash_attn_varlen_func,
        fa_version_unsupported_reason=fa_version_unsupported_reason,
        is_fa_version_supported=is_fa_version_supported,
    )
    parent = ModuleType("vllm")
    parent.__dict__.update(__path__=[], vllm_flash_attn=module)
    sys.modules["vllm"], sys.modules["vllm.vllm_flash_attn"] = parent, module
    return found


def _load(folder: Path, name: str) -> bool:
    library, packed = folder / name, folder / f"{name}.xz"
    if not library.exists() and packed.exists():
        library = Path(tempfile.gettempdir()) / name
        if not library.exists():
            with (
                lzma.open(packed) as source,
                tempfile.NamedTemporaryFile(dir=library.parent, delete=False) as target,
            ):
                shutil.copyfileobj(source, target)
            Path(target.name).replace(library)
    if not library.exists():
        return False
    torch.ops.load_library(str(library))
    return True


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: list[int] | None = None,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
) -> Tensor | tuple[Tensor, Tensor]:
    """The arguments that DASH uses, as vLLM 0.33.0 hands them to its two extension modules."""
    assert (cu_seqlens_k is None) != (seqused_k is None), "one of the two"
    left, right = window_size or (-1, -1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if fa_version == 2:
        starts = torch.empty_like(cu_seqlens_q) if cu_seqlens_k is None else cu_seqlens_k
        got = torch.ops._vllm_fa2_C.varlen_fwd(
            *(q, k, v, out, cu_seqlens_q, starts, seqused_k, None, block_table, None),
            *(max_seqlen_q, max_seqlen_k, 0.0, scale, False, causal, left, right, 0.0, False),
            *(num_splits, None),
        )
    else:
        got = torch.ops._vllm_fa3_C.fwd(
            *(q, k, v, None, None, None, out, cu_seqlens_q, cu_seqlens_k, None, None, seqused_k),
            *(max_seqlen_q, max_seqlen_k, block_table, None, None, None, None, None),
            *(None, None, None, scale, causal, left, right, 0.0, True, None, num_splits, None),
            *(0, None, 1, 0, None),
        )
    return (got[0], got[1]) if return_softmax_lse else got[0]


if __name__ == "__main__":
    _, folder, flag, name, *rest = sys.argv
    assert flag == "-m", f"found {flag!r}, needed: FOLDER -m MODULE ..."
    print("generations of FlashAttention:", install(Path(folder)))
    sys.argv = [name, *rest]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
