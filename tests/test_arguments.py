"""Every kind of wrong argument: one clear error, and a cache whose every bit is as before."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import dash_portable
from dash_portable import DashAttention, DashStep, empty_cache, prompt_positions
from dash_portable.errors import DashError
from tests.scene import (
    BLOCKS,
    CALLS,
    CONFIG,
    HEADS,
    KV_HEADS,
    MODEL,
    PROMPT,
    SIZE,
    WIDTH,
    Scene,
    bits,
    same,
)

pytestmark = pytest.mark.usefixtures("no_variables")
META = torch.device("meta")
Change = Callable[[dict[str, Any]], dict[str, Any]]


class Wrong(NamedTuple):
    """A call, what is changed in its right arguments, and how the error begins."""

    call: str
    change: Change | dict[str, Any]
    name: str
    needed: str = ""


def item(name: str, index: int | tuple[int, int], value: float) -> Change:
    """One number of an argument is another."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        changed = given[name].long().clone()
        changed[index] = value
        return {name: changed}

    return change


def through(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda given: {name: change(given[name])}


def longer(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x[-1:]])


def model(**changes: object) -> dict[str, Any]:
    return {"sp": {key: x for key, x in {**MODEL, **changes}.items() if x is not None}}


# --- one kind of fault for every tensor of every call ----------------------------------------

TENSORS = {
    "store": ("k", "v", "ik", "roles", "slots", "cache", "head_cls"),
    "prefill": ("q", "k", "v", "iq", "ik", "roles", "positions", "cache", "block_table", "slots",
                "head_cls"),
    "decode": ("q", "k", "v", "iq", "ik", "roles", "cache", "block_table", "seq_lens", "slots",
               "head_cls", "prefix_lens", "positions"),
    "step": ("q", "k", "v", "iq", "ik", "roles", "cache", "block_table", "slots", "head_cls",
             "prefix_lens", "positions"),
    "rebuild": ("cache", "block_table", "seq_lens", "head_cls"),
    "segments": ("q", "k", "v", "used", "bias"),
}  # fmt: skip
FAULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda x: None,
    "number": lambda x: 3,
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy(),
    "0-d": lambda x: x.flatten()[0],
    "rank": lambda x: x[None],
    "wider": lambda x: torch.cat([x, x], -1),
    "complex": lambda x: x.to(torch.complex64),
    "bool": lambda x: x.bool(),
    "float64": lambda x: x.double(),
    "meta": lambda x: x.to(META),
    "sparse": lambda x: x.to_sparse(),
}
# What is right after all.
FITS = {
    ("head_cls", "none", "store"),
    ("positions", "none", "decode"),
    ("prefix_lens", "none", "decode"),
    ("prefix_lens", "none", "step"),
    ("block_table", "wider", ""),
    ("seq_lens", "list", "rebuild"),
    ("seq_lens", "array", "rebuild"),
    ("cache", "meta", ""),  # then the others are not where the cache is
}
EVERY = [
    pytest.param(call, name, fault, id=f"{call}-{name}-{fault}")
    for call, names in TENSORS.items()
    for name in names
    for fault in FAULTS
    if not {(name, fault, call), (name, fault, "")} & FITS
]


@pytest.mark.parametrize(("call", "name", "fault"), EVERY)
def test_a_wrong_tensor_is_named(scene: Scene, call: str, name: str, fault: str) -> None:
    given = getattr(scene, call)()
    blamed = BLAMED.get((call, name, fault), name)
    refused(scene, call, {name: FAULTS[fault](given[name])}, rf"{blamed}: ")


# A call reads its number of rows off one tensor: where that is wrong, another does not fit.
BLAMED = {
    ("store", "roles", "wider"): "slots",
    ("rebuild", "seq_lens", "wider"): "block_table",
    ("segments", "q", "wider"): "k",
    ("segments", "q", "meta"): "bias",
    ("segments", "bias", "wider"): "k",
}


# --- single faults ---------------------------------------------------------------------------

