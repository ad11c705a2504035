"""Detection, asked of torch builds and machines that are written down here."""

from __future__ import annotations

import ctypes
import json
import platform as python_platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dash_portable.errors import ArgumentError
from dash_portable.platform import detect
from dash_portable.platform.facts import (
    ARCHS,
    KNOWN,
    Platform,
    Vendor,
    parse_arch,
    pretended,
    tokens,
)
from dash_portable.platform.quiet import Seen, intel_arch, look, uniform_arch


class Room:
    """`torch.cuda` or `torch.xpu` of a fake build; counts how often the runtime was started."""

    def __init__(self, *devices: SimpleNamespace, running: bool = False, current: int = 0) -> None:
        self.devices, self.running, self.current, self.starts = devices, running, current, 0

    def device_count(self) -> int:
        return len(self.devices)

    def is_initialized(self) -> bool:
        return self.running

    def current_device(self) -> int:
        return self.current

    def get_device_properties(self, index: int) -> SimpleNamespace:
        self.starts += not self.running
        self.running = True
        return self.devices[index]


def nvidia(major: int, minor: int, name: str = "card") -> SimpleNamespace:
    return SimpleNamespace(major=major, minor=minor, name=name)


def amd(arch: str, name: str = "card") -> SimpleNamespace:
    return SimpleNamespace(major=9, minor=4, gcnArchName=arch, name=name)


def intel(version: int, name: str = "card") -> SimpleNamespace:
    return SimpleNamespace(architecture=version, name=name)


def build(
    *, cuda: Any = None, hip: str | None = None, xpu: Any = None, accelerator: Any = None
) -> SimpleNamespace:
    """A torch module: `cuda` and `xpu` are rooms; `hip` makes the cuda room an AMD one."""
    version = SimpleNamespace(
        cuda="13.0" if cuda is not None and hip is None else None,
        hip=hip,
        xpu="20260100" if xpu is not None else None,
    )
    return SimpleNamespace(
        __version__="2.14.0",
        version=version,
        cuda=cuda if cuda is not None else Room(),
        accelerator=SimpleNamespace(current_accelerator=lambda: accelerator),
        **({"xpu": xpu} if xpu is not None else {}),
    )


def test_nvidia() -> None:
    torch = build(cuda=Room(nvidia(9, 0, "NVIDIA H200")))
    found = detect.platform_of(torch)
    assert (found.vendor, found.device_type, found.arch) == (Vendor.NVIDIA, "cuda", "sm90")
    assert (found.device_name, found.runtime) == ("NVIDIA H200", "CUDA 13.0")


def test_rocm_is_not_taken_for_nvidia() -> None:
    """Its capability tuple (9, 4) compares above Hopper's and admits nothing."""
    found = detect.platform_of(build(cuda=Room(amd("gfx942:sramecc+:xnack-")), hip="7.2"))
    assert (found.vendor, found.device_type, found.arch) == (Vendor.AMD, "cuda", "gfx942")


def test_equal_tuples_of_different_archs_are_different_platforms() -> None:
    torch = build(cuda=Room(amd("gfx942"), amd("gfx940")), hip="7.2")
    first, second = (detect.platform_of(torch, ("cuda", index)) for index in (0, 1))
    assert (first.arch, second.arch) == ("gfx942", "gfx940")
    assert first != second


@pytest.mark.parametrize("broken_ipex", [False, True])
def test_intel_needs_torch_alone(broken_ipex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken_ipex:
        monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", None)
    found = detect.platform_of(build(xpu=Room(intel(0x05004004, "Intel Arc B580"))))
    assert (found.vendor, found.device_type, found.arch) == (Vendor.INTEL, "xpu", "bmg")


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (0x030DC008, "dg2"),
        (0x030F0007, "pvc"),
        (0x030F4007, "pvc"),
        (0x03118004, "mtl"),
        (0x03128004, "arl"),
        (0x05004004, "bmg"),
        (0x05010004, "lnl"),
        (0x07800004, "ptl"),
        (0x07804001, "ptl"),
        (40 << 22 | 1 << 14, "xe40.1"),
    ],
)
def test_intels_packed_version(version: int, arch: str) -> None:
    assert intel_arch(version) == arch


