"""Which generation of FlashAttention serves this device: the established questions and answers."""

from __future__ import annotations

from dash_portable import env
from dash_portable.backends import flash_attn, xpu
from dash_portable.platform.detect import current_platform
from dash_portable.platform.facts import Platform, Vendor, tokens


def _serving(platform: Platform) -> set[int]:
    """Generations that can be imported here and run on this device."""
    offers = {
        2: (flash_attn.flash2_check, flash_attn.copy2_check),
        3: (flash_attn.flash3_check, flash_attn.copy3_check),
        4: (flash_attn.flash4_check, flash_attn.copy4_check),
    }
    return {
        generation
        for generation, checks in offers.items()
        if any(not check(platform) for check in checks)
    }


def is_flash_attn_varlen_func_available() -> bool:
    """Whether this platform has a `flash_attn_varlen_func` that can be imported.

    AMD's aiter is another matter, and so is vLLM's copy on AMD.
    """
    platform = current_platform()
    if platform.vendor is Vendor.NVIDIA:
        return bool(_serving(platform))
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
    serving = _serving(platform)
    hopper = platform.arch in tokens("Hopper")
    # sm100 and sm103 only: sm110 is of the same family and has always been given 2.
    data_center = platform.arch in ("sm100", "sm103")
    newer = hopper or data_center or platform.arch in ("sm110", "sm120", "sm121")
    version = 3 if hopper and 3 in serving else 4 if data_center and 4 in serving else 2
    version = env.read().fa_version or version
    if version == 3 and newer and not hopper:
        version = 4 if data_center and 4 in serving else 2
    if version in (3, 4) and requires_alibi:
        version = 2
    if version == 3 and head_size is not None and head_size > 256 and 4 in serving:
        version = 4
    wide = head_size is not None and head_size > 128 and head_size != 256
    if version == 4 and wide and newer and not hopper:
        version = 2
    return version if version in serving else None