WRONG = [
    # the cache
    Wrong("decode", lambda g: {"cache": g["cache"].to(torch.float8_e4m3fn)}, "cache", "byte"),
    Wrong("step", lambda g: {"cache": g["cache"].to(torch.float8_e5m2)}, "cache", "byte values"),
    Wrong("store", lambda g: {"cache": g["cache"].to(torch.uint8)}, "cache", "float16"),
    Wrong("decode", lambda g: {"cache": g["cache"].double()}, "cache", "float16"),
    Wrong("decode", lambda g: {"cache": g["cache"][:, :1]}, "cache", "at least 2"),
    Wrong("decode", lambda g: {"cache": g["cache"][:0]}, "cache", "at least 1"),
    Wrong("decode", lambda g: {"cache": g["cache"][..., ::2]}, "cache", "128"),
    Wrong("decode", lambda g: {"cache": g["cache"].repeat(1, 1, 1, 2)[..., ::2]}, "cache", "1"),
    Wrong("decode", lambda g: {"cache": g["cache"][:1].expand(16, -1, -1, -1)}, "cache", "a place"),
    Wrong("decode", lambda g: {"cache": g["cache"][:, :, :12]}, "block_size", "a multiple"),
    Wrong("decode", lambda g: {"cache": g["cache"][:, :, :0]}, "block_size", "a multiple"),
    Wrong("step", lambda g: {"run_cache": g["cache"][:8]}, "cache", "[16, 3, 16, 128]"),
    Wrong("step", lambda g: {"run_cache": g["cache"].half()}, "cache", "float32"),
    Wrong("step", lambda g: {"run_cache": g["cache"].to(META)}, "cache", "cpu"),
    Wrong("step", lambda g: {"run_cache": None}, "cache", "a tensor"),
    # types that differ
    Wrong("decode", lambda g: {"q": g["q"].half()}, "q", "float32"),
    Wrong("prefill", lambda g: {"v": g["v"].bfloat16()}, "v", "float32"),
    Wrong("store", lambda g: {"ik": g["ik"].half()}, "ik", "float32"),
    Wrong("segments", lambda g: {"k": g["k"].half()}, "k", "float32"),
    # rows that do not agree
    Wrong("store", through("slots", longer), "slots", "T=65"),
    Wrong("store", through("k", longer), "k", "T=65"),
    Wrong("prefill", through("slots", longer), "slots", "n=33"),
    Wrong("prefill", through("slots", lambda x: x[1:]), "slots", "n=33"),
    Wrong("prefill", through("roles", longer), "roles", "N=33"),
    Wrong("prefill", through("positions", lambda x: x[:, 1:]), "positions", "n=33"),
    Wrong("prefill", through("block_table", lambda x: x.repeat(2, 1)), "block_table", "R=1"),
    Wrong("prefill", through("ik", longer), "ik", "N=33"),
    Wrong("prefill", {"prefix_lens": torch.tensor([0, 0])}, "prefix_lens", "R=1"),
    Wrong("decode", through("slots", longer), "slots", "N=3"),
    Wrong("decode", through("seq_lens", lambda x: x[:2]), "seq_lens", "N=3"),
    Wrong("decode", through("block_table", longer), "block_table", "R=3"),
    Wrong("step", {"query_lens": [67, 2]}, "slots", "69, the sum of query_lens"),
    Wrong("step", {"query_lens": [69, -1]}, "query_lens[1]", "at least 0"),
    Wrong("step", {"query_lens": [67]}, "seq_lens", "1, as many as query_lens"),
    Wrong("step", {"query_lens": [67, 1.0]}, "query_lens[1]", "an integer"),
    Wrong("step", {"query_lens": 68}, "query_lens", "a list of integers"),
    Wrong("step", {"query_lens": "68"}, "query_lens", "a list of integers"),
    Wrong("step", {"query_lens": torch.tensor([67.0, 1.0])}, "query_lens", "int32 or int64"),
    Wrong("step", {"query_lens": torch.tensor([67, 1], device=META)}, "query_lens", "cpu"),
    Wrong("step", {"seq_lens": [65, None]}, "seq_lens[1]", "an integer"),
    Wrong("step", {"seq_lens": torch.tensor([65, 66], device=META)}, "seq_lens", "cpu"),
    Wrong("step", {"max_query_len": 1}, "query_lens", "at most max_query_len (1)"),
    Wrong("step", {"max_query_len": -1}, "max_query_len", "at least 0"),
    # heads and widths
    Wrong("step", {"num_heads": 3}, "num_heads", "a multiple of the cache's 2 kv heads, such as 4"),
    Wrong("step", {"num_heads": 0}, "num_heads", "a multiple"),
    Wrong("step", {"num_heads": -2}, "num_heads", "a multiple"),
    Wrong("step", {"num_heads": 4.0}, "num_heads", "an integer"),
    Wrong("step", {"num_heads": 2}, "q", "Hq=2"),
    Wrong("decode", through("q", lambda x: x[:, :3]), "num_heads", "a multiple"),
    Wrong("decode", through("q", lambda x: x[:, :0]), "num_heads", "a multiple"),
    Wrong("decode", through("k", lambda x: x[:, :1]), "k", "H=2"),
    Wrong("decode", through("iq", lambda x: x[:, :32]), "iq", "D=64"),
    Wrong("decode", through("head_cls", lambda x: x[:32]), "head_cls", "D=64"),
    Wrong("segments", through("q", lambda x: x[:, :3]), "q", "a multiple of k's 2"),
    Wrong("segments", through("q", lambda x: x[:, :0]), "q", "a multiple of k's 2"),
    Wrong("segments", through("k", lambda x: x[:, :0]), "v", "0"),
    # lengths
    Wrong("decode", item("seq_lens", 0, 97), "seq_lens[0]", "at most 96"),
    Wrong("decode", {"max_model_len": 65}, "seq_lens[0]", "at most 65"),
    Wrong("decode", {"max_model_len": 0}, "max_model_len", "at least 1"),
    Wrong("decode", {"max_model_len": "96"}, "max_model_len", "an integer"),
    Wrong("decode", item("seq_lens", 0, -1), "seq_lens[0]", "at least its rows"),
    Wrong("decode", item("seq_lens", 2, 0), "seq_lens[2]", "at least its rows"),
    Wrong("decode", item("seq_lens", 0, 2**40), "seq_lens[0]", "at most 96"),
    Wrong("decode", item("seq_lens", 0, 2**32 + 66), "seq_lens[0]", "at most 96"),
    Wrong("decode", item("seq_lens", 0, 65), "slots[0]", "where block_table puts token 64"),
    Wrong("step", {"seq_lens": [64, 66]}, "seq_lens[0]", "at least its rows"),
    Wrong("step", {"seq_lens": [2**70, 66]}, "seq_lens[0]", "at most 96"),
    Wrong("prefill", {"length": 32}, "seq_lens[0]", "at least its rows"),
    Wrong("prefill", {"length": 97}, "seq_lens[0]", "at most 96"),
    Wrong("prefill", {"length": -1}, "length", "at least 0"),
    Wrong("prefill", {"length": 65.0}, "length", "an integer"),
    Wrong("prefill", {"length": True}, "length", "an integer"),
    Wrong("prefill", {"length": torch.tensor(65)}, "length", "an integer"),
    Wrong("prefill", through("block_table", lambda x: x[:, :2]), "seq_lens[0]", "at most 32"),
    Wrong("rebuild", item("seq_lens", 1, -1), "seq_lens[1]", "0 to 96"),
    Wrong("rebuild", item("seq_lens", 1, 97), "seq_lens[1]", "0 to 96"),
    Wrong("rebuild", item("seq_lens", 1, 2**40), "seq_lens[1]", "0 to 96"),
    # ids
    Wrong("decode", item("block_table", (0, 0), BLOCKS), "block_table[0][0]", "0 to 15"),
    Wrong("decode", item("block_table", (2, 4), -1), "block_table[2][4]", "0 to 15"),
    Wrong("decode", item("block_table", (0, 1), 2**32), "block_table[0][1]", "0 to 15"),
    Wrong("decode", item("block_table", (0, 4), 4), "slots[0]", "where block_table puts"),
    Wrong("decode", item("block_table", (0, 1), 3), "block_table[0]", "a block for each place"),
    Wrong("rebuild", item("block_table", (1, 2), 3 * BLOCKS), "block_table[1][2]", "0 to 15"),
    Wrong("rebuild", item("block_table", (0, 2), 3), "block_table[0]", "a block for each place"),
    Wrong("decode", item("slots", 0, BLOCKS * SIZE), "slots[0]", "where block_table puts"),
    Wrong("decode", item("slots", 0, 2**40), "slots[0]", "where block_table puts"),
    Wrong("decode", item("slots", 2, 3), "slots[2]", "where block_table puts"),
    Wrong("step", item("slots", 10, 0), "slots[10]", "where block_table puts token 10"),
    Wrong("store", item("slots", 0, -1), "slots", "0 to 255"),
    Wrong("store", item("slots", 64, BLOCKS * SIZE), "slots", "0 to 255"),
    Wrong("store", item("slots", 1, 3 * SIZE), "slots[1]", "where block_table puts token 1"),
    Wrong("prefill", item("slots", 3, -1), "slots", "at least 0"),
    Wrong("decode", lambda g: {name: g[name][[0, 1, 0]] for name in ("slots", "block_table")},
          "slots[2]", "a place of its own"),
    # roles and positions
    Wrong("decode", item("roles", 0, 3), "roles[0]", "0 (text), 1 (image) or 2 (marker)"),
    Wrong("decode", item("roles", 2, -1), "roles[2]", "0 (text)"),
    Wrong("step", item("roles", 5, 2**32), "roles[5]", "0 (text)"),
    Wrong("store", item("roles", 5, 3), "roles", "0 (text)"),
    Wrong("prefill", item("positions", (0, 4), -1), "positions[0][4]", "0 to"),
    Wrong("prefill", item("positions", (1, 4), -1), "positions[1][4]", "0 to"),
    Wrong("prefill", item("positions", (2, 4), -1), "positions[2][4]", "0 to 65535"),
    Wrong("prefill", item("positions", (2, 4), 65536), "positions[2][4]", "0 to 65535"),
    Wrong("prefill", item("positions", (3, 4), -(2**40)), "positions[3][4]", "32 bits"),
    Wrong("step", {"positions": None}, "positions", "prompt_positions"),
    Wrong("step", item("positions", (3, 0), 0), "positions", "prompt_positions"),
    Wrong("step", {"page_table": torch.zeros(2, 2, 2, dtype=torch.int64)}, "positions[2][0]",
          "below 2, the pages of page_table"),
    Wrong("step", {"page_table": torch.zeros(2, 2, dtype=torch.int64)}, "page_table",
          "[R, any, 2]"),
    Wrong("step", {"page_table": torch.zeros(2, 4, 2)}, "page_table", "int32 or int64"),
    # the layer, the output, the words
    *(Wrong(call, {name: layer}, "layer", "0 to 1")
      for call, name in (("prefill", "layer_idx"), ("decode", "layer_idx"), ("step", "layer"))
      for layer in (2, -1, None, 0.0, True)),
    Wrong("step", {"out": torch.zeros(67, HEADS, WIDTH)}, "out", "N=68"),
    Wrong("step", {"out": torch.zeros(68, HEADS, WIDTH).half()}, "out", "float32"),
    Wrong("step", {"out": torch.zeros(68, HEADS, WIDTH, device=META)}, "out", "cpu"),
    Wrong("step", {"out": torch.zeros(HEADS, 68, WIDTH).transpose(0, 1)}, "out", "contiguous"),
    Wrong("step", {"out": 3}, "out", "a tensor"),
    *(Wrong(call, {"backend": "FLASH_ATTENTION"}, "backend", "nearest: flash_attn")
      for call in ("prefill", "decode", "step", "segments")),
    *(Wrong(call, {"backend": 3}, "backend", "a name") for call in ("prefill", "decode", "step")),
    Wrong("decode", {"backend": "FLASHINFER"}, "backend 'flashinfer'"),
    Wrong("segments", {"backend": "FLASH_ATTN"}, "backend 'flash_attn'"),
    Wrong("decode", {"cached_summaries": 1}, "cached_summaries", "True or False"),
    Wrong("step", {"graph": None}, "graph", "True or False"),
    Wrong("step", {"deterministic": "yes"}, "deterministic", "True or False"),
    Wrong("step", {"config": MODEL}, "config", "a DashConfig"),
    # the model's configuration
    Wrong("decode", {"sp": None}, "sp", "a mapping"),
    Wrong("store", {"sp": [1]}, "sp", "a mapping"),
    Wrong("prefill", model(dash_topk_blocks=None), "sparse_attention_config['dash_topk_blocks']"),
    Wrong("rebuild", model(sparse_index_dim=128), "cache", "256"),
    Wrong("decode", model(sparse_local_block=True),
          "sparse_attention_config['sparse_local_block']"),
    Wrong("decode", model(sparse_block_size=8.0), "sparse_attention_config['sparse_block_size']"),
    # gathered segments
    Wrong("segments", {"bs": 12}, "bs", "a multiple of 8"),
    Wrong("segments", {"bs": 0}, "bs", "a multiple of 8"),
    Wrong("segments", {"local": -8}, "local", "a multiple of 8"),
    Wrong("segments", {"local": 16.0}, "local", "an integer"),
    Wrong("segments", {"local": 24}, "k", "[168, 2, 64]"),
    Wrong("segments", {"used": torch.ones(14, dtype=torch.int64)}, "used", "[15]"),
]  # fmt: skip


