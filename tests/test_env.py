"""The environment: strict, read at the moment of choosing, and never changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dash_portable import env
from dash_portable.errors import ArgumentError


def test_nothing_set_asks_for_nothing() -> None:
    assert env.read({"PATH": "/bin", "VLLM_ATTENTION_BACKEND": "TRITON"}) == env.Settings()
    assert env.read({variable.name: "" for variable in env.VARIABLES}) == env.Settings()


@pytest.mark.parametrize(
    ("value", "prefill", "decode"),
    [
        ("triton", "triton", "triton"),
        ("FLASH_ATTN", "FLASH_ATTN", "FLASH_ATTN"),
        ("auto", None, None),
        ("prefill=sdpa,decode=triton", "sdpa", "triton"),
        (" Decode = eager ", None, "eager"),
        ("prefill=AUTO,decode=eager", None, "eager"),
    ],
)
def test_backend(value: str, prefill: str | None, decode: str | None) -> None:
    settings = env.read({"DASH_PORTABLE_BACKEND": value})
    assert (settings.forced("prefill"), settings.forced("decode")) == (prefill, decode)


def test_the_other_variables() -> None:
    settings = env.read(
        {
            "DASH_PORTABLE_DISABLE": "aiter, flash_attn,",
            "DASH_PORTABLE_FA_VERSION": "3",
            "DASH_PORTABLE_DETERMINISTIC": "1",
            "DASH_PORTABLE_PLATFORM": "gfx942",
            "DASH_PORTABLE_SELF_TEST": "0",
            "DASH_PORTABLE_LOG": "Table",
        }
    )
    assert settings.disable == ("aiter", "flash_attn")
    assert settings.fa_version == 3
    assert settings.deterministic
    assert settings.platform == "gfx942"
    assert not settings.self_test
    assert settings.log == "table"
    assert settings.source("DASH_PORTABLE_FA_VERSION") == "DASH_PORTABLE_FA_VERSION=3"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DASH_PORTABLE_BACKEND", "training=triton"),
        ("DASH_PORTABLE_BACKEND", "prefill="),
        ("DASH_PORTABLE_BACKEND", "prefill=triton,prefill=eager"),
        ("DASH_PORTABLE_FA_VERSION", "5"),
        ("DASH_PORTABLE_DETERMINISTIC", "yes"),
        ("DASH_PORTABLE_SELF_TEST", "off"),
        ("DASH_PORTABLE_LOG", "loud"),
    ],
)
def test_a_wrong_value_names_variable_value_and_need(name: str, value: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: found '{value}', needed "):
        env.read({name: value})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("DASH_PORTABLE_ATTN_BACKEND", "DASH_PORTABLE_BACKEND"),
        ("DASH_PORTABLE_DISABLED", "DASH_PORTABLE_DISABLE"),
        ("dash_portable_backend", "DASH_PORTABLE_BACKEND"),
    ],
)
def test_an_unknown_variable_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ArgumentError, match=rf"found '{name}'.*\(nearest: {nearest}\)"):
        env.read({name: "1"})


def test_the_process_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_PORTABLE_BACKEND", "eager")
    assert env.read().forced("decode") == "eager"
    monkeypatch.setenv("DASH_PORTABLE_BACKEND", "sdpa")
    assert env.read().forced("decode") == "sdpa"


def test_other_projects_variables_are_told_not_obeyed() -> None:
    environ = {"VLLM_ATTENTION_BACKEND": "FLASHINFER", "HIP_VISIBLE_DEVICES": "0,1"}
    assert env.foreign(environ) == {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}
    assert env.visible_devices(environ) == {"HIP_VISIBLE_DEVICES": "0,1"}


def test_the_cache_folder_follows_the_users() -> None:
    name = "LOCALAPPDATA" if env.sys.platform == "win32" else "XDG_CACHE_HOME"
    assert env.cache_folder({name: "/somewhere"}) == Path("/somewhere/dash_portable")
    assert env.cache_folder({}).name == "dash_portable"


def test_a_user_without_a_home_has_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(env.Path, "home", nobody)
    assert env.cache_folder({}).parent == Path(env.tempfile.gettempdir())
