"""What the model wants: its `sparse_attention_config` as a checked value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dash_portable.errors import ConfigError

# The one way of rotating, training and initialising that the rule is defined for.
_FIXED = {
    "sparse_main_rope_mode": "page2d",
    "training_stage": "dash",
    "dash_stage0": "head_cls",
}
_DEFAULTS: dict[str, Any] = {
    "dash_sigma": 1.0,
    "sparse_rope_page_pairs": 1,
    "sparse_rope_page_mod": 2,
    "sparse_rope_tok_theta": 10000.0,
    "window": 16,
    "image_token_id": None,
    "page_token_id": None,
}
_REQUIRED = (
    "sparse_block_size",
    "sparse_local_block",
    "sparse_index_dim",
    "dash_topk_blocks",
    "dash_scale_per_layer",
    "dash_floor_per_layer",
    *_FIXED,
)
BLOCKS = (8, 16, 32, 64, 128)
MAX_WINDOW = (
    16  # entmax window of the model's own inference code; kernels hold it in one register row
)


def _wrong(key: str, found: object, needed: str) -> ConfigError:
    return ConfigError(f"sparse_attention_config[{key!r}]: found {found!r}, needed {needed}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _integer(config: Mapping[str, Any], key: str, needed: str, ok: Callable[[int], bool]) -> int:
    value = config.get(key, _DEFAULTS.get(key))
    if not isinstance(value, int) or isinstance(value, bool) or not ok(value):
        raise _wrong(key, value, needed)
    return value


def _positive(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key, _DEFAULTS.get(key))
    if not _is_number(value) or value <= 0:
        raise _wrong(key, value, "a finite number above 0")
    return float(value)


def _per_layer(config: Mapping[str, Any], key: str, layers: int | None) -> tuple[float, ...]:
    values = config[key]
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise _wrong(key, values, "a list with one number a layer")
    if layers is not None and len(values) != layers:
        raise _wrong(key, f"{len(values)} numbers", f"{layers}, one a layer")
    for i, value in enumerate(values):
        if not _is_number(value):
            raise _wrong(f"{key}[{i}]", value, "a finite number")
    return tuple(float(value) for value in values)


def _token_id(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise _wrong(key, value, "a token id, an integer of at least 0")
    return value


def _check_keys(config: Mapping[str, Any]) -> None:
    """Every required key is there, and no optional one is there under a misspelt name."""
    for key in _REQUIRED:
        if key not in config:
            near = difflib.get_close_matches(key, [str(k) for k in config], n=1, cutoff=0.85)
            hint = f" (found {near[0]!r}; is it meant?)" if near else ""
            raise ConfigError(
                f"sparse_attention_config[{key!r}]: found nothing, needed a value{hint}"
            )
    for key in config:
        if key in _REQUIRED or key in _DEFAULTS:
            continue
        near = difflib.get_close_matches(
            str(key), [k for k in _DEFAULTS if k not in config], 1, 0.85
        )
        if near:
            raise ConfigError(
                f"sparse_attention_config[{key!r}]: found an unknown key, needed {near[0]!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DashConfig:
    """The numbers of the DASH rule for one model.

    block          tokens of a sparse block, the unit that is selected
    local_blocks   blocks of the local window
    topk           remote blocks kept per row
    window         best candidates that entmax looks at, at most 16
    scale, floor   one number a layer: scale of the scores, smallest prior
    sigma          divides the bias
    index_dim      width of the router's rows, equal to the head width
    theta          base of the token angles; page_mod: pages are told apart modulo this
    """

    index_dim: int
    scale: tuple[float, ...]
    floor: tuple[float, ...]
    block: int = 32
    local_blocks: int = 4
    topk: int = 12
    window: int = 16
    sigma: float = 1.0
    theta: float = 10000.0
    page_mod: int = 2
    image_token_id: int | None = None
    page_token_id: int | None = None

    @property
    def local(self) -> int:
        """Tokens of the local window, the row's own included."""
        return self.local_blocks * self.block

    @property
    def num_layers(self) -> int:
        return len(self.scale)

    @classmethod
    def from_model(cls, config: Mapping[str, Any], num_layers: int | None = None) -> DashConfig:
        """Read a model's `sparse_attention_config`.

        Missing keys, wrong types, values outside the rule and lists of another length than
        `num_layers` (or than each other) raise ConfigError with the key, what was found and what
        is needed. Keys that the rule does not know are left to the model.

        >>> DashConfig.from_model({"sparse_block_size": 32})
        Traceback (most recent call last):
        dash_portable.errors.ConfigError: sparse_attention_config['sparse_local_block']: found \
nothing, needed a value
        """
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"sparse_attention_config: found {type(config).__name__}, needed a mapping"
            )
        _check_keys(config)
        for key, value in _FIXED.items():
            if config[key] != value:
                raise _wrong(key, config[key], repr(value))
        blocks = " or ".join(map(str, BLOCKS))
        topk_max = config.get("window", _DEFAULTS["window"])
        window = _integer(
            config, "window", f"an integer from 1 to {MAX_WINDOW}", lambda n: 1 <= n <= MAX_WINDOW
        )
        _integer(config, "sparse_rope_page_pairs", "1", lambda n: n == 1)
        scale = _per_layer(config, "dash_scale_per_layer", num_layers)
        floor = _per_layer(config, "dash_floor_per_layer", num_layers or len(scale))
        for i, value in enumerate(floor):
            if value <= 0:
                raise _wrong(
                    f"dash_floor_per_layer[{i}]", value, "a number above 0 (its log is taken)"
                )
        return cls(
            block=_integer(config, "sparse_block_size", blocks, lambda n: n in BLOCKS),
            local_blocks=_integer(
                config, "sparse_local_block", "an integer of at least 1", lambda n: n >= 1
            ),
            topk=_integer(
                config,
                "dash_topk_blocks",
                f"an integer from 1 to window ({topk_max})",
                lambda n: 1 <= n <= window,
            ),
            window=window,
            index_dim=_integer(
                config,
                "sparse_index_dim",
                "a multiple of 16 from 64 to 256",
                lambda n: 64 <= n <= 256 and n % 16 == 0,
            ),
            scale=scale,
            floor=floor,
            sigma=_positive(config, "dash_sigma"),
            theta=_positive(config, "sparse_rope_tok_theta"),
            page_mod=_integer(
                config, "sparse_rope_page_mod", "an integer of at least 1", lambda n: n >= 1
            ),
            image_token_id=_token_id(config, "image_token_id"),
            page_token_id=_token_id(config, "page_token_id"),
        )