def refused(scene: Scene, call: str, changes: dict[str, Any], begin: str, needed: str = "") -> None:
    """One of our errors, in one sentence or the dispatcher's table, and nothing was written."""
    given = {**getattr(scene, call)(), **changes}
    before = bits(scene.cache).clone()
    with pytest.raises(DashError) as caught:
        CALLS[call](**given)
    text = str(caught.value)
    assert isinstance(caught.value, (ValueError, RuntimeError))
    assert re.match(begin, text), text
    if not begin.startswith("backend\\ "):
        assert re.fullmatch(r"[^\n]+: found [^\n]+, needed [^\n]+|[^\n]+: found \[[^\n]*", text), (
            text
        )
    assert needed in text
    assert torch.equal(bits(scene.cache), before)


def wrong_id(row: Wrong) -> str:
    return f"{row.call}-{row.name}"


@pytest.mark.parametrize("row", WRONG, ids=wrong_id)
def test_a_wrong_value_is_named(scene: Scene, row: Wrong) -> None:
    given = getattr(scene, row.call)()
    changes = row.change(given) if callable(row.change) else row.change
    refused(scene, row.call, changes, re.escape(row.name), row.needed)


@pytest.fixture(scope="module")
def stored() -> Scene:
    return Scene()


@pytest.fixture
def scene(stored: Scene) -> Scene:
    """A scene of its own for each test; the prompts are stored once."""
    made = copy.copy(stored)
    made.cache = stored.cache.clone()
    return made


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in dash_portable.env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.parametrize(
    ("name", "value", "begin"),
    [
        ("DASH_PORTABLE_BACKEN", "eager", "environment variable: found 'DASH_PORTABLE_BACKEN'"),
        ("DASH_PORTABLE_BACKEND", "egaer", "DASH_PORTABLE_BACKEND: found 'egaer'"),
        ("DASH_PORTABLE_BACKEND", "train=eager", "DASH_PORTABLE_BACKEND: found 'train=eager'"),
        ("DASH_PORTABLE_DISABLE", "eager,x", "DASH_PORTABLE_DISABLE: found 'x'"),
        ("DASH_PORTABLE_FA_VERSION", "9", "DASH_PORTABLE_FA_VERSION: found '9'"),
        ("DASH_PORTABLE_DETERMINISTIC", "maybe", "DASH_PORTABLE_DETERMINISTIC: found 'maybe'"),
    ],
)
@pytest.mark.parametrize("call", ["store", "prefill", "decode", "step", "rebuild", "segments"])
def test_a_wrong_variable_is_named(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str, name: str, value: str, begin: str
) -> None:
    monkeypatch.setenv(name, value)
    refused(scene, call, {}, re.escape(begin))


