"""The table of options: each sets its variable, and what is given in several places is settled in a known order."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError
from collectives.launch import command_line, options, rank_environment


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    command_line.add_to(parser)
    return parser.parse_args(arguments)


def merged(
    *flags: str, environment: dict[str, str] | None = None, file: dict[str, str | bool] | None = None
) -> dict[str, str]:
    return rank_environment.merge(environment or {}, command_line.chosen(parse(*flags)), file or {})


def merged_as_horovod(
    *flags: str, environment: dict[str, str] | None = None, file: dict[str, str | bool] | None = None
) -> dict[str, str]:
    parsed = parse(*flags)
    return rank_environment.merge_as_horovod(
        environment or {}, command_line.chosen(parsed), file or {}, parsed.variables
    )


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        (["--algorithm", "ring"], "algorithm", "ring"),
        (["--hierarchical-allreduce"], "algorithm", "hierarchical"),
        (["--transport", "mpi"], "transport", "mpi"),
        (["--timeout", "20"], "timeout", 20),
        (["--fusion-threshold-mb", "32"], "fusion_threshold", 32 << 20),
        (["--fusion-threshold-mb", "0.5"], "fusion_threshold", 1 << 19),
        (["--cycle-time-ms", "3.5"], "cycle_time", 3.5),
        (["--timeline-filename", "a.json"], "timeline", "a.json"),
        (["--timeline", "a.json"], "timeline", "a.json"),
        (["--timeline-mark-cycles"], "timeline_mark_cycles", True),
        (["--autotune"], "autotune", True),
        (["--autotune-log-file", "a.csv"], "autotune_log", "a.csv"),
        (["--autotune-warmup-samples", "1"], "autotune_warmup", 1),
        (["--autotune-steps-per-sample", "2"], "autotune_steps", 2),
        (["--autotune-bayes-opt-max-samples", "4"], "autotune_samples", 4),
        (["--autotune-gaussian-process-noise", "0.5"], "autotune_noise", 0.5),
        (["--no-stall-check"], "stall_warning", 0),
        (["--stall-check-warning-time-seconds", "30"], "stall_warning", 30),
        (["--stall-check-shutdown-time-seconds", "90"], "stall_shutdown", 90),
        (["--network-interface", "eth0"], "network_interface", "eth0"),
        (["--log-level", "DEBUG"], "log_level", "debug"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_sets_its_setting_and_no_other(arguments: list[str], setting: str, value: object) -> None:
    variables = merged(*arguments)
    assert all(name.startswith("COLLECTIVES_") for name in variables)
    config = Config.from_environment(variables)
    assert {name for name in Config.__dataclass_fields__ if getattr(config, name) != getattr(Config(), name)} == {
        setting
    }
    assert getattr(config, setting) == value


def test_without_options_nothing_is_set() -> None:
    assert merged() == {}


def test_options_and_keys_are_there_once_and_set_what_exists() -> None:
    rows = [*options.VALUES, *options.SWITCHES]
    keys = [row.key for row in rows if row.key] + [key for row in options.IGNORED for key in row.keys]
    flags = [flag for row in (*rows, *options.IGNORED) for flag in row.flags]
    assert len(set(keys)) == len(keys) and len(set(flags)) == len(flags)
    assert {row.setting for row in options.VALUES} <= set(Config.__dataclass_fields__)


@pytest.mark.parametrize("merge", [merged, merged_as_horovod])
def test_the_file_beats_the_environment_and_an_option_the_file(merge: Callable[..., dict[str, str]]) -> None:
    file: dict[str, str | bool] = {"--fusion-threshold-mb": "1M", "--cycle-time-ms": "9", "--autotune": True}
    for name in ("COLLECTIVES_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD"):
        environment = {name: "7", "COLLECTIVES_CYCLE_TIME": "", "HOROVOD_CACHE_CAPACITY": "5"}
        config = Config.from_environment(merge("--cycle-time-ms", "3", environment=environment, file=file))
        assert (config.fusion_threshold, config.cycle_time, config.autotune, config.cache_capacity) == (
            1 << 20,
            3,
            True,
            5,
        )


def test_an_option_can_switch_off_what_is_on_elsewhere() -> None:
    assert not Config.from_environment(merged("--no-autotune", environment={"HOROVOD_AUTOTUNE": "1"})).autotune
    assert not Config.from_environment(
        merged("--no-timeline-mark-cycles", file={"--timeline-mark-cycles": True})
    ).timeline_mark_cycles


def test_a_stall_check_that_is_off_is_off_whatever_times_are_given_with_it() -> None:
    config = Config.from_environment(merged("--stall-check-warning-time-seconds", "5", "--no-stall-check"))
    assert (config.stall_warning, config.stall_shutdown) == (0, 0)
    file: dict[str, str | bool] = {"--stall-check": False, "--stall-check-warning-time-seconds": "5"}
    assert Config.from_environment(merged(file=file)).stall_warning == 0
    assert (
        Config.from_environment(
            merged("--no-stall-check", environment={"COLLECTIVES_STALL_SHUTDOWN": "9"})
        ).stall_shutdown
        == 0
    )


def test_a_stall_check_can_be_switched_on_again() -> None:
    for name, text in (("HOROVOD_STALL_CHECK_DISABLE", "1"), ("COLLECTIVES_STALL_WARNING", "0")):
        assert Config.from_environment(merged("--stall-check", environment={name: text})).stall_warning == 60
    assert Config.from_environment(merged("--stall-check", file={"--stall-check": False})).stall_warning == 60
    assert (
        Config.from_environment(merged("--stall-check", "--stall-check-warning-time-seconds", "5")).stall_warning == 5
    )


def test_algorithm_goes_before_hierarchical_allreduce() -> None:
    assert merged("--algorithm", "ring", "--hierarchical-allreduce") == {"COLLECTIVES_ALGORITHM": "ring"}


def test_a_variable_that_an_option_replaces_need_not_make_sense() -> None:
    assert merged("--timeout", "5", environment={"COLLECTIVES_TIMEOUT": "soon"}) == {"COLLECTIVES_TIMEOUT": "5"}
    with pytest.raises(InvalidArgumentError, match="COLLECTIVES_TIMEOUT='soon'"):
        Config.from_environment(merged(environment={"COLLECTIVES_TIMEOUT": "soon"}))


@pytest.mark.parametrize(
    ("row", "flag"), [(row, flag) for row in options.IGNORED for flag in row.flags], ids=lambda value: str(value)[:20]
)
def test_what_has_no_effect_says_why(row: options.Ignored, flag: str) -> None:
    parsed = parse(flag, "7") if row.parse else parse(flag)
    assert parsed.ignored == [f"{flag} has no effect: {row.why} [L31]"]
    assert command_line.chosen(parsed) == {} and list(parsed.variables) == ([row.variable] if row.variable else [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--fusion-threshold-mb 10 --cycle-time-ms 20", {"FUSION_THRESHOLD": str(10 << 20), "CYCLE_TIME": "20"}),
        ("--cache-capacity 512 --log-level INFO", {"CACHE_CAPACITY": "512", "LOG_LEVEL": "INFO"}),
        ("--hierarchical-allgather --torus-allreduce", {"HIERARCHICAL_ALLGATHER": "1", "TORUS_ALLREDUCE": "1"}),
        ("--no-hierarchical-allgather --no-torus-allreduce", {"HIERARCHICAL_ALLGATHER": "0", "TORUS_ALLREDUCE": "0"}),
        ("--no-hierarchical-allreduce", {"HIERARCHICAL_ALLREDUCE": "0"}),
        ("--autotune --autotune-log-file a.txt", {"AUTOTUNE": "1", "AUTOTUNE_LOG": "a.txt"}),
        (
            "--autotune-warmup-samples 1 --autotune-steps-per-sample 5",
            {"AUTOTUNE_WARMUP_SAMPLES": "1", "AUTOTUNE_STEPS_PER_SAMPLE": "5"},
        ),
        ("--autotune-bayes-opt-max-samples 10", {"AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "10"}),
        ("--autotune-gaussian-process-noise 0.2", {"AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.2"}),
        ("--timeline-filename a.json --timeline-mark-cycles", {"TIMELINE": "a.json", "TIMELINE_MARK_CYCLES": "1"}),
        (
            "--stall-check-warning-time-seconds 10 --stall-check-shutdown-time-seconds 20",
            {"STALL_CHECK_TIME_SECONDS": "10", "STALL_SHUTDOWN_TIME_SECONDS": "20"},
        ),
        (
            "--no-stall-check",
            {"STALL_CHECK_DISABLE": "1", "STALL_CHECK_TIME_SECONDS": "0", "STALL_SHUTDOWN_TIME_SECONDS": "0"},
        ),
        ("--mpi-threads-disable --num-nccl-streams 2", {"MPI_THREADS_DISABLE": "1", "NUM_NCCL_STREAMS": "2"}),
        ("--thread-affinity 1 --gloo-timeout-seconds 60", {"THREAD_AFFINITY": "1", "GLOO_TIMEOUT_SECONDS": "60"}),
        ("--log-hide-timestamp", {"LOG_HIDE_TIME": "1"}),
        ("--log-with-timestamp", {"LOG_HIDE_TIME": "0"}),
        ("--jsrun --disable-cache", {}),
    ],
)
def test_programs_of_horovods_see_the_variables_of_horovodrun(arguments: str, told: dict[str, str]) -> None:
    assert merged_as_horovod(*arguments.split()) == {f"HOROVOD_{name}": text for name, text in told.items()}


def test_what_horovod_does_not_have_keeps_its_own_variable() -> None:
    variables = merged_as_horovod("--timeout", "5", "--hierarchical-allreduce", "--tcp")
    assert variables == {
        "COLLECTIVES_TIMEOUT": "5",
        "COLLECTIVES_ALGORITHM": "hierarchical",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "NCCL_IB_DISABLE": "1",
    }


def test_a_program_may_change_horovods_variable_before_init() -> None:
    environment = {"COLLECTIVES_FUSION_THRESHOLD": "3", "COLLECTIVES_SEGMENT": "4"}
    variables = merged_as_horovod("--fusion-threshold-mb", "1", environment=environment)
    assert variables == {"HOROVOD_FUSION_THRESHOLD": str(1 << 20), "COLLECTIVES_SEGMENT": "4"}


def test_a_stall_check_is_on_or_off_for_programs_of_horovods_too() -> None:
    on = merged_as_horovod("--stall-check", environment={"HOROVOD_STALL_CHECK_DISABLE": "1"})
    off = merged_as_horovod("--no-stall-check", environment={"COLLECTIVES_STALL_WARNING": "9"})
    assert (Config.from_environment(on).stall_warning, Config.from_environment(off).stall_warning) == (60, 0)


@pytest.mark.parametrize(
    "flags",
    [
        ["--gloo", "--mpi"],
        ["--launcher", "--mpi"],
        ["--autotune", "--cache-capacity", "--no-autotune"],
        ["--log-hide-timestamp", "--log-with-timestamp"],
    ],
)
def test_options_that_contradict_each_other_are_refused(flags: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{flags[0]} and {flags[-1]} contradict each other"):
        command_line.check_together(flags)
    command_line.check_together([flags[0], flags[0], "--no-stall-check"])
