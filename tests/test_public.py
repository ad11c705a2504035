"""The public names, and what importing the package does: nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dash_portable

ROOT = Path(__file__).resolve().parents[1]
HEAVY = (
    "torch", "triton", "numpy", "flash_attn", "flashinfer", "aiter", "vllm_xpu_kernels", "vllm",
    "flash_attn_interface", "intel_extension_for_pytorch", "rich", "typer", "matplotlib",
)  # fmt: skip


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_is_sorted_and_every_name_has_a_home() -> None:
    assert dash_portable.__all__ == sorted(dash_portable._HOMES)
    for name in dash_portable.__all__:
        module = importlib.import_module(f"dash_portable.{dash_portable._HOMES[name]}")
        assert getattr(dash_portable, name) is getattr(module, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'paged_dash_decod' \(nearest"):
        _ = dash_portable.paged_dash_decod


def test_the_version_is_the_changelogs() -> None:
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading
    assert heading[1] == dash_portable.__version__ == importlib.metadata.version("dash-portable")


def test_importing_loads_and_changes_nothing() -> None:
    code = f"""
import logging, os, sys
environment, handlers, path = dict(os.environ), list(logging.root.handlers), list(sys.path)
import dash_portable
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
assert dict(os.environ) == environment and sys.path == path
assert logging.root.handlers == handlers
assert not logging.getLogger("dash_portable").handlers
"""
    run(code)


def test_importing_takes_less_than_50_ms() -> None:
    code = """
import importlib.metadata, time  # the standard library's share is not ours
begin = time.process_time()
import dash_portable
print(time.process_time() - begin)
"""
    assert min(float(run(code)) for _ in range(3)) < 0.05


def test_torchs_settings_stay_as_they_are() -> None:
    code = """
import torch
def settings():
    return (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
            torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.initial_seed())
before = settings()
import dash_portable
for name in dash_portable.__all__:
    getattr(dash_portable, name)
assert settings() == before
assert not torch.cuda.is_initialized()
"""
    run(code)


def test_the_cpu_path_runs_without_any_vendor_library() -> None:
    code = f"""
import sys
import torch  # first: on some Pythons it asks itself whether there is a Triton
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY[1:2] + HEAVY[3:]!r}:
            raise ImportError(f"{{name}} may not be imported here")
sys.meta_path.insert(0, Refuse())
from dash_portable import DashConfig, DashStep, empty_cache, prompt_positions
config = DashConfig(index_dim=64, scale=(20.0,), floor=(1e-4,))
cache = empty_cache(config, 4, 1, 64, dtype=torch.float32)
roles = torch.tensor([2] + [1] * 199)
step = DashStep.plan([200], [200], torch.arange(4)[None], torch.arange(200), roles,
                     prompt_positions(roles), config=config, cache=cache)
x, y = torch.randn(200, 1, 64), torch.randn(200, 64)
out = step.run(x, x, x, y, y, cache, torch.randn(64), 0)
assert out.isfinite().all() and step.backend == "sdpa"
"""
    run(code)
