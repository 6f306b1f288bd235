"""Configuration files: Horovod's are understood, and every mistake is named with its line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError, MissingDependencyError
from collectives.launch import config_file, rank_environment

WHOLE = """\
verbose: true
controller: mpi
params:
    fusion_threshold_mb: 32
    cycle_time_ms: 10
    cache_capacity: 2048
    hierarchical_allreduce: true
    hierarchical_allgather: true
    torus_allreduce: false
autotune:
    enabled: True
    log_file: horovod_autotune_log.txt
    warmup_samples: 5
    steps_per_sample: 20
    bayes_opt_max_samples: 50
    gaussian_process_noise: 0.9
timeline:
    filename: horovod_timeline.json
    mark_cycles: yes
stall_check:
    enabled: true
    warning_time_seconds: 120
    shutdown_time_seconds: 240
library_options:
    mpi_threads_disable: true
    num_nccl_streams: 2
    ccl_bgt_affinity: 1
    gloo_timeout_seconds: 60
logging:
    level: INFO
    hide_timestamp: true
"""


def read(folder: Path, text: str) -> config_file.ConfigFile:
    (folder / "settings.yaml").write_text(text)
    return config_file.read(str(folder / "settings.yaml"))


def test_every_key_of_horovods_has_its_meaning(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    assert found.verbose
    assert Config.from_environment(rank_environment.merge({}, {}, found.chosen)) == Config(
        algorithm="hierarchical",
        fusion_threshold=32 << 20,
        cycle_time=10,
        cache_capacity=2048,
        stall_warning=120,
        stall_shutdown=240,
        timeline="horovod_timeline.json",
        timeline_mark_cycles=True,
        autotune=True,
        autotune_log="horovod_autotune_log.txt",
        autotune_warmup=5,
        autotune_steps=20,
        autotune_samples=50,
        autotune_noise=0.9,
        log_level="info",
    )
    lines = [int(message.removeprefix(f"{tmp_path}/settings.yaml:").partition(":")[0]) for message in found.ignored]
    assert lines == [8, 9, 25, 26, 27, 28, 31]
    told = {"HIERARCHICAL_ALLGATHER": "1", "TORUS_ALLREDUCE": "0", "MPI_THREADS_DISABLE": "1", "NUM_NCCL_STREAMS": "2"}
    told |= {"GLOO_TIMEOUT_SECONDS": "60", "LOG_HIDE_TIME": "1"}
    assert found.variables == {f"HOROVOD_{name}": text for name, text in told.items()}
    assert all(" has no effect: " in message for message in found.ignored)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "params:\n  cycle_time: 1\n",
            2,
            "params.cycle_time: unknown key; params has fusion_threshold_mb, cycle_time_ms, cache_capacity",
        ),
        (
            "param:\n  cycle_time_ms: 1\n",
            2,
            "param.cycle_time_ms: unknown key; there are verbose, controller, params, timeline",
        ),
        ("\ntimelines: a\n", 2, "timelines: unknown key; there are verbose"),
        ("bogus:\n", 1, "bogus: unknown key"),
    ],
)
def test_an_unknown_key_is_said_and_passed_over(text: str, line: int, message: str, tmp_path: Path) -> None:
    found = read(tmp_path, f"{text}logging:\n  level: info\n")
    assert found.chosen == {"--log-level": "info"}
    (said,) = found.ignored
    assert said.startswith(f"{tmp_path}/settings.yaml:{line}: {message.partition(': ')[0]} has no effect: unknown key")
    assert message.partition(": ")[2] in said


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "params:\n", "params:\n  cycle_time_ms:\nautotune: ~\nverbose: null\n"]
)
def test_what_has_no_value_sets_nothing(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text) == config_file.ConfigFile()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("params: 5\n", 1, "params: expected a section with fusion_threshold_mb, "),
        ("params:\n  cycle_time_ms: [1]\n", 2, "params.cycle_time_ms: expected a single value, got a list"),
        (
            "params:\n  cycle_time_ms: fast\n",
            2,
            "params.cycle_time_ms: expected a number of milliseconds, 0 or more, got 'fast'",
        ),
        ("params:\n  fusion_threshold_mb: 64M\n", 2, "expected a number of MiB such as 64, 0 or more, got '64M'"),
        ("autotune:\n  enabled: maybe\n", 2, "autotune.enabled: expected true or false, got 'maybe'"),
        ("library_options:\n  num_nccl_streams: many\n", 2, "expected a whole number, 0 or more, got 'many'"),
        ("params:\n  torus_allreduce: 2\n", 2, "expected 1, true, yes or on; or 0, false, no or off, got '2'"),
        ("controller: tcp\n", 1, "controller: expected mpi or gloo, got 'tcp'"),
        ("params:\n  cache_capacity: 1\n  cache_capacity: 2\n", 3, "params.cache_capacity: duplicate key"),
        ("- params\n", 1, "expected sections such as 'params:', got a list"),
        ("just text\n", 1, "expected sections such as 'params:', got 'just text'"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, line: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'settings.yaml'}:{line}: ") and message in str(caught.value)


@pytest.mark.parametrize(("controller", "launcher"), [("gloo", "ssh"), ("MPI", "mpi"), ("", "")])
def test_the_controller_chooses_the_launcher(controller: str, launcher: str, tmp_path: Path) -> None:
    assert read(tmp_path, f"controller: {controller}\n").launcher == launcher


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is not valid YAML: .*line 1"):
        read(tmp_path, "params: {")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot read '/no/such': No such file"):
        config_file.read("/no/such")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgumentError, match=r"cannot read .*binary"):
        config_file.read(str(tmp_path / "binary"))


def test_a_missing_pyyaml_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        read(tmp_path, WHOLE)


def test_yaml_is_imported_only_for_a_file() -> None:
    program = "import sys; from collectives.launch import config_file; sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