def test_more_pages_than_16_bits_hold(scene: Scene) -> None:
    roles = torch.full((65537,), 2)
    roles[-1] = 1
    with pytest.raises(
        dash_portable.ArgumentError, match="found 65536 pages, needed at most 65535"
    ):
        prompt_positions(roles)
    refused(scene, "store", {"roles": roles}, "roles", "at most 65535")
    assert prompt_positions(roles[1:])[2, 0] == 65535


@pytest.mark.parametrize(
    ("roles", "begin"),
    [
        (torch.zeros(0, dtype=torch.int64), "roles: found no token, needed at least 1"),
        (torch.tensor([0, 3]), "roles: found 3, needed 0 (text)"),
        (torch.tensor([[0]]), "roles: found [1, 1], needed [T]"),
        (torch.tensor([0.0]), "roles: found torch.float32"),
        (torch.tensor([True]), "roles: found torch.bool"),
        (torch.zeros(2, dtype=torch.int64, device=META), "roles: found"),
        ([0, 1], "roles: found list"),
    ],
)
def test_wrong_roles(roles: torch.Tensor, begin: str) -> None:
    with pytest.raises(dash_portable.ArgumentError, match=re.escape(begin)):
        prompt_positions(roles)


@pytest.mark.parametrize(
    ("changes", "begin"),
    [
        ({"config": MODEL}, "config: found dict"),
        ({"num_blocks": 0}, "num_blocks: found 0"),
        ({"num_blocks": 2.5}, "num_blocks: found 2.5"),
        ({"num_kv_heads": -1}, "num_kv_heads: found -1"),
        ({"num_kv_heads": "2"}, "num_kv_heads: found '2'"),
        ({"block_size": 12}, "block_size: found 12, needed a multiple"),
        ({"block_size": 0}, "block_size: found 0"),
        ({"block_size": 16.0}, "block_size: found 16.0"),
        ({"dtype": torch.float64}, "dtype: found torch.float64"),
        ({"dtype": torch.float8_e4m3fn}, "dtype: found torch.float8"),
        ({"dtype": "half"}, "dtype: found 'half', needed torch.float16"),
        ({"device": "gpu"}, "device: found gpu:0, needed one that torch has: cpu"),
        ({"device": 3}, "device: found 3, needed a torch device, such as 'cpu'"),
    ],
)
def test_wrong_sizes_of_a_new_cache(changes: dict[str, Any], begin: str) -> None:
    given = {"config": CONFIG, "num_blocks": 2, "num_kv_heads": 2, "block_size": 16, **changes}
    with pytest.raises(dash_portable.ArgumentError, match=re.escape(begin)):
        empty_cache(**given)


