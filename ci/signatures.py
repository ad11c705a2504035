"""The signatures of the real libraries, read out of their wheels without importing them.

    python ci/signatures.py            fetch what is missing (1.2 GB, once), rewrite the record
    python ci/signatures.py --check    only say whether the record is what the wheels hold

Wheels are kept in $WHEELS_FOR_SIGNATURES, by default `dash_portable/wheels` in the user's cache
folder, and fetched with pip. The record is ci/signatures.json, to which a test holds the fakes,
offline.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORD = HERE / "signatures.json"
# A variable of this script alone; the package itself would refuse a name that it does not know.
FOLDER = "WHEELS_FOR_SIGNATURES"
TARGETS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")
# torch's Python files are the same for every system, and its wheels for this one are the smallest.
SMALLEST = ("macosx_11_0_arm64", "macosx_14_0_arm64")


@dataclass(frozen=True)
class Source:
    """One distribution, and in which files which functions stand (`Class.method` for methods)."""

    distribution: str
    version: str
    files: tuple[tuple[str, tuple[str, ...]], ...]
    sdist: bool = False
    targets: tuple[str, ...] = TARGETS


_WRAPPERS = tuple(
    f"BatchPrefillWith{kind}KVCacheWrapper.{method}"
    for kind in ("Ragged", "Paged")
    for method in ("__init__", "plan", "run")
)
_VARLEN = ("flash_attn_varlen_func",)
SOURCES = (
    Source(
        "flash-attn",
        "2.8.3.post2",
        (
            ("flash_attn/flash_attn_interface.py", (*_VARLEN, "flash_attn_with_kvcache")),
            ("hopper/flash_attn_interface.py", (*_VARLEN, "flash_attn_with_kvcache")),
        ),
        sdist=True,
    ),
    # Generation 3 as of its first release candidates; of generation 2 the newer one stands above.
    Source(
        "flash-attn",
        "2.7.4.post1",
        (("hopper/flash_attn_interface.py", (*_VARLEN, "flash_attn_with_kvcache")),),
        sdist=True,
    ),
    Source("flash-attn-4", "4.0.0b36", (("flash_attn/cute/interface.py", _VARLEN),)),
    Source("flashinfer-python", "0.6.4", (("flashinfer/prefill.py", _WRAPPERS),)),
    Source("flashinfer-python", "0.7.4", (("flashinfer/prefill.py", _WRAPPERS),)),
    *(
        Source(
            "vllm-xpu-kernels", version, (("vllm_xpu_kernels/flash_attn_interface.py", _VARLEN),)
        )
        for version in ("0.1.3.1", "0.1.16.2")
    ),
    Source(
        "intel-extension-for-pytorch",
        "2.8.0",
        (
            (
                "intel_extension_for_pytorch/llm/modules/mha_fusion.py",
                ("PagedAttention.flash_attn_varlen_func",),
            ),
        ),
    ),
    *(
        Source(
            "torch", version, (("torch/nn/attention/varlen.py", ("varlen_attn",)),), False, SMALLEST
        )
        for version in ("2.10.0", "2.11.0", "2.12.0", "2.14.1")
    ),
    Source(
        "vllm",
        "0.33.0",
        (
            (
                "vllm/vllm_flash_attn/flash_attn_interface.py",
                (
                    *_VARLEN,
                    "is_fa_version_supported",
                    "fa_version_unsupported_reason",
                    "compile_flash_attn_varlen_func_from_specs",
                ),
            ),
        ),
    ),
    Source(
        "amd-aiter",
        "0.1.7.post2.dev18",
        (
            ("aiter/ops/mha.py", (*_VARLEN, "mha_batch_prefill_func")),
            ("aiter/ops/triton/mha.py", _VARLEN),
        ),
    ),
)


def folder() -> Path:
    """Where wheels are kept."""
    given = os.environ.get(FOLDER)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "dash_portable" / "wheels"


def fetched(source: Source) -> Path:
    """The wheel or source archive of a distribution, downloaded when it is not there yet."""
    place = folder()
    name = source.distribution.replace("-", "_")
    found = sorted(place.glob(f"{name}-{source.version}[-.]*"))
    if not found:
        place.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        if source.sdist:
            # pip asks a source archive for its metadata: without this it would want nvcc.
            command += ["--no-binary", ":all:", "--no-build-isolation"]
        else:
            command += ["--only-binary", ":all:", "--python-version", "3.12", "--abi", "cp312"]
            command += ["--abi", "abi3", "--abi", "none", "--implementation", "cp"]
            command += [text for tag in (*source.targets, "any") for text in ("--platform", tag)]
        command += ["--dest", str(place), f"{source.distribution}=={source.version}"]
        skip = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
        subprocess.run(command, check=True, env=skip)
        found = sorted(place.glob(f"{name}-{source.version}[-.]*"))
    return found[0]


def text_of(archive: Path, member: str) -> str:
    """One file of a wheel or of a source archive, whose members lie below a top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(member).decode("utf-8")
    with tarfile.open(archive) as sources:
        name = next(name for name in sources.getnames() if name.partition("/")[2] == member)
        opened = sources.extractfile(name)
        assert opened is not None
        return opened.read().decode("utf-8")


def parameters(arguments: ast.arguments) -> Iterator[str]:
    """`name` or `name=default` of each parameter, in order; `*` before keyword-only ones."""
    positional = [*arguments.posonlyargs, *arguments.args]
    gap = len(positional) - len(arguments.defaults)
    for number, argument in enumerate(positional):
        default = arguments.defaults[number - gap] if number >= gap else None
        yield argument.arg + (f"={ast.unparse(default)}" if default is not None else "")
    if arguments.vararg or arguments.kwonlyargs:
        yield f"*{arguments.vararg.arg if arguments.vararg else ''}"
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg + (f"={ast.unparse(value)}" if value is not None else "")


def constants(tree: ast.Module) -> dict[str, str]:
    """Plain values that defaults refer to by name."""
    return {
        node.targets[0].id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }


def signatures(text: str, wanted: tuple[str, ...]) -> dict[str, list[str]]:
    """Parameters of the wanted functions; of overloads the last one, which is the real one."""
    tree, found = ast.parse(text), dict[str, list[str]]()
    known = constants(tree)
    scopes = [("", tree.body)]
    scopes += [(f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, body in scopes:
        for node in body:
            if isinstance(node, ast.FunctionDef) and prefix + node.name in wanted:
                texts = list(parameters(node.args))
                found[prefix + node.name] = [
                    name + (f"={known.get(value, value)}" if equals else "")
                    for name, equals, value in (text.partition("=") for text in texts)
                ]
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise LookupError(f"not found: {' '.join(missing)}")
    return found


def extract() -> dict[str, dict[str, dict[str, list[str]]]]:
    """`distribution version` -> file -> function -> parameters."""
    return {
        f"{source.distribution} {source.version}": {
            file: signatures(text_of(fetched(source), file), wanted)
            for file, wanted in source.files
        }
        for source in SOURCES
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    text = json.dumps(extract(), indent=1) + "\n"
    if check:
        same = RECORD.read_text(encoding="utf-8") == text
        print("as recorded" if same else "the wheels differ from ci/signatures.json")
        return 0 if same else 1
    RECORD.write_text(text, encoding="utf-8")
    print(f"wrote {RECORD.name}: {len(SOURCES)} distributions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