def test_each_device_is_asked_by_itself() -> None:
    torch = build(cuda=Room(nvidia(7, 5), nvidia(9, 0)))
    assert detect.platform_of(torch, ("cuda", 1)).arch == "sm90"
    assert detect.platform_of(torch, ("cuda", 0)).arch == "sm75"


def test_tensors_on_the_cpu_of_a_gpu_machine_are_on_a_cpu() -> None:
    found = detect.platform_of(build(cuda=Room(nvidia(9, 0))), ("cpu", 0))
    assert (found.vendor, found.arch) == (Vendor.CPU, python_platform.machine().lower())


@pytest.mark.parametrize("device", ["xpu:0", "mps:0", "cuda:3"])
def test_a_device_that_torch_does_not_have(device: str) -> None:
    kind, _, index = device.partition(":")
    with pytest.raises(ArgumentError, match=f"device: found {device}, needed one that torch has"):
        detect.platform_of(build(cuda=Room(nvidia(9, 0))), (kind, int(index)))


def test_torchs_accelerator_decides_between_two_vendors() -> None:
    torch = build(
        cuda=Room(nvidia(9, 0)),
        xpu=Room(intel(0x05004004)),
        accelerator=SimpleNamespace(type="xpu"),
    )
    found = detect.platform_of(torch)
    assert found.vendor is Vendor.INTEL
    assert any(note.startswith("nvidia is here too") for note in found.notes)


def test_another_vendors_gpu_is_named() -> None:
    torch = build(cuda=Room(amd("gfx1100")), hip="7.2")
    seen = (Seen(vendor=Vendor.NVIDIA, arch="sm86", name="RTX 3090"),)
    found = detect.platform_of(torch, seen=seen)
    assert found.vendor is Vendor.AMD
    assert any("RTX 3090" in note and "built without cuda" in note for note in found.notes)


def raising(*_: object) -> Any:
    raise RuntimeError("driver and library disagree")


@pytest.mark.parametrize(
    "torch",
    [
        build(),
        SimpleNamespace(__version__="2.8.0", version=SimpleNamespace()),
        build(cuda=SimpleNamespace(device_count=raising)),
        build(xpu=SimpleNamespace(device_count=raising)),
        build(cuda=SimpleNamespace()),
        build(cuda=Room()),
        build(hip="7.2"),
        build(
            cuda=SimpleNamespace(
                device_count=lambda: 1,
                is_initialized=lambda: False,
                get_device_properties=raising,
            )
        ),
    ],
    ids=["none", "old", "cuda-raises", "xpu-raises", "no-function", "empty", "hip-empty", "liar"],
)
def test_a_probe_that_is_missing_raises_or_lies_is_not_a_gpu(torch: Any) -> None:
    assert detect.platform_of(torch).vendor is Vendor.CPU
    findings = detect.probe(torch)
    assert [finding.vendor for finding in findings] == [Vendor.NVIDIA, Vendor.AMD, Vendor.INTEL]
    assert all(finding.text or finding.count for finding in findings)


def test_a_device_that_does_not_answer_leaves_the_next_vendor() -> None:
    liar = SimpleNamespace(
        device_count=lambda: 1, is_initialized=lambda: False, get_device_properties=raising
    )
    torch = build(cuda=liar, xpu=Room(intel(0x05004004)))
    found = detect.platform_of(torch)
    assert found.vendor is Vendor.INTEL
    assert "nvidia not available: RuntimeError: driver and library disagree" in found.notes
    with pytest.raises(ArgumentError, match="device: found cuda:0, needed one that answers"):
        detect.platform_of(torch, ("cuda", 0))


def test_a_broken_accelerator_question_leaves_our_order() -> None:
    torch = build(cuda=Room(nvidia(9, 0)), xpu=Room(intel(0x05004004)))
    torch.accelerator = SimpleNamespace(current_accelerator=raising)
    assert detect.platform_of(torch).vendor is Vendor.NVIDIA