def test_a_cache_without_memory() -> None:
    cache = empty_cache(CONFIG, 2, 2, 16).to("meta")
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(dash_portable.ArgumentError, match="cache: found device meta, needed"):
        DashStep.plan([0], [0], torch.zeros(1, 2).long(), none, none, config=CONFIG, cache=cache)


def test_a_module_without_a_step() -> None:
    module, cache = DashAttention(CONFIG, 0, 32, 2), empty_cache(CONFIG, 2, 2, 16)
    with pytest.raises(dash_portable.ArgumentError, match="step: found NoneType, needed a DashSt"):
        module(torch.zeros(1, 32), None, cache)


@pytest.mark.parametrize(
    ("changes", "begin"),
    [
        ({"config": MODEL}, "config: found dict"),
        ({"layer": 2}, "layer: found 2, needed 0 to 1"),
        ({"hidden_size": 0}, "hidden_size: found 0"),
        ({"num_heads": 4.0}, "num_heads: found 4.0"),
        ({"num_kv_heads": 3}, "num_heads: found 4, needed a multiple of num_kv_heads (3)"),
        ({"num_kv_heads": 0}, "num_kv_heads: found 0"),
        ({"head_dim": 128}, "head_dim: found 128, needed 64"),
    ],
)
def test_wrong_sizes_of_a_module(changes: dict[str, Any], begin: str) -> None:
    given = {"config": CONFIG, "layer": 0, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    with pytest.raises(dash_portable.ArgumentError, match=re.escape(begin)):
        DashAttention(**{**given, **changes})


@pytest.mark.parametrize(
    ("hidden", "needed"),
    [
        (torch.zeros(68, 31), "[any, 32]"),
        (torch.zeros(68, 32).half(), "float32"),
        (torch.zeros(68, 32, device=META), "cpu"),
        (torch.zeros(67, 32), "N=68"),
        (None, "a tensor"),
    ],
)
def test_wrong_rows_of_a_module(scene: Scene, hidden: torch.Tensor, needed: str) -> None:
    step, before = planned(scene), bits(scene.cache).clone()
    module = DashAttention(CONFIG, 0, 32, HEADS, KV_HEADS)
    with pytest.raises(dash_portable.ArgumentError, match=re.escape(needed)):
        module(hidden, step, scene.cache)
    assert torch.equal(bits(scene.cache), before)


def planned(scene: Scene, **changes: Any) -> DashStep:
    run_only = ("q", "k", "v", "iq", "ik", "head_cls", "layer", "out")
    given = {name: x for name, x in scene.step().items() if name not in run_only}
    return DashStep.plan(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "begin"),
    [
        ({"seq_lens": torch.tensor([65, 97])}, "seq_lens[1]: found 97"),
        ({"seq_lens": [65, 66]}, "seq_lens: found list"),
        ({"seq_lens": torch.tensor([65.0, 66.0])}, "seq_lens: found float32"),
        ({"block_table": torch.full((2, 6), 16)}, "block_table[0][0]: found 16"),
        ({"block_table": torch.zeros(2, 5, dtype=torch.int64)}, "block_table: found [2, 5]"),
        ({"slots": torch.zeros(68, dtype=torch.int64)}, "seq_lens[0]: found 65"),
        ({"slots": torch.zeros(68, dtype=torch.int64, device=META)}, "slots: found device meta"),
        ({"roles": torch.full((68,), 3)}, "roles[0]: found 3"),
        ({"positions": None}, "positions: found None, needed as planned, with it"),
        ({"positions": torch.full((4, 68), -1)}, "positions[0][0]: found -1"),
        ({"prefix_lens": None}, "prefix_lens: found None, needed as planned, with it"),
        ({"page_table": torch.zeros(2, 4, 2)}, "page_table: found a tensor, needed as planned"),
    ],
)  # fmt: skip
def test_a_wrong_update_leaves_the_step_as_it_was(
    scene: Scene, changes: dict[str, Any], begin: str
) -> None:
    step, given = planned(scene, graph=True), scene.step()
    names = ("seq_lens", "block_table", "slots", "roles", "positions", "page_table", "prefix_lens")
    right = {name: given[name] for name in names} | {"seq_lens": torch.tensor([65, 66])}
    own = {name: x.clone() for name in names if (x := getattr(step.step, name)) is not None}
    with pytest.raises(dash_portable.ArgumentError, match=re.escape(begin)):
        step.update(**{**right, **changes})
    assert all(same(x, getattr(step.step, name)) for name, x in own.items())
    step.update(**right)


