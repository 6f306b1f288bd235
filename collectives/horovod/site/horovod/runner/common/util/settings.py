"""Settings of a job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class BaseSettings:
    """The options of ``horovodrun`` under their names in programs; all are ignored here."""

    num_proc: int | None = None
    verbose: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    extra_mpi_args: str | None = None
    tcp_flag: bool | None = None
    binding_args: str | None = None
    key: bytes | None = None
    start_timeout: Any = None
    output_filename: str | None = None
    run_func_mode: bool | None = None
    nics: Iterable[str] | None = None
    elastic: bool = False
    prefix_output_with_timestamp: bool = False


@dataclass
class Settings(BaseSettings):
    """`BaseSettings` with the hosts."""

    hosts: str | None = None
