"""Horovod's questions about the build, answered for what can be loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import collectives
from collectives.worlds import capabilities


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    capabilities.mpi_library.cache_clear()
    yield
    capabilities.mpi_library.cache_clear()


def cupy(monkeypatch: pytest.MonkeyPatch, *, is_hip: bool = False, nccl: int | None = None) -> None:
    """Have a CuPy, with that NCCL."""

    def get_version() -> int:
        if nccl is None:
            raise ImportError("libnccl.so.2: cannot open shared object file")
        return nccl

    module = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(is_hip=is_hip)))
    for name, part in {
        "cupy": module,
        "cupy.cuda": module.cuda,
        "cupy.cuda.nccl": SimpleNamespace(get_version=get_version, available=True, NcclConfig=object),
    }.items():
        monkeypatch.setitem(sys.modules, name, part)  # type: ignore[arg-type]


def test_mpi_is_what_mpi4py_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=0, stdout="noise\nMPICH 5.0\n")
    )
    assert capabilities.mpi_library() == "MPICH 5.0" and capabilities.mpi_built() is True
    capabilities.mpi_library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=1, stdout=""))
    assert capabilities.mpi_library() == "" and capabilities.mpi_built() is False


def test_mpi_that_was_loaded_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(subprocess, "run", None)
    assert capabilities.mpi_built() is True


def test_before_init_nothing_is_enabled() -> None:
    assert not collectives.is_initialized()
    assert capabilities.mpi_enabled() is False
    with pytest.raises(ValueError, match="init"):
        capabilities.mpi_threads_supported()


@pytest.mark.parametrize(("nccl", "code"), [(22304, 22304), (None, 0)])
def test_nccl_is_a_number(nccl: int | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy(monkeypatch, nccl=nccl)
    assert capabilities.nccl_built() == code


def test_without_cupy_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        monkeypatch.setitem(sys.modules, name, None)
    assert capabilities.nccl_built() == 0 and capabilities.cuda_built() is False


@pytest.mark.parametrize("is_hip", [False, True])
def test_cuda_is_cupy_for_cuda(is_hip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy(monkeypatch, is_hip=is_hip)
    assert capabilities.cuda_built() is not is_hip and capabilities.rocm_built() is False


def test_what_is_not_used_is_not_there() -> None:
    assert not any((capabilities.gloo_enabled(), capabilities.ddl_built(), capabilities.ccl_built()))
    assert capabilities.gloo_built()  # ranks are connected without MPI by TCP of our own