def test_an_update_keeps_to_the_longest_that_was_planned(scene: Scene) -> None:
    """Also where scratch is made for a little more."""
    given = scene.step()
    names = ("block_table", "slots", "roles", "positions", "prefix_lens")
    step = planned(scene, graph=True, max_model_len=80)
    refused_at = "seq_lens[1]: found 81, needed at most 80"
    with pytest.raises(dash_portable.ArgumentError, match=re.escape(refused_at)):
        step.update(torch.tensor([65, 81]), **{name: given[name] for name in names})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("graph", [False, True])
def test_index_tensors_may_be_views(scene: Scene, graph: bool, dtype: torch.dtype) -> None:
    """Kernels read them in one piece from a multiple of 16 bytes on, whatever was handed over."""
    names = ("seq_lens", "block_table", "slots", "roles", "positions", "prefix_lens", "page_table")
    given = scene.step() | {"page_table": torch.zeros(2, 4, 2, dtype=torch.int64)}
    given["page_table"][:, 1:, 1] = len(PROMPT)
    given["seq_lens"] = torch.tensor(given["seq_lens"])
    plain = {name: given[name].to(dtype) for name in names}
    spread = {name: torch.stack([x, x + 99], -1)[..., 0] for name, x in plain.items()}
    turned = {name: x.T.contiguous().T if x.dim() == 2 else x for name, x in plain.items()}
    shifted = {name: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
               for name, x in plain.items()}  # fmt: skip
    wanted = planned(scene, graph=graph, **plain).step
    for views in (spread, turned, shifted):
        found = planned(scene, graph=graph, **views).step
        for name in (*names, "row_pos", "row_seq", "query_start"):
            x = getattr(found, name)
            assert torch.equal(x, getattr(wanted, name)), name
            assert x.is_contiguous(), name
            assert x.data_ptr() % 16 == 0, name


def test_only_a_graphs_step_is_updated(scene: Scene) -> None:
    given = scene.step()
    names = ("seq_lens", "block_table", "slots", "roles", "positions")
    with pytest.raises(dash_portable.ArgumentError, match="planned with graph=False"):
        planned(scene).update(**{name: given[name] for name in names})


def test_a_cache_of_inference_mode_is_not_written_outside() -> None:
    with torch.inference_mode():
        scene = Scene()
    refused(scene, "decode", {}, "cache", "in that mode")