def test_a_build_without_xpu_is_its_own_verdict() -> None:
    texts = {one.vendor: one.text for one in detect.probe(build(cuda=Room(nvidia(9, 0))))}
    assert "AttributeError" in texts[Vendor.INTEL]
    torch = build(cuda=Room(nvidia(9, 0)))
    torch.xpu = Room()
    texts = {one.vendor: one.text for one in detect.probe(torch)}
    assert texts[Vendor.INTEL] == "torch 2.14.0 is built without xpu"


def test_no_runtime_is_started_where_all_gpus_are_alike() -> None:
    room = Room(nvidia(9, 0), nvidia(9, 0))
    seen = tuple(Seen(vendor=Vendor.NVIDIA, arch="sm90", name="NVIDIA H200") for _ in range(2))
    found = detect.platform_of(build(cuda=room), seen=seen)
    assert (found.arch, found.device_name, room.starts) == ("sm90", "NVIDIA H200", 0)


def test_the_runtime_is_asked_where_gpus_differ() -> None:
    room = Room(nvidia(7, 5), nvidia(9, 0))
    seen = (Seen(vendor=Vendor.NVIDIA, arch="sm90"), Seen(vendor=Vendor.NVIDIA, arch="sm75"))
    assert detect.platform_of(build(cuda=room), seen=seen).arch == "sm75"
    assert room.starts == 1


VISIBLE = ({}, {"ROCR_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize("hidden", [*VISIBLE, {**VISIBLE[1], **VISIBLE[2]}], ids=str)
def test_visibility_variables_choose_nothing_and_are_told(hidden: dict[str, str]) -> None:
    torch = build(cuda=Room(amd("gfx942")), hip="7.2")
    found = detect.platform_of(torch, hidden=hidden)
    assert found.arch == "gfx942"
    both = [note for note in found.notes if "both set" in note]
    assert len(both) == (len(hidden) == 2)


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
)
def test_with_no_device_the_variable_that_may_hide_them_is_named(name: str) -> None:
    found = detect.platform_of(build(cuda=Room(), hip="7.2"), hidden={name: "7"})
    assert found.vendor is Vendor.CPU
    assert f"amd devices may be hidden by {name}=7" in found.notes


@pytest.mark.parametrize(
    ("name", "arch", "card"),
    [
        ("H200", "sm90", "H200"),
        ("nvidia geforce rtx 4090", "sm89", "RTX 4090"),
        ("L40S", "sm89", "L40S"),
        ("AMD Instinct MI300X", "gfx942", "MI300X"),
        ("mi325x", "gfx942", "MI325X"),
        ("RX 7900 XTX", "gfx1100", "RX 7900 XTX"),
        ("B580", "bmg", "Arc B580"),
        ("Intel Data Center GPU Max 1550", "pvc", "Data Center GPU Max 1550"),
        ("B300", "sm103", "B300"),
    ],
)
def test_a_cards_name_means_its_arch(name: str, arch: str, card: str) -> None:
    found = pretended(name)
    assert (found.arch, found.device_name, found.notes) == (arch, card, ())


def test_every_card_stands_once_and_is_found() -> None:
    for arch in ARCHS:
        for card in arch.cards:
            token = pretended(card).arch
            assert set(arch.cards) == set(KNOWN[token].cards), card
            assert pretended(arch.token).device_name == arch.cards[0]


@pytest.mark.parametrize("name", ["sm130", "gfx1300", "gfx9ff", "sm95"])
def test_a_token_of_a_newer_card_is_taken_and_told(name: str) -> None:
    found = pretended(name)
    assert not found.known
    assert f"unknown arch {name}" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gfx9420", "gfx942"),
        ("sm900", "sm90"),
        ("gfx94x", "gfx942"),
        ("h20o", "H20"),
        ("sm9", "sm9"),
    ],
)
def test_a_misspelt_platform_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ArgumentError, match=rf"platform: found '{name}', needed .*nearest: {near}"):
        pretended(name)


