"""What the model wants: its `sparse_attention_config` as a checked value."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dash_portable.errors import ConfigError, found_needed

# The one way of rotating, training and initialising that the rule is defined for.
_FIXED = {
    "sparse_main_rope_mode": "page2d",
    "training_stage": "dash",
    "dash_stage0": "head_cls",
}
BLOCKS = (8, 16, 32, 64, 128)
MAX_WINDOW = (
    16  # entmax window of the model's own inference code; kernels hold it in one register row
)
_MOST_LOCAL = 1024  # blocks: every row gathers its local window
_TINY = 2.0**-126  # smallest normal float32: below it the logarithm's argument becomes 0


class _Rule(NamedTuple):
    """What one field may hold: its key in a model's configuration, words for it, and a test."""

    key: str
    needed: str
    ok: Callable[[Any], bool]
    required: bool = False


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object, low: float, high: float) -> bool:
    # An integer too large for a float is outside every range: compared, never converted.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _between(key: str, low: int, high: int, *, required: bool = False) -> _Rule:
    needed = f"an integer from {low} to {high}"
    return _Rule(key, needed, lambda x: _is_integer(x) and low <= x <= high, required)


def _is_token_id(value: object) -> bool:
    return value is None or (isinstance(value, int) and _is_integer(value) and 0 <= value < 2**63)


_SCALE = _Rule("dash_scale_per_layer", "a number of float32", lambda x: _is_number(x, -1e30, 1e30))
_FLOOR = _Rule(
    "dash_floor_per_layer",
    "a number above 0, at most 1 (its log is taken in float32)",
    lambda x: _is_number(x, _TINY, 1),
)
_PER_LAYER = {"scale": _SCALE, "floor": _FLOOR}
_RULES = {
    "block": _Rule(
        "sparse_block_size",
        " or ".join(map(str, BLOCKS)),
        lambda x: _is_integer(x) and x in BLOCKS,
        required=True,
    ),
    "local_blocks": _between("sparse_local_block", 1, _MOST_LOCAL, required=True),
    "index_dim": _Rule(
        "sparse_index_dim",
        "a multiple of 16 from 64 to 256",
        lambda x: _is_integer(x) and 64 <= x <= 256 and x % 16 == 0,
        required=True,
    ),
    "window": _between("window", 1, MAX_WINDOW),
    "topk": _between("dash_topk_blocks", 1, MAX_WINDOW, required=True),
    "sigma": _Rule(
        "dash_sigma", "a number from 1e-30 to 1e30", lambda x: _is_number(x, 1e-30, 1e30)
    ),
    "theta": _Rule(
        "sparse_rope_tok_theta", "a number from 1 to 1e30", lambda x: _is_number(x, 1, 1e30)
    ),
    # Pages beyond the 16 bits in which they are kept cannot be told apart.
    "page_mod": _between("sparse_rope_page_mod", 1, 65536),
    "image_token_id": _Rule("image_token_id", "a token id, an integer of at least 0", _is_token_id),
    "page_token_id": _Rule("page_token_id", "a token id, an integer of at least 0", _is_token_id),
}
_REQUIRED = (
    *(rule.key for rule in _RULES.values() if rule.required),
    *(rule.key for rule in _PER_LAYER.values()),
    *_FIXED,
)
_OPTIONAL = (
    *(rule.key for rule in _RULES.values() if not rule.required),
    "sparse_rope_page_pairs",
)


def _wrong(key: str, found: object, needed: str) -> ConfigError:
    return ConfigError(f"sparse_attention_config[{key!r}]: found {found!r}, needed {needed}")


def _numbers(rule: _Rule, values: object) -> tuple[float, ...]:
    """One number a layer, each as the rule wants it."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)) or not values:
        raise _wrong(rule.key, values, "a list with one number a layer")
    for i, value in enumerate(values):
        if not rule.ok(value):
            raise _wrong(f"{rule.key}[{i}]", value, rule.needed)
    return tuple(float(value) for value in values)


def _check_keys(config: Mapping[str, Any]) -> None:
    """Every required key is there, and no optional one is there under a misspelt name."""
    for key in _REQUIRED:
        if key not in config:
            near = difflib.get_close_matches(key, [str(k) for k in config], n=1, cutoff=0.85)
            hint = f" (found {near[0]!r}; is it meant?)" if near else ""
            raise ConfigError(
                f"sparse_attention_config[{key!r}]: found nothing, needed a value{hint}"
            )
    absent = [key for key in _OPTIONAL if key not in config]
    for key in config:
        if key in _REQUIRED or key in _OPTIONAL:
            continue
        near = difflib.get_close_matches(str(key), absent, 1, 0.85)
        if near:
            raise ConfigError(
                f"sparse_attention_config[{key!r}]: found an unknown key, needed {near[0]!r}"
            )


def check_head_dim(width: int) -> None:
    """A head is as wide as the router's rows; ArgumentError where no configuration has those."""
    rule = _RULES["index_dim"]
    if not rule.ok(width):
        raise found_needed("head_dim", width, rule.needed)


def check_block_size(block_size: int, block: int) -> None:
    """A sparse block spans whole cache blocks or lies inside one; ArgumentError otherwise."""
    whole = isinstance(block_size, int) and not isinstance(block_size, bool)
    if not whole or block_size < 1 or (block_size % block and block % block_size):
        near = max(block, round(block_size / block) * block) if whole else block
        needed = f"a multiple or a divisor of the sparse block ({block}), for example {near}"
        raise found_needed("block_size", repr(block_size), needed)


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
    image_token_id, page_token_id   the tokenizer's ids of image tokens (role 1) and page markers
                   (role 2), for whoever makes roles of token ids; None where nobody does

    Values outside the rule raise ConfigError, under the names of `from_model`.
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

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            if not rule.ok(value := getattr(self, name)):
                raise _wrong(rule.key, value, rule.needed)
        if self.topk > self.window:
            needed = f"an integer from 1 to window ({self.window})"
            raise _wrong("dash_topk_blocks", self.topk, needed)
        for name, rule in _PER_LAYER.items():
            object.__setattr__(self, name, _numbers(rule, getattr(self, name)))
        if len(self.floor) != len(self.scale):
            needed = f"{len(self.scale)}, one a layer"
            raise _wrong("dash_floor_per_layer", f"{len(self.floor)} numbers", needed)
        for name in ("sigma", "theta"):
            object.__setattr__(self, name, float(getattr(self, name)))

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
        if num_layers is not None and not (_is_integer(num_layers) and num_layers >= 1):
            raise ConfigError(f"num_layers: found {num_layers!r}, needed an integer of at least 1")
        _check_keys(config)
        for key, value in _FIXED.items():
            if not isinstance(config[key], str) or config[key] != value:
                raise _wrong(key, config[key], repr(value))
        pairs = config.get("sparse_rope_page_pairs", 1)
        if not _is_integer(pairs) or pairs != 1:
            raise _wrong("sparse_rope_page_pairs", pairs, "1")
        rules = {**_RULES, **_PER_LAYER}
        given = {name: config[rule.key] for name, rule in rules.items() if rule.key in config}
        made = cls(**given)
        if num_layers is not None and made.num_layers != num_layers:
            found = f"{made.num_layers} numbers"
            raise _wrong("dash_scale_per_layer", found, f"{num_layers}, one a layer")
        return made
