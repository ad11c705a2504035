"""What the text of a kernel may not hold: a vendor is a row of a table or a constexpr, never a
branch.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent / "dash_portable" / "kernels"
FILES = sorted(KERNELS.glob("*.py"))
ARCH = re.compile(r"(?i)^(sm_?\d{2,3}|gfx\d\w+|pvc|dg2|bmg|lnl|ptl)$")
# A list of words: whoever hides a branch under another has to mean it.
WORDS = re.compile(
    r"(?i)(nvidia|cuda|amd|rocm|hip|intel|xpu|vendor|arch|target|gfx\d*|cdna\d*|rdna\d*|wave\d*|"
    r"wavefront|warpsize)"
)
# Gone in Triton 3.9, one vendor's own, or missing in Intel's 3.3.
CALLS = {
    "advance",
    "inline_asm_elementwise",
    "libdevice",
    "make_block_ptr",
    "make_tensor_descriptor",
    "topk",
}
# The one exception: programmatic dependent launch, behind a constexpr of primitives.py.
EXEMPT = {"gdc_wait", "gdc_launch_dependents"}


def is_kernel(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def kernels(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if is_kernel(node)]


def forbidden(node: ast.FunctionDef) -> list[str]:
    """Names, attributes and texts of the function that a kernel may not have; docstrings are
    free.
    """
    found = []
    docstring = ast.get_docstring(node, clean=False)
    for part in ast.walk(node):
        text = ""
        if isinstance(part, ast.Name):
            text = part.id
        elif isinstance(part, ast.Attribute):
            text = part.attr
        elif isinstance(part, ast.arg):
            text = part.arg
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            text = part.value if part.value != docstring else ""
        words = [word for word in re.split(r"[^A-Za-z0-9]+", text) if word]
        vendor = any(WORDS.fullmatch(word) or ARCH.match(word) for word in words)
        if (vendor or text in CALLS) and text not in EXEMPT:
            found.append(f"line {part.lineno}: {text}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_know_no_vendor(path: Path):
    found = {node.name: forbidden(node) for node in kernels(path)}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_code_asks_for_an_arch(path: Path):
    """Also outside of kernels an arch is a key of a table; a comparison with one is a hidden
    branch.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Compare):
            continue
        for part in (node.left, *node.comparators):
            constants = [c.value for c in ast.walk(part) if isinstance(c, ast.Constant)]
            words = [c for c in constants if isinstance(c, str)]
            found += [
                f"line {node.lineno}: {word}"
                for word in words
                if ARCH.match(word) or WORDS.search(word)
            ]
    assert found == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernel_modules_import_triton_alone(path: Path):
    """At their top: they compile where there is no torch. A launcher may import inside a
    function.
    """
    free = {
        "triton",
        "dash_portable",
        "__future__",
        "collections",
        "inspect",
        "dataclasses",
        "typing",
        "types",
    }
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
    assert [name for name in names if name.partition(".")[0] not in free] == []


def planted(body: str) -> list[str]:
    (node,) = ast.parse(f"@triton.jit\ndef kernel(x_ptr, y_ptr):\n    {body}\n").body
    assert isinstance(node, ast.FunctionDef)
    return forbidden(node)


@pytest.mark.parametrize(
    "body",
    [
        "x = 1 if IS_HIP else 2",
        "x = tl.extra.cuda.libdevice.tanh(1)",
        "x = tl.inline_asm_elementwise('mov.b32', '=r', [], tl.int32, True, 1)",
        "x = tl.make_block_ptr(x_ptr)",
        "x = ARCH == 'gfx942'",
        "x = tl.topk(x_ptr, 16)",
    ],
)
def test_a_planted_branch_is_found(body: str):
    assert planted(body)


def test_clean_text_is_not_found():
    assert planted("x = tl.load(x_ptr).to(tl.float32)") == []
