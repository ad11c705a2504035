"""The audit: compiles in processes of its own, on sample kernels of which some are wrong on
purpose.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ci import docs
from dash_portable import audit
from dash_portable.audit import worker
from dash_portable.audit.case import EVERYWHERE, Case, Launch
from dash_portable.audit.ir import narrow_arithmetic
from dash_portable.audit.targets import ALL_TARGETS, QUICK, TARGETS
from dash_portable.audit.usage import (
    CLAIMED_TRITON,
    Usage,
    excess,
    not_claimed,
    too_many_threads,
)
from dash_portable.backends import BACKENDS
from dash_portable.errors import ArgumentError, BackendError
from dash_portable.platform.facts import ARCHS, Vendor, tokens

pytest.importorskip("triton", reason="compiling needs Triton, which is built for Linux only")

from dash_portable.kernels import launch, launch_prefill
from dash_portable.kernels.cases import CASES

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = "tests.audit_samples.kernels:CASES"
NO_LINKER = "Triton 3.4 brings no linker for AMD: it compiles for NVIDIA alone"
LINKS_AMD = not version("triton").startswith("3.4.")
for_amd = pytest.mark.skipif(not LINKS_AMD, reason=NO_LINKER)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


def rows_of(cache: Path, targets: str, only: str, **more: object) -> list[audit.Row]:
    return audit.run_audit(
        targets.split(), only.split(), jobs=2, limit=60, cache=cache, cases=SAMPLES, **more
    )


def test_right_kernels_pass_on_every_kind_of_card(cache: Path):
    targets = "sm80 sm90 sm120" + (" gfx942 gfx1201" if LINKS_AMD else "")
    rows = rows_of(cache, targets, "scale product")
    assert [row.problems for row in rows] == [()] * len(targets.split()) * 2
    for row in rows:
        assert row.usage is not None
        assert 0 < row.usage.regs <= ALL_TARGETS[row.target].regs
        assert row.usage.binary > 0
        assert row.triton
        assert (row.usage.shared > 0) == (row.case == "product")
        assert (row.matrix > 0) == (row.case == "product")


@pytest.mark.parametrize(
    ("case", "target", "said"),
    [
        ("narrow_add", "sm90", "arithmetic: arith.addf on bf16 values"),
        pytest.param(
            "narrow_add", "gfx942", "arithmetic: arith.addf on bf16 values", marks=for_amd
        ),
        ("narrow_offset", "sm90", "address: stride_x is multiplied in 32 bits"),
        pytest.param(
            "narrow_offset",
            "gfx942",
            "address: stride_x is multiplied in 32 bits",
            marks=for_amd,
        ),
        pytest.param("big_tile", "gfx942", "shared memory: needs", marks=for_amd),
        ("big_tile", "sm90", "shared memory: needs"),
        ("many_warps", "sm90", "threads: 64 warps of 32 are 2048"),
        ("many_warps", "gfx942", "threads: 64 warps of 64 are 4096"),
        ("not_matrix", "sm80", "matrix: the case claims"),
        pytest.param("not_matrix", "gfx942", "matrix: the case claims", marks=for_amd),
        ("not_wide", "sm90", "matrix: the case claims GMMA, the binary has HMMA"),
        ("refused", "sm90", "compile: UnsupportedLanguageConstruct"),
        ("top", "pvc", "compile:"),  # this Triton has no Intel backend
    ],
)
def test_wrong_kernel_is_noticed(cache: Path, case: str, target: str, said: str):
    (row,) = rows_of(cache, target, case)
    assert not row.ok
    assert any(text.startswith(said) for text in row.problems), row.problems


def test_slow_compile_is_ended(cache: Path):
    (row,) = audit.run_audit(["sm90"], ["slow"], limit=1, cache=cache, cases=SAMPLES)
    (text,) = row.problems
    assert text.startswith("time: not compiled within 1")  # 10 s where other work takes the cores
    assert row.seconds < 60


def test_waiting_longer_than_the_limit_is_no_slow_compile(cache: Path):
    """It waits for three seconds and then fails for its own reason."""
    (row,) = audit.run_audit(["sm90"], ["waiting"], limit=1, cache=cache, cases=SAMPLES)
    assert row.problems[0].startswith("compile: AttributeError: 'WaitingKernel'")
    (row,) = audit.run_audit(["sm90"], ["waiting"], limit=0.1, cache=cache, cases=SAMPLES)
    assert row.problems == ("time: not compiled within 1 s",)


@pytest.mark.parametrize(
    ("seconds", "worked", "said"),
    [
        (119, 119, ""),
        (130, 100, ""),
        (130, 121, "time: not compiled within 120 s of processor time"),
        (1199, 3, ""),
        (1201, 3, "time: not compiled within 1200 s"),
    ],
)
def test_limit_is_of_processor_time(
    seconds: float, worked: float, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker, "processor_seconds", lambda session: worked)
    assert worker._overdue(1, seconds, 120) == said


def test_processor_time_is_of_the_whole_session():
    """A compiler that the compile started counts as the compile itself; waiting does not."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\n"
    script = f"{sys.executable} -c '{burn}time.sleep(60)' & sleep 60"
    with subprocess.Popen(
        ["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert 0.28 <= worker.processor_seconds(process.pid) < 1
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_launch_rows_are_per_target(cache: Path):
    rows = rows_of(cache, "sm80 sm90", "scale_rows")
    shape = [(row.target, row.label, row.warps) for row in rows]
    assert shape == [("sm80", "0", 2), ("sm90", "1", 8), ("sm90", "few", 1)]


def test_absent_kernel_is_shown_with_its_reason(cache: Path):
    rows = rows_of(cache, "sm80 gfx90a pvc", "top_declared")
    assert [(row.target, row.absent, row.note) for row in rows] == [
        ("sm80", False, ""),
        ("gfx90a", True, "an example"),
        ("pvc", True, "tl.topk came after Triton 3.3"),
    ]
    assert "none  gfx90a" in audit.render(rows)


def test_dump_holds_what_a_launcher_needs(cache: Path, tmp_path: Path):
    rows_of(cache, "sm90", "scale", dump=tmp_path)
    facts = json.loads((tmp_path / "scale.sm90.json").read_text())
    assert facts == {
        "kernel": "scale_kernel",
        "shared": 0,
        "warps": 4,
        "threads": 32,
        "consts": {"TILE": 128},
        "args": {"x_ptr": "*bf16", "y_ptr": "*fp32", "stride_x": "i32:16", "scale": "fp32"},
    }
    assert (tmp_path / "scale.sm90.cubin").read_bytes()[:4] == b"\x7fELF"
    assert str(Path.cwd()) not in (tmp_path / "scale.sm90.ptx").read_text()


def test_warm_cache_gives_the_same_rows(cache: Path):
    first, second = (rows_of(cache, "sm80 gfx942", "product") for _ in range(2))
    assert [row.usage for row in first] == [row.usage for row in second]


def test_progress_counts_rows(cache: Path):
    seen = []
    rows_of(
        cache, "sm80 sm90", "scale", progress=lambda row, done, total: seen.append((done, total))
    )
    assert seen == [(1, 2), (2, 2)]


def test_compiling_process_has_no_torch(tmp_path: Path):
    (tmp_path / "no_torch.py").write_text(
        "import sys\nassert 'torch' not in sys.modules\nCASES = {}\n", encoding="utf-8"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        assert audit.run_audit(["sm90"], cases="no_torch:CASES") == []


def test_compiles_in_a_process_that_interprets(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (row,) = rows_of(cache, "sm90", "scale")
    assert row.ok


def test_unknown_names_raise_with_the_nearest(cache: Path):
    with pytest.raises(ArgumentError, match=r"targets: found 'sm9', needed one of .*nearest: sm"):
        rows_of(cache, "sm9", "scale")
    with pytest.raises(ArgumentError, match=r"only: found 'scal', needed one of .*nearest: scale"):
        rows_of(cache, "sm90", "scal")
    with pytest.raises(ArgumentError, match="jobs: found 0, needed 1 or more"):
        audit.run_audit(["sm90"], jobs=0, cases=SAMPLES)


def test_broken_table_raises_with_its_words():
    with pytest.raises(BackendError, match="No module named 'no_such_module'"):
        audit.run_audit(["sm90"], cases="no_such_module:CASES")


def test_every_kernel_has_a_case():
    """One that is compiled for nobody is held to nothing."""
    names = set()
    for path in (ROOT / "dash_portable" / "kernels").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                names.add((path.stem, node.name))
    kernels = [case.kernel.fn for case in CASES.values()]
    assert {(fn.__module__.rpartition(".")[2], fn.__name__) for fn in kernels} == names


def test_only_archs_that_were_run_merge_by_ticket_or_launch_ahead():
    """Both rest on how memory and launches are ordered, which no compiler shows."""
    run = {figure.arch for row in BACKENDS if row.name == "triton" for figure in row.measured}
    rows = [*launch.SELECT.items(), *launch.ATTEND.items()]
    rows += [(arch, (row,)) for arch, row in launch_prefill.PREFILL.items()]
    daring = {
        arch
        for arch, of in rows
        for row in of
        if getattr(row, "ticket", False) or getattr(row, "dependent", False)
    }
    assert daring <= run


def test_spills_are_claimed_for_the_pinned_triton(monkeypatch: pytest.MonkeyPatch):
    triton = pytest.importorskip("triton")
    pins = (ROOT / "constraints.txt").read_text()
    assert f"triton=={CLAIMED_TRITON}." in pins
    monkeypatch.setattr(triton, "__version__", f"{CLAIMED_TRITON}.9")
    assert not_claimed() == ""
    monkeypatch.setattr(triton, "__version__", "3.4.0")
    assert not_claimed() == f"claimed for Triton {CLAIMED_TRITON} only"


def test_a_comparison_with_a_constant_may_be_narrow():
    """Triton 3.9 compares before it widens; between two narrow numbers the source did not widen."""
    line = "    %a = arith.cmpf olt, %x, {} : tensor<64xbf16> loc(#loc)"
    assert narrow_arithmetic(line.format("%cst_0")) == ()
    assert len(narrow_arithmetic(line.format("%y"))) == 1
    assert len(narrow_arithmetic("    %a = arith.addf %x, %cst : tensor<64xbf16> loc(#loc)")) == 1


def test_every_arch_has_its_launch_rows_on_purpose():
    """A new arch goes beside its neighbours in each table, or among those of the general row here:
    32 threads a warp with few registers are not general.
    """
    known = {arch.token for arch in ARCHS}
    intel = {arch.token for arch in ARCHS if arch.vendor is Vendor.INTEL}
    instinct = tokens("GCN5", "CDNA1", "CDNA2", "CDNA3", "CDNA4", "CDNA5")  # 512 registers
    general = intel | instinct | tokens("Volta", "Turing")  # older than Triton's matrix products
    radeon = tokens("RDNA1", "RDNA2", "RDNA3", "RDNA3.5", "RDNA4")
    tensor_memory = {"sm100", "sm103", "sm110"}
    assert set(launch.RDNA) == radeon
    named = {
        "select": launch.SELECT,
        "attend": launch.ATTEND,
        "prefill": launch_prefill.PREFILL,
        "wider": launch_prefill.WIDER,
    }
    assert {name: set(table) for name, table in named.items()} == {
        "select": {EVERYWHERE, "sm90"},  # what was timed
        "attend": {EVERYWHERE, "sm90"} | radeon,
        "prefill": {EVERYWHERE} | known - general,
        "wider": {EVERYWHERE} | known - general - {"sm90"},
    }
    small = {"sm80", "sm86", "sm87", "sm88", "sm89", "sm120", "sm121"}
    for family in (radeon, tensor_memory, small):
        assert len({id(launch_prefill.PREFILL[arch]) for arch in family}) == 1


def test_tables_of_tickets_alone_leave_no_merge():
    """Where no row needs a second launch of selection, the case is shown as absent."""
    script = (
        "from dash_portable.kernels import launch\n"
        "launch.SELECT = {'*': (launch.SelectRow(ticket=True),)}\n"
        "from dash_portable.kernels.cases import CASES\n"
        "assert not CASES['select_merge'].rows('sm80')\n"
        "assert set(CASES['select_merge'].absent) >= {'sm80', 'gfx942', 'pvc'}\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_limits_are_data():
    target = TARGETS["gfx942"]
    assert excess(Usage(65536, regs=512), target, may_spill=False) == ()
    assert excess(Usage(65537), target, may_spill=False) == (
        "shared memory: needs 65537 bytes, the card has 65536",
    )
    assert excess(Usage(0, regs=513), target, may_spill=False) == (
        "registers: needs 513, the card has 512",
    )
    assert excess(Usage(0, spill=4), target, may_spill=False) == (
        "spill: 4 registers, none is claimed",
    )
    assert excess(Usage(0, spill=4), target, may_spill=True) == ()
    assert too_many_threads(16, target) is None
    assert too_many_threads(17, target) is not None


def test_targets_are_archs_that_the_platform_knows():
    known = {arch.token for arch in ARCHS} | {"generic"}
    assert set(ALL_TARGETS) <= known
    assert {target.vendor for target in ALL_TARGETS.values()} <= {str(vendor) for vendor in Vendor}
    assert set(QUICK) <= set(TARGETS)


def test_case_without_a_row_for_a_target_raises():
    case = Case(None, {}, launch={"sm90": (Launch(8),)})
    assert case.rows("sm90") == (Launch(8),)
    assert Case(None, {}).rows("sm90") == Case(None, {}).launch[EVERYWHERE]
    with pytest.raises(KeyError, match="no launch row for sm80"):
        case.rows("sm80")


ROWS = [
    audit.Row(case="a", target="sm90", triton="3.7.1", warps=4, usage=Usage(10, 20, 0, 0, 99)),
    audit.Row(case="a", target="sm90", label="big", triton="3.7.1", usage=Usage(30, 10)),
    audit.Row(case="a", target="gfx942", triton="3.7.1", problems=("spill: 4 registers",)),
    audit.Row(case="b", target="gfx942", triton="3.7.1", absent=True, note="not there"),
]


def test_report_names_what_is_wrong():
    text = audit.render(ROWS)
    assert "  gfx942 a 0: spill: 4 registers" in text
    assert text.splitlines()[-1].startswith("triton 3.7.1: 3 compiles, 1 wrong")


def test_markdown_shows_the_largest_launch_row():
    assert audit.markdown(ROWS).splitlines() == [
        "| kernel | sm90 | gfx942 |",
        "|---|---|---|",
        "| `a` | 30/20/0 | **fails** |",
        "| `b` | - | - |",
    ]


def test_markdown_can_be_read_back():
    page = f"# A page\n\n{audit.markdown(ROWS)}\n\n| target | cards |\n|---|---|\n| sm90 | H100 |\n"
    read = audit.read_markdown(page)
    assert read | {("b", "sm90"): "-"} == read
    assert {place: read[place] for place in audit.cells(ROWS)} == audit.cells(ROWS)


def test_json_round_trip():
    assert [audit.Row.from_json(row) for row in json.loads(audit.to_json(ROWS))] == ROWS


def test_a_target_without_a_launch_row_is_no_stale_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "docs" / "kernels.md"
    page.parent.mkdir()
    page.write_text(audit.markdown(ROWS))  # says "-" of b on sm90, which no row compiles
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "audited", lambda targets, jobs: ROWS)
    assert docs.stale_cells(["sm90", "gfx942"], 1) == ""
    page.write_text(audit.markdown(ROWS).replace("30/20/0", "30/21/0"))
    assert docs.stale_cells(["sm90", "gfx942"], 1) == (
        "('a', 'sm90'): 30/21/0 on the page, 30/20/0 compiled"
    )
