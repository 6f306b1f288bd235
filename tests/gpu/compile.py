"""What can be proved of GPUs without one: ``make gpu-compile``, which installs the packages that this needs.

The calls of CuPy, NCCL and the driver are compared with the packages' own signatures, by the tests. Every kernel is
compiled for four generations of GPUs, and the machine code is read.

A fault is a register spilled to memory, fewer words of 16 bytes than `promised`, an access whose address space the
compiler did not find out, and a load through the read-only cache, since what is read may be written by the same kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

from collectives.base import dtypes
from collectives.base.reduce_op import Op
from collectives.device import kernel_sources, kernels
from collectives.device.kernel_sources import Kernel
from collectives.device.packing import Packing

ARCHITECTURES = (120, 100, 90, 80)
"""Compute capabilities: Blackwell's two, Hopper's, Ampere's; those that take longest to compile for come first."""


class _Asked(kernels.Kernels):
    """Notes down which kernels are asked for."""

    def __init__(self) -> None:
        super().__init__(device=None)  # type: ignore[arg-type]
        self.kernels: dict[str, Kernel] = {}

    def function(self, kernel: Kernel) -> int:
        self.kernels[kernel.name] = kernel
        return 0


def asked_for(dtype: np.dtype[Any]) -> dict[str, Kernel]:
    """By its name: every kernel that the engine can ask for, for tensors of a dtype."""
    asked = _Asked()
    halves = [dtypes.resolve(name) for name in ("float16", "bfloat16")]
    wires = [dtype, *(halves if dtype in (np.float32, np.float64) else ())]
    before = [kernels.prescale(dtype, factor) for factor in (1.0, 0.5)]
    for op in (op for op in Op if op.elementwise):
        after = [kernels.finish(op, dtype, size, factor) for size in (2, 3) for factor in (1.0, 0.5)]
        for scaling in (*before, *after):
            asked.combination(None, dtype, [(1, 1, 0)], scaling)
        if op.serves(dtype):
            for scaling in after:
                asked.combination(op, dtype, [(2, 1, 0)], scaling)
        for wire in wires:
            for prescale in before:
                for finish in after:
                    Packing(None, asked, [0], dtype, wire, prescale, finish)  # type: ignore[arg-type]
    return asked.kernels


def promised(name: str) -> Counter[str]:
    """The least numbers of wide loads and stores in a kernel's code, as its unrolled loops have them.

    Words have 16 bytes, except: 8 for single-byte items of three sources and more; products of complex128, whose parts
    of 8 bytes need not lie at multiples of 16; and in a buffer of halves 4 or 8, which are 16 of the wider tensor.
    """
    kind, *parts = name.split("_")
    size = dtypes.resolve(parts[0 if kind.endswith("pack") else -2]).itemsize
    if kind == "combine" and size == 1:
        return Counter({"LDG.128": 2, "LDG.64": 4 + 8, "STG.128": 1, "STG.64": 1 + 1})
    if kind == "combine":
        return Counter() if size == 16 else Counter({"LDG.128": 2 * 2 + 4 + 8, "STG.128": 2 + 1 + 1})
    if kind == "copy":
        return Counter({"LDG.128": 2 if size == 1 else 4, "STG.128": 2 if size == 1 else 4})
    buffer = 128 * dtypes.resolve(parts[1]).itemsize // size
    loads, stores = (128, buffer) if kind == "pack" else (buffer, 128)
    return Counter({f"LDG.{loads}": 4, f"STG.{stores}": 4})


def faults(name: str, code: str) -> list[str]:
    """What is wrong with a kernel's disassembled code."""
    accesses: Counter[str] = Counter()
    wrong = []
    for instruction in re.findall(r"\b(?:LD|ST)[GL]?(?:\.\w+)* ", code):
        kind, *modifiers = instruction.strip().split(".")
        width = next((modifier.lstrip("US") for modifier in modifiers if modifier.lstrip("US").isdigit()), "32")
        accesses[f"{kind}.{width}"] += 1
        if "CONSTANT" in modifiers:
            wrong.append(f"{name}: reads through the read-only cache: {instruction}")
    for kind, what in {"LDL": "spills", "STL": "spills", "LD": "generic loads", "ST": "generic stores"}.items():
        if number := sum(count for access, count in accesses.items() if access.partition(".")[0] == kind):
            wrong.append(f"{name}: {what}: {number} x {kind}")
    if missing := promised(name) - accesses:
        wrong.append(f"{name}: fewer wide accesses than promised, missing {dict(missing)} of {dict(promised(name))}")
    return wrong


def functions(listing: str) -> Iterator[tuple[str, str]]:
    """The functions of a disassembler's listing: names and code."""
    for section in listing.split("\n\t.section\t.text.")[1:]:
        name, _, code = section.partition(",")
        yield name, code


def examine(capability: int, dtype: str, names: list[str]) -> tuple[int, list[str]]:
    """Compile kernels for tensors of a dtype; returns the capability, and what is wrong."""
    from cuda import pathfinder

    from collectives.device import compiler

    wanted = [kernel for name, kernel in asked_for(dtypes.resolve(dtype)).items() if name in names]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiler.compiled(kernel_sources.source(*wanted), capability))
        file.flush()
        command = [pathfinder.find_nvidia_binary_utility("nvdisasm"), "-c", "-ndf", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if shown.returncode:
        return capability, [f"{dtype}: the code cannot be disassembled: {shown.stderr.strip()}"]
    found = dict(functions(shown.stdout))
    lacking = [f"{name}: is not in the code" for name in names if name not in found]
    return capability, lacking + [fault for name, code in found.items() for fault in faults(name, code)]


class _Skipped:
    """Notes down what pytest skips for want of a package; gcc only serves tests that need no package."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped and "gcc" not in str(report.longrepr):
            self.tests.append(f"{report.nodeid}: {report.longrepr[2]}")


def calls() -> list[str]:
    """What is wrong with the calls of CuPy, NCCL and the driver; a test that is skipped proves nothing."""
    skipped = _Skipped()
    files = [f"tests/unit/test_{name}.py" for name in ("calls", "cupy_device", "nccl")]
    status = pytest.main(["-q", "-p", "no:cacheprovider", *files], [skipped])
    return [*([f"pytest: exit status {int(status)}"] if status else []), *skipped.tests]


def main() -> int:
    """Compare the calls, and examine every kernel for every architecture; returns the exit status."""
    begin = time.monotonic()
    bundles: dict[str, list[str]] = {}
    seen: set[str] = set()
    for dtype in dtypes.NAMES:
        bundles[dtype] = [name for name in asked_for(dtypes.resolve(dtype)) if name not in seen]
        seen.update(bundles[dtype])
    jobs = [(capability, *bundle) for capability in ARCHITECTURES for bundle in bundles.items()]
    wrong: dict[int, list[str]] = {capability: [] for capability in ARCHITECTURES}
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor() as pool:
        os.environ["CUPY_CACHE_DIR"] = folder  # inherited: what was compiled before must not hide what is compiled now
        for capability, said in pool.map(examine, *zip(*jobs, strict=True)):
            wrong[capability] += said
    wrong_calls = calls()  # last, because processes are not forked from one that has loaded libraries and made threads
    print(f"calls: {len(wrong_calls)} faults", *wrong_calls, sep="\n    ")
    for capability, said in wrong.items():
        print(f"sm_{capability}: {len(seen)} kernels, {len(said)} faults", *said, sep="\n    ")
    print(f"{time.monotonic() - begin:.0f} s")
    return int(bool(wrong_calls) or any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
