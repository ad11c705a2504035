"""A model's `sparse_attention_config`: read strictly, and every error names the key."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

import pytest
import torch

from dash_portable import ConfigError, DashConfig
from dash_portable.attention import config_of

MODEL: dict[str, Any] = {
    "sparse_block_size": 32,
    "sparse_local_block": 4,
    "sparse_index_dim": 128,
    "dash_topk_blocks": 12,
    "dash_scale_per_layer": [60.0, 61.5, 70],
    "dash_floor_per_layer": [1e-4, 1e-3, 1],
    "sparse_main_rope_mode": "page2d",
    "training_stage": "dash",
    "dash_stage0": "head_cls",
}
OPTIONAL: dict[str, Any] = {
    "dash_sigma": 2,
    "sparse_rope_page_pairs": 1,
    "sparse_rope_page_mod": 3,
    "sparse_rope_tok_theta": 500,
    "window": 12,
    "image_token_id": 5,
    "page_token_id": 7,
}
NONE_OF = (None, "32", [32], (), {}, 32.0, True, float("nan"), float("inf"), 10**400, 1j, b"x")


def test_the_defaults_are_the_models() -> None:
    config = DashConfig.from_model(MODEL, num_layers=3)
    assert config == DashConfig(index_dim=128, scale=(60.0, 61.5, 70.0), floor=(1e-4, 1e-3, 1.0))
    assert (config.block, config.local_blocks, config.local) == (32, 4, 128)
    assert (config.topk, config.window, config.num_layers) == (12, 16, 3)
    assert (config.sigma, config.theta, config.page_mod) == (1.0, 10000.0, 2)
    assert config.image_token_id is None


def test_every_key_is_read() -> None:
    config = DashConfig.from_model(MappingProxyType({**MODEL, **OPTIONAL, "hidden_size": 1280}))
    assert (config.window, config.sigma, config.theta, config.page_mod) == (12, 2.0, 500.0, 3)
    assert (config.image_token_id, config.page_token_id) == (5, 7)
    assert all(isinstance(x, float) for x in (*config.scale, *config.floor, config.sigma))


def refused(config: Any, begin: str, needed: str = "", **options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        DashConfig.from_model(config, **options)
    text = str(caught.value)
    assert text.startswith(begin), text
    assert re.fullmatch(r"[^\n]+: found [^\n]+, needed [^\n]+", text), text
    assert needed in text


def key(name: str) -> str:
    return f"sparse_attention_config[{name!r}]: found "


@pytest.mark.parametrize("name", sorted(MODEL))
def test_a_missing_key(name: str) -> None:
    refused({k: x for k, x in MODEL.items() if k != name}, key(name) + "nothing", "a value")


@pytest.mark.parametrize("name", sorted(MODEL))
def test_a_misspelt_key(name: str) -> None:
    wrong = name[:-1] + "_"
    refused({(wrong if k == name else k): x for k, x in MODEL.items()}, key(name), repr(wrong))


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_a_misspelt_optional_key(name: str) -> None:
    refused({**MODEL, name + "s": OPTIONAL[name]}, key(name + "s") + "an unknown key", repr(name))


WRONG: dict[str, tuple[object, ...]] = {
    "sparse_block_size": (*NONE_OF, 0, -32, 4, 24, 256),
    "sparse_local_block": (*NONE_OF, 0, -1, 1025),
    "sparse_index_dim": (*NONE_OF, 0, 48, 100, 272, -64),
    "dash_topk_blocks": (*NONE_OF, 0, -1, 17),
    "dash_scale_per_layer": (None, 60.0, "60", b"60", [], {}, {60.0}, range(0), torch.ones(3)),
    "dash_floor_per_layer": (None, 1e-4, "1", [], [1e-4], [1e-4] * 4),
    "sparse_main_rope_mode": (None, "page1d", "PAGE2D", 2, ["page2d"], torch.ones(2)),
    "training_stage": (None, "dense", True),
    "dash_stage0": (None, "mean", 0),
    "window": (*NONE_OF, 0, 17, -1),
    "dash_sigma": (None, "1", 0, -1.0, 1e-40, True, float("nan"), float("inf"), 10**400, 1j),
    "sparse_rope_tok_theta": (None, "1", 0, 0.5, -1.0, True, float("nan"), float("inf"), 10**400),
    "sparse_rope_page_mod": (*NONE_OF, 0, -2, 65537),
    "sparse_rope_page_pairs": (*NONE_OF, 0, 2),
    "image_token_id": ("5", -1, 5.0, True, [5], 10**400),
    "page_token_id": ("5", -1, 5.0, True, [5]),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}-{value!r:.20}")
        for name, values in WRONG.items()
        for value in values
    ],
)
def test_a_wrong_value(name: str, value: object) -> None:
    refused({**MODEL, name: value}, key(name))


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), -float("inf"), 10**400, [1.0]])
@pytest.mark.parametrize("name", ["dash_scale_per_layer", "dash_floor_per_layer"])
def test_a_wrong_number_of_a_layer(name: str, value: object) -> None:
    refused({**MODEL, name: [1.0, value, 1.0]}, key(f"{name}[1]"))


@pytest.mark.parametrize("value", [0, -1e-4, 1e-40, 1.5])
def test_a_floor_has_a_logarithm(value: float) -> None:
    refused({**MODEL, "dash_floor_per_layer": [1e-4, 1e-4, value]}, key("dash_floor_per_layer[2]"))


def test_lists_are_as_long_as_the_layers() -> None:
    refused(MODEL, key("dash_scale_per_layer"), "4, one a layer", num_layers=4)
    refused({**MODEL, "dash_floor_per_layer": [1e-4] * 2}, key("dash_floor_per_layer"), "3, one")


@pytest.mark.parametrize("layers", [0, -1, True, 3.0, "3"])
def test_a_wrong_number_of_layers(layers: object) -> None:
    refused(MODEL, "num_layers: found ", "at least 1", num_layers=layers)


def test_topk_fits_the_window() -> None:
    refused({**MODEL, "window": 8}, key("dash_topk_blocks") + "12", "window (8)")


@pytest.mark.parametrize("config", [None, 3, "x", [("window", 16)], object()])
def test_no_mapping(config: object) -> None:
    refused(config, "sparse_attention_config: found ", "a mapping")


@pytest.mark.parametrize(
    "changes",
    [{"block": 24}, {"index_dim": 100}, {"topk": 17}, {"window": 4}, {"scale": (1.0,)},
     {"floor": (0.0,) * 3}, {"sigma": 0}, {"theta": "x"}, {"local_blocks": 0}, {"page_mod": 0}],
)  # fmt: skip
def test_a_config_made_by_hand_is_checked_too(changes: dict[str, Any]) -> None:
    right = {"index_dim": 128, "scale": (1.0,) * 3, "floor": (1e-4,) * 3}
    with pytest.raises(ConfigError, match=r"found .*, needed "):
        DashConfig(**{**right, **changes})


def test_what_is_remembered_does_not_let_equal_values_of_another_type_pass() -> None:
    """True equals 1 and 32.0 equals 32, also as keys."""
    right = {**MODEL, "sparse_local_block": 1}
    assert config_of(right) is config_of(dict(right))
    for name, value in (("sparse_local_block", True), ("sparse_block_size", 32.0)):
        with pytest.raises(ConfigError, match=name):
            config_of({**right, name: value})
    with pytest.raises(ConfigError, match="dash_floor_per_layer"):
        config_of({**right, "dash_floor_per_layer": [1e-4, 1e-3, True]})
