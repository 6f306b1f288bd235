"""What a task of Spark does when the job has ended."""

from __future__ import annotations

import subprocess

import pytest


def test_an_agent_that_does_not_end_fails_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    from collectives.spark import elastic

    monkeypatch.setattr(elastic, "_END_WITHIN", 0.01)
    with subprocess.Popen(["sleep", "60"]) as agent:
        elastic._await_end(agent)
        assert agent.returncode == -9
