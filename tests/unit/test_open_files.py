"""The launcher's limit of open files."""

from __future__ import annotations

import resource

import pytest

from collectives.base.errors import InvalidArgumentError
from collectives.launch.open_files import OpenFiles


class Limits:
    """Stands for the system's limit of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.now = (soft, hard)
        monkeypatch.setattr(resource, "getrlimit", lambda kind: self.now)
        monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: setattr(self, "now", limits))


def test_the_limit_is_raised_where_a_job_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Limits(monkeypatch, 1024, 1 << 20)
    files = OpenFiles()
    files.allow(100, 400)
    assert system.now == (1024, 1 << 20)
    files.allow(2000, 2000)
    assert system.now == (8100, 1 << 20)
    files.allow(3, 3)
    assert system.now[0] == 8100
    files.restore()
    assert system.now == (1024, 1 << 20)


def test_any_number_is_allowed_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Limits(monkeypatch, 1024, resource.RLIM_INFINITY)
    OpenFiles().allow(10_000, 80_000)
    assert system.now == (110_100, resource.RLIM_INFINITY)


def test_a_job_that_the_system_does_not_allow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Limits(monkeypatch, 1024, 4096)
    with pytest.raises(
        InvalidArgumentError, match=r"needs 8100 open files for 2000 hosts and 2000 ranks, .* allows 4096"
    ):
        OpenFiles().allow(2000, 2000)
    assert system.now == (1024, 4096)