def test_a_future_arch_is_told() -> None:
    found = detect.platform_of(build(cuda=Room(amd("gfx1300")), hip="8.0"))
    assert (found.arch, found.family, found.known) == ("gfx1300", "unknown", False)
    assert any("unknown arch gfx1300 (nearest known: gfx1" in note for note in found.notes)


def test_the_current_device_counts_once_the_runtime_runs() -> None:
    torch = build(cuda=Room(nvidia(9, 0), nvidia(9, 0), running=True, current=1))
    assert detect._current(torch, None) == ("cuda", 1)
    assert detect._current(torch, ("xpu", 0)) == ("xpu", 0)
    assert detect._current(build(), None) is None


def test_this_machine() -> None:
    found = detect.current_platform("cpu")
    assert found.vendor is Vendor.CPU
    assert found.version("torch")
    assert found is detect.current_platform("cpu")
    assert json.loads(json.dumps(detect.report("cpu")))["platform"]["vendor"] == "cpu"
    with pytest.raises(ArgumentError, match="device: found 'cuda:x'"):
        detect.current_platform("cuda:x")


def test_installed_reads_metadata_of_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry's `aiter` has the import name of AMD's and is not taken for it."""
    for name in (
        "aiter-0.13.dist-info",
        "amd_aiter-0.1.20.dist-info",
        "flash_attn_3-3.0.dist-info",
    ):
        folder = tmp_path / name
        folder.mkdir()
        project, version = name.removesuffix(".dist-info").rsplit("-", 1)
        text = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    before = dict(detect.installed())
    monkeypatch.syspath_prepend(tmp_path)
    found = dict(detect.installed())
    assert set(found) - set(before) == {"amd-aiter", "flash-attn-3"}
    assert (found["amd-aiter"], found["flash-attn-3"]) == ("0.1.20", "3.0")


def no_library(name: str) -> ctypes.CDLL:
    raise OSError(f"{name}: cannot open shared object file")


def test_quiet_sources_may_all_be_missing(tmp_path: Path) -> None:
    assert look(no_library, tmp_path) == ()
    assert look(lambda name: SimpleNamespace(), tmp_path) == ()  # type: ignore[arg-type,return-value]


def test_amds_driver_and_the_bus_are_read_as_files(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    nodes = "class/kfd/kfd/topology/nodes"
    write(f"{nodes}/0/properties", "cpu_cores_count 64\ngfx_target_version 0\n")
    write(f"{nodes}/1/properties", "gfx_target_version 90402\n")
    write(f"{nodes}/2/properties", "gfx_target_version 90010\n")
    for slot, vendor, device, kind in (
        ("0000:01:00.0", "0x8086", "0xe20b", "0x030000"),
        ("0000:02:00.0", "0x1002", "0x74a1", "0x038000"),
        ("0000:03:00.0", "0x10de", "0x2335", "0x030200"),
        ("0000:04:00.0", "0x8086", "0x1533", "0x020000"),
    ):
        write(f"bus/pci/devices/{slot}/class", kind)
        write(f"bus/pci/devices/{slot}/vendor", vendor + "\n")
        write(f"bus/pci/devices/{slot}/device", device + "\n")
    seen = look(no_library, tmp_path)
    assert [gpu.arch for gpu in seen if gpu.vendor is Vendor.AMD] == ["gfx942", "gfx90a"]
    assert uniform_arch(seen, Vendor.AMD) == ""
    assert uniform_arch(seen, Vendor.INTEL) == "bmg"
    assert [gpu.name for gpu in seen if gpu.vendor is Vendor.NVIDIA] == ["PCI device 2335"]


class ManagementLibrary:
    """NVIDIA's management library with two H100."""

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetName(self, device: Any, name: Any, size: int) -> int:
        name.value = b"NVIDIA H100"
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0


