"""What is missing for GPUs is said by name, each with what brings it; nothing is imported before it is asked, and
nothing raises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from collectives.device import diagnosis, libcuda
from collectives.launch import report
from collectives.worlds import capabilities
from tests.support.emulated.fake_cupy import FakeCupy

BROKEN = (
    "================================\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: numpy is too "
    "old\n======="
)


class Machine:
    """A machine with everything, of which tests take parts away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.fake = FakeCupy()
        self.packages = {"cupy-cuda13x": "14.2.0", "nvidia-nccl-cu13": "2.32.3"}
        for name, module in self.fake.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        self.headers("/opt/cuda/include")
        self.nccl(23203)
        monkeypatch.setattr(metadata, "version", self._version)

    def driver(self, cuda: int = 13000, gpus: int = 2, init: int = 0) -> None:
        for name, value in {"FAKE_CUDA": cuda, "FAKE_GPUS": gpus, "FAKE_INIT": init}.items():
            self._patch.setenv(name, str(value))

    def no_driver(self) -> None:
        self._patch.setattr(libcuda, "LIBRARY", "libcuda-that-is-not-there.so.1")
        libcuda.load.cache_clear()

    def visible(self, text: str) -> None:
        self._patch.setenv("CUDA_VISIBLE_DEVICES", text)

    def no_cupy(self) -> None:
        self.packages.pop("cupy-cuda13x")
        for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
            self._patch.setitem(sys.modules, name, None)

    def cupy(self, package: str, number: str, cuda: int) -> None:
        self.packages = {package: number, "nvidia-nccl-cu12": "2.32.3"}
        self.fake.modules["cupy"].__version__ = number  # type: ignore[attr-defined]
        self.fake.results["runtimeGetVersion"] = cuda

    def broken_cupy(self, error: Exception) -> None:
        real = diagnosis._import

        def fail(name: str) -> Any:
            if name.partition(".")[0] == "cupy":
                raise error
            return real(name)

        self._patch.setattr(diagnosis, "_import", fail)

    def no_nvrtc(self) -> None:
        self.fake.failures["getVersion"] = RuntimeError("CuPy failed to load libnvrtc.so.13")

    def headers(self, folder: str | None) -> None:
        finder = ModuleType("cuda.pathfinder")
        vars(finder).update(find_nvidia_header_directory=lambda library: folder)
        self._patch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        self._patch.setitem(sys.modules, "cuda.pathfinder", finder)

    def nccl(self, code: int | None) -> None:
        # CuPy's module is there without NCCL too, but then lacks its functions.
        module = ModuleType("cupy.cuda.nccl")
        vars(module)["available"] = code is not None
        if code is not None:
            vars(module).update(get_version=lambda: code, NcclConfig=object)
        self._patch.setitem(sys.modules, "cupy.cuda.nccl", module)

    def _version(self, package: str) -> str:
        if package not in self.packages:
            raise metadata.PackageNotFoundError(package)
        return self.packages[package]


@pytest.fixture
def machine(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(libcuda, "LIBRARY", str(library))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    libcuda.load.cache_clear()
    machine = Machine(monkeypatch)
    machine.driver()
    yield machine
    libcuda.load.cache_clear()


def rows() -> dict[str, diagnosis.Row]:
    return {row.what: row for row in diagnosis.report()}


def test_a_machine_with_everything(machine: Machine) -> None:
    assert {what: row.installed for what, row in rows().items()} == {
        "driver": "for CUDA 13.0",
        "device": "2 x NVIDIA H200",
        "CuPy": "cupy-cuda13x 14.2.0",
        "NVRTC": "13.0",
        "headers": "/opt/cuda/include",
        "NCCL": "2.32.3",
    }
    assert not any(row.advice or row.stops for row in diagnosis.report())
    assert diagnosis.why_not() is None


def test_nothing_at_all(machine: Machine) -> None:
    machine.no_driver()
    machine.no_cupy()
    machine.packages.clear()
    found = rows()
    assert [row.installed for row in found.values()] == [None] * 4
    assert found["CuPy"].advice == "pip install cupy-cuda13x (cupy-cuda12x if the driver is older than CUDA 13)"
    assert found["NCCL"].advice == "not needed within one host: pip install nvidia-nccl-cu13"
    assert str(diagnosis.why_not()).startswith(
        "no driver: libcuda-that-is-not-there.so.1 cannot be loaded: install NVIDIA's driver"
    )
    assert "--gpus all" in str(diagnosis.why_not())


@pytest.mark.parametrize(("cuda", "package"), [(12040, "12"), (12090, "12"), (13000, "13"), (14010, "13")])
def test_the_packages_to_install_follow_from_the_driver(cuda: int, package: str, machine: Machine) -> None:
    machine.driver(cuda)
    machine.no_cupy()
    machine.packages.clear()
    found = rows()
    assert found["CuPy"].advice == f"pip install cupy-cuda{package}x"
    assert found["NCCL"].advice.endswith(f"pip install nvidia-nccl-cu{package}")
    assert diagnosis.why_not() == f"no CuPy: pip install cupy-cuda{package}x"


def test_a_driver_that_is_too_old(machine: Machine) -> None:
    machine.driver(11080)
    assert diagnosis.why_not() == "driver, for CUDA 11.8: too old: update it to one for CUDA 12 or newer"


def test_a_driver_that_is_older_than_cupy(machine: Machine) -> None:
    machine.driver(12080)
    reason = "too new for the driver: update the driver, or pip uninstall cupy-cuda13x and pip install cupy-cuda12x"
    assert diagnosis.why_not() == f"CuPy, cupy-cuda13x 14.2.0: {reason}"
    # A driver serves every CUDA of its major version, and older ones.
    for package, built, cuda in (
        ("cupy-cuda12x", 12090, 12020),
        ("cupy-cuda12x", 12090, 13000),
        ("cupy-cuda13x", 13020, 13000),
    ):
        machine.cupy(package, "14.2.0", built)
        machine.driver(cuda)
        assert diagnosis.why_not() is None


def test_no_gpu_is_visible(machine: Machine) -> None:
    machine.driver(gpus=0)
    assert diagnosis.why_not() == "no device: none is visible: see nvidia-smi"
    machine.visible("")
    assert diagnosis.why_not() == "no device: none is visible: CUDA_VISIBLE_DEVICES is ''"
    machine.driver(init=100)
    machine.visible("7")
    assert (
        diagnosis.why_not() == "no device: none is visible (cuInit: CUDA_ERROR_NO_DEVICE): CUDA_VISIBLE_DEVICES is '7'"
    )


def test_a_library_that_is_no_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "LIBRARY", None)
    assert "does not work" in str(diagnosis.why_not()) and "reinstall" in str(diagnosis.why_not())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError(BROKEN), "it is installed, but cannot be imported: ImportError: numpy is too old"),
        (OSError(), "it is installed, but cannot be imported: OSError"),
        (
            ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"),
            "lacks a package: pip install fastrlock",
        ),
    ],
)
def test_a_cupy_that_does_not_work(error: Exception, said: str, machine: Machine) -> None:
    machine.broken_cupy(error)
    assert str(diagnosis.why_not()).startswith("no CuPy: ") and str(diagnosis.why_not()).endswith(said)
    assert rows()["NCCL"].installed == "2.32.3"


