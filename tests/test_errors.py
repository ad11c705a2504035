"""The exception tree and the form of its messages."""

from __future__ import annotations

import pickle

import pytest

from dash_portable import errors
from dash_portable.request import Request
from tests.machines import asked


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        ("ConfigError", ValueError),
        ("ArgumentError", ValueError),
        ("UnsupportedError", RuntimeError),
        ("BackendError", RuntimeError),
    ],
)
def test_every_error_is_ours_and_what_callers_catch_already(kind: str, also: type) -> None:
    error = getattr(errors, kind)
    assert issubclass(error, errors.DashError)
    assert issubclass(error, also)


def test_a_wrong_value_is_one_sentence() -> None:
    error = errors.found_needed("slots", "int32 [7]", "int64 [8]")
    assert isinstance(error, errors.ArgumentError)
    assert str(error) == "slots: found int32 [7], needed int64 [8]"


@pytest.mark.parametrize(
    ("found", "nearest"), [("flashinfr", "flashinfer"), ("TRITN", "triton"), ("zzzz", None)]
)
def test_an_unknown_word_names_the_nearest(found: str, nearest: str | None) -> None:
    text = str(errors.unknown_word("backend", found, ["flashinfer", "triton", "eager"]))
    assert f"backend: found {found!r}, needed one of eager flashinfer triton" in text
    assert (f"(nearest: {nearest})" in text) if nearest else ("nearest" not in text)


def test_of_a_long_list_the_nearest_comes_first() -> None:
    text = str(errors.unknown_word("backend", "row077", [f"row{i:02}" for i in range(40)]))
    assert text.startswith(
        "backend: found 'row077', needed one of these (nearest: row07): row00 row01"
    )
    assert text.endswith("row39")


def test_an_unsupported_error_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(errors.UnsupportedError("nobody")))
    assert str(copy) == "nobody"
    assert copy.choice is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("phase", "train"), ("dtype", "fp8"), ("cache_dtype", "uint8"), ("head_dim", 0)],
)
def test_a_request_refuses_what_nobody_could_ask(name: str, value: object) -> None:
    values = {**asked().to_dict(), name: value}
    with pytest.raises(errors.ArgumentError, match=f"^{name}: found .*{value}.*, needed "):
        Request(**values)  # type: ignore[arg-type]


def test_a_request_is_a_key_and_prints_all_it_asks() -> None:
    assert len({asked(), asked(), asked(graph=True)}) == 2
    assert str(asked(lse=True, in_place=True)) == (
        "decode bfloat16 cache=bfloat16 head_dim=128 group_size=1 block=32 block_size=32"
        " needs in_place lse"
    )