def test_the_management_library_is_asked_and_closed(tmp_path: Path) -> None:
    library = ManagementLibrary()
    seen = look(lambda name: library, tmp_path)  # type: ignore[arg-type,return-value]
    assert seen == (Seen(vendor=Vendor.NVIDIA, arch="sm90", name="NVIDIA H100"),) * 2
    assert library.open == 0


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("SM_90", "sm90"),
        ("sm90a", "sm90"),
        ("sm100f", "sm100"),
        ("BMG", "bmg"),
        ("gfx90a", "gfx90a"),
    ],
)
def test_spellings_of_an_arch(text: str, token: str) -> None:
    assert parse_arch(text) == token


def test_every_known_arch_can_be_pretended() -> None:
    for arch in ARCHS:
        found = pretended(arch.token)
        assert (found.vendor, found.arch, found.family) == (arch.vendor, arch.token, arch.family)
        assert found.pretended
    assert pretended("cpu").vendor is Vendor.CPU
    assert pretended("gfx1300").vendor is Vendor.AMD
    assert pretended("sm130").vendor is Vendor.NVIDIA
    assert len({arch.token for arch in ARCHS}) == len(ARCHS)
    assert tokens("Hopper") == {"sm90"}


@pytest.mark.parametrize(("name", "nearest"), [("gtx942", "gfx942"), ("bgm", "bmg"), ("", None)])
def test_an_unknown_platform_names_the_nearest(name: str, nearest: str | None) -> None:
    ending = rf"\(nearest: {nearest}\)" if nearest else ""
    with pytest.raises(
        ArgumentError, match=f"platform: found '{name}', needed an arch or a card.*{ending}"
    ):
        pretended(name)


def test_a_platform_prints_and_serialises() -> None:
    found = Platform(
        vendor=Vendor.NVIDIA,
        device_type="cuda",
        arch="sm90",
        device_name="NVIDIA H200",
        runtime="CUDA 13.0",
        packages=(("torch", "2.14.1"),),
    )
    assert str(found) == "nvidia sm90 NVIDIA H200, CUDA 13.0"
    assert json.loads(json.dumps(found.to_dict()))["packages"] == {"torch": "2.14.1"}


QUIET_IMPORT = """
import logging, os, sys
before = dict(os.environ), list(logging.root.handlers), list(sys.path)
import dash_portable
import dash_portable.dispatch, dash_portable.explanation
from dash_portable.platform.facts import pretended
from dash_portable.choose import choose
from dash_portable.explanation import explain, typical_requests
assert choose(typical_requests()[0], pretended("gfx942")).backend is None
assert explain(platform="bmg").choices[0].backend.name == "triton"
loaded = {name.partition(".")[0] for name in sys.modules}
foreign = {"torch", "triton", "numpy", "flash_attn", "flashinfer", "aiter", "vllm"} & loaded
assert not foreign, foreign
assert before == (dict(os.environ), list(logging.root.handlers), list(sys.path))
"""

FORKING = """
import torch
from dash_portable import current_platform
current_platform()
assert not torch.cuda.is_initialized()
assert not torch.xpu.is_initialized()
"""


@pytest.mark.parametrize("code", [QUIET_IMPORT, FORKING], ids=["import", "detection"])
def test_in_a_fresh_process_nothing_is_loaded_started_or_changed(code: str) -> None:
    environ = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr


FORK = """
import os, torch
from dash_portable import current_platform
assert current_platform().vendor.value == "nvidia"
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    os._exit(0 if torch.ones(2, device="cuda").sum().item() == 2 else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.nvidia
def test_a_child_forked_after_detection_can_compute() -> None:
    if detect.current_platform().vendor is not Vendor.NVIDIA:
        pytest.skip("no NVIDIA device")
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_torch_there_is_a_cpu_and_a_reason() -> None:
    code = """
import sys
sys.modules["torch"] = None
from dash_portable.platform.detect import current_platform, report
found = current_platform()
assert found.vendor.value == "cpu"
assert "torch cannot be imported: ModuleNotFoundError" in found.notes[0], found.notes
report()
"""
    environ = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
