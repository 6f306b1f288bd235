"""Every call of CuPy, NCCL and the driver has the signature that it has there. Where the packages are installed, as
`make gpu-compile` does, the signatures are compared with theirs."""

from __future__ import annotations

import ctypes
import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import collectives
from collectives.device import libcuda
from tests.support.emulated.fake_cupy import CONSTANTS, SIGNATURES, parameters, signature, signatures
from tests.support.emulated.package_calls import Use, all_uses

PACKAGE = Path(collectives.__file__).parent
TABLE = {f"{module}.{name}": text for module in SIGNATURES for name, text in signatures(module).items()}
OTHERS = {f"cupy.cuda.runtime.{name}" for name in CONSTANTS} | {
    "cupy.__version__",
    "cupy.cuda.nccl.available",
    "cupy.cuda.nvrtc.NVRTCError",
    "cupy.cuda.runtime.is_hip",
}
"""What is no function."""
PARTS = {path.rsplit(".", count)[0] for path in (*TABLE, *OTHERS) for count in range(1, path.count(".") + 1)}
"""What only leads to another."""


def problem(use: Use) -> str | None:
    """What is wrong with a use."""
    if use.path not in TABLE:
        return None if use.path in OTHERS | PARTS else f"{use.path} is unknown"
    if use.count is None:
        return None
    expected = [text for text in parameters(TABLE[use.path]) if text not in ("self", "cls")]
    names = [text.partition("=")[0].split(" ")[-1] for text in expected]
    passed = [*names[: use.count], *use.keywords]
    needed = {name for name, text in zip(names, expected, strict=True) if "=" not in text}
    if use.count > len(names) or len(set(passed)) < len(passed) or not needed <= set(passed) <= set(names):
        return f"{TABLE[use.path]} is called with {use.count} arguments and {use.keywords}"
    return None


def test_every_call_has_the_signature() -> None:
    # Benchmarks are no part of the engine: they call functions of CuPy that the emulated one does not have.
    found = [(place, use) for place, use in all_uses(PACKAGE) if not place.startswith("tools/bench/")]
    assert [f"{place}: {said}" for place, use in found if (said := problem(use))] == []
    used = {use.path for _, use in found} - (PARTS - TABLE.keys())
    assert used == TABLE.keys() | OTHERS, "the table has what is not used"


# ---- the driver, whose functions take whatever ctypes gives them

BYTES = {"char": 1, "size_t": 8, "CUdeviceptr": 8, "CUuuid": 16, "void": 8, "const char *": 8}
"""Of the types of the driver's parameters; the others have four."""


class Driver:
    """A driver's library that looks at the sizes of its arguments."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., int]:
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> int:
        self.called.add(name)
        expected = parameters(TABLE[f"libcuda.{name}"])
        assert len(arguments) == len(expected), name
        for parameter, value in zip(expected, arguments, strict=True):
            kind, pointer, _ = parameter.rpartition("*")
            item = getattr(value, "_obj", value)  # of byref
            assert bool(pointer) == (hasattr(value, "_obj") or isinstance(value, ctypes.Array)), f"{name}: {parameter}"
            size = BYTES.get(kind.rstrip() if pointer else parameter.rpartition(" ")[0], 4)
            passed = 4 if isinstance(item, int) else ctypes.sizeof(item)
            assert passed == size or (kind == "char " and passed > size), f"{name}: {parameter}: {passed} bytes"
        return 0


def test_the_drivers_arguments_have_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(libcuda, "load", lambda: driver)
    libcuda.version(), libcuda.count(), libcuda.name(0), libcuda.uuid(0), libcuda.in_use(0)
    libcuda.capture_mode(libcuda.RELAXED), libcuda.attribute(1 << 40, libcuda.BUFFER_ID), libcuda.span(1 << 40)
    driver.cuGetErrorName(1, ctypes.byref(ctypes.c_char_p()))
    assert driver.called == signatures("libcuda").keys()


# ---- the real packages


def real(path: str) -> Any:
    """What a full name denotes in the installed packages."""
    module, *rest = path.split(".")
    value: Any = pytest.importorskip(module)
    for name in rest:
        module = f"{module}.{name}"
        value = getattr(value, name) if hasattr(value, name) else importlib.import_module(module)
    return value


@pytest.mark.parametrize("module", [module for module in SIGNATURES if module != "libcuda"])
def test_the_signatures_are_the_packages_own(module: str) -> None:
    real(module)
    assert {name: signature(real(f"{module}.{name}")) for name in signatures(module)} == signatures(module)


def test_what_is_no_function_is_there() -> None:
    assert all(real(path) is not None for path in OTHERS)
    assert {name: real(f"cupy.cuda.runtime.{name}") for name in CONSTANTS} == CONSTANTS
    assert issubclass(real("cupy.cuda.nvrtc.NVRTCError"), RuntimeError)


def test_the_drivers_signatures_are_its_headers() -> None:
    folder = real("cuda.pathfinder.find_nvidia_header_directory")("cudart")
    if folder is None or not Path(folder, "cuda.h").exists():
        pytest.skip("the driver's header is not installed: pip install nvidia-cuda-runtime")
    header = Path(folder, "cuda.h").read_text()
    renamed = dict(re.findall(r"^#define (cu[A-Z]\w*) +(cu[A-Z]\w*)$", header, re.MULTILINE))
    declared: dict[str, str] = {}
    for name, rest in re.findall(r"\bCUDAAPI (cu\w+)\(([^;]*)\);", header):
        declared.setdefault(renamed.get(name, name), " ".join(rest.split()))  # what follows is what older programs call
    table = signatures("libcuda")
    assert {name: f"{name}({declared[name]})" for name in table} == table
