"""The benchmarks in torch on several ranks: every gradient right, one table, and nothing travels while hooks are
clocked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import torch_hooks, torch_step


@pytest.fixture(autouse=True)
def _few_ranks(hvd: Any) -> None:
    if hvd.size() > 2:
        pytest.skip("two ranks show it")


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
