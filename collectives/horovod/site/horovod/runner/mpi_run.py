"""Queries about the MPI with which ``horovodrun`` starts ranks, found by `collectives.launch.mpirun.find`."""

from __future__ import annotations

from collections.abc import Mapping

from collectives.base.errors import InvalidArgumentError
from collectives.launch.mpirun import Vendor, find


def _vendor() -> Vendor | None:
    try:
        launcher = find()
    except InvalidArgumentError:
        return None  # an unknown MPI
    return None if launcher is None else launcher.vendor


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Whether a supported MPI is installed; all of these functions ignore ``env``."""
    return _vendor() is not None


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is Open MPI."""
    return _vendor() is Vendor.OPEN_MPI


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return False: IBM's Spectrum MPI is not supported."""
    return False


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is MPICH."""
    return _vendor() is Vendor.MPICH


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is Intel MPI."""
    return _vendor() is Vendor.INTEL_MPI
