"""Which generation of FlashAttention serves this device: the established questions and answers."""

from __future__ import annotations

from dash_portable import env
from dash_portable.backends import BACKENDS, flash_attn, probe, xpu
from dash_portable.backends.spec import runs_on
from dash_portable.platform.detect import current_platform
from dash_portable.platform.facts import Platform, Vendor, tokens

_BEFORE_HOPPER = ("Volta", "Turing", "Ampere", "Ada")


def _importable(platform: Platform, *, anywhere: bool = False) -> set[int]:
    """Generations that can be imported here, and that run on this device or `anywhere`."""
    offers = {
        (row.generation, row.check)
        for row in BACKENDS
        if row.generation is not None and (anywhere or runs_on(row, platform))
    }
    return {generation for generation, check in offers if not probe.attribute(check)(platform)}


def is_flash_attn_varlen_func_available() -> bool:
    """Whether this platform has a `flash_attn_varlen_func` that can be imported.

    AMD's aiter is another matter, and so is vLLM's copy on AMD.
    """
    platform = current_platform()
    if platform.vendor is Vendor.NVIDIA:
        return bool(_importable(platform, anywhere=True))
    if platform.vendor is Vendor.INTEL:
        return not xpu.check(platform)
    return platform.vendor is Vendor.AMD and not flash_attn.flash2_check(platform)


def get_flash_attn_version(
    requires_alibi: bool = False, head_size: int | None = None
) -> int | None:
    """The generation of FlashAttention that serves this device: 2, 3, 4, or None.

    `DASH_PORTABLE_FA_VERSION` goes before the device's own; what cannot do the call gives way to
    what can. Intel's library is of generation 2; on AMD generations mean nothing.
    """
    platform = current_platform()
    if platform.vendor is Vendor.INTEL:
        return 2
    if platform.vendor is not Vendor.NVIDIA:
        return None
    serving = _importable(platform)
    hopper, older = platform.arch in tokens("Hopper"), platform.arch in tokens(*_BEFORE_HOPPER)
    # sm100 and sm103 only: sm110 has the same kernels and has always been given 2.
    data_center = platform.arch in ("sm100", "sm103")
    version = 3 if hopper and 3 in serving else 4 if data_center and 4 in serving else 2
    version = env.read().fa_version or version
    if version == 3 and not (hopper or older):
        version = 4 if 4 in serving else 2
    if version in (3, 4) and requires_alibi:
        version = 2
    if version == 3 and head_size is not None and head_size > 256 and 4 in serving:
        version = 4
    # 256 has a kernel of its own there, for pages of 128 alone.
    if version == 4 and head_size is not None and head_size > 128 and not hopper:
        version = 2
    return version if version in serving else None