def test_a_cupy_that_is_too_old(machine: Machine) -> None:
    machine.cupy("cupy-cuda12x", "13.6.0", 12090)
    assert diagnosis.why_not() == "CuPy, cupy-cuda12x 13.6.0: too old: pip install --upgrade cupy-cuda12x"


def test_a_cupy_without_compiler_or_headers(machine: Machine) -> None:
    machine.headers(None)
    assert 'pip install "cupy-cuda13x[ctk]"' in rows()["headers"].advice
    assert rows()["headers"].installed is None
    assert diagnosis.why_not() is None
    machine.no_nvrtc()
    assert str(diagnosis.why_not()).startswith(
        'no NVRTC: kernels cannot be compiled: pip install "cupy-cuda13x[ctk]", or set CUDA_PATH'
    )


def test_nccl_is_not_needed(machine: Machine) -> None:
    machine.nccl(None)
    assert rows()["NCCL"] == ("NCCL", None, "not needed within one host: pip install nvidia-nccl-cu13", False)
    assert diagnosis.why_not() is None


@pytest.mark.parametrize(
    ("code", "number", "old"), [(22907, "2.29.7", True), (23000, "2.30.0", False), (23203, "2.32.3", False)]
)
def test_an_older_nccl_does_less(code: int, number: str, old: bool, machine: Machine) -> None:
    machine.nccl(code)
    row = rows()["NCCL"]
    assert (row.installed, bool(row.advice), row.stops) == (number, old, False)
    if old:
        assert (
            "2.30" in row.advice and "NCCL_MULTI_RANK_GPU_ENABLE=1" in row.advice and "nvidia-nccl-cu13" in row.advice
        )


def test_check_build_prints_the_rows(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find", lambda: None)
    monkeypatch.setattr(capabilities, "mpi_library", lambda: "")
    text, complete = report.check_build()
    assert complete
    assert "[X] GPU: device     2 x NVIDIA H200\n" in text
    assert text.endswith("\nSeveral ranks: yes, without MPI\nGPU tensors:   yes")
    machine.cupy("cupy-cuda12x", "13.6.0", 12090)
    text, _ = report.check_build()
    lines = text.splitlines()
    row = lines.index("[X] GPU: CuPy       cupy-cuda12x 13.6.0")
    assert lines[row + 1] == "        too old: pip install --upgrade cupy-cuda12x"
    assert lines[-1] == "GPU tensors:   no"


def test_nothing_is_imported_before_it_is_asked() -> None:
    program = (
        "import json, sys, collectives.device.selection, collectives.device.diagnosis\n"
        "before = {'cupy', 'cuda', 'torch', 'mpi4py.MPI'} & set(sys.modules)\n"
        "reason = collectives.device.diagnosis.why_not()\n"
        "print(json.dumps([sorted(before), reason, [tuple(row) for row in collectives.device.diagnosis.report()]]))\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    before, reason, found = json.loads(shown.stdout)
    assert before == []
    assert shown.stderr == ""
    # True on the machine that runs the test, whichever it is.
    assert (reason is None) == (not any(stops for *_, stops in found))
    assert [what for what, *_ in found][:3] == ["driver", "device", "CuPy"]
