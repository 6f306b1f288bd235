"""The benchmarks in torch on several ranks: every gradient right, one table, and nothing travels while hooks are
clocked; what `benchmarks.gpu.training` checks on a GPU is right on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import torch_hooks, torch_step
from benchmarks.gpu.training import CHECKS


def test_every_contestants_gradients_are_right(hvd: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    torch_step.main(
        ["--model", "mlp", "-n", "2", "-w", "1", "--block", "2", "--peers", "memcpy", "--json", str(written)]
    )
    shown = capsys.readouterr().out
    if hvd.rank() != 0:
        assert shown == ""
        return
    assert "200 float32 tensors" in shown
    records = {record["contestant"]: record for record in json.loads(written.read_text())["records"]}
    assert {name: record["wrong"] for name, record in records.items()} == {
        "alone": None,
        "collectives": 0,
        "collectives-view": 0,
        "memcpy": None,
    }


def test_hooks_are_clocked_on_rank_0(hvd: Any, tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    torch_hooks.main(["-n", "2", "-w", "1", "--json", str(written)])
    if hvd.rank() == 0:
        records = json.loads(written.read_text())["records"]
        assert [record["variant"] for record in records] == ([] if hvd.size() == 1 else list(torch_hooks.VARIANTS))
        assert all(record["calls"] >= 1 and record["call"]["median"] > 0 for record in records)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_checks_of_training_on_the_cpu(hvd: Any, check: Callable[[str], None]) -> None:
    check("cpu")
