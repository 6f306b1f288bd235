"""The environment: read once, frozen, and never ignored in silence."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

import collectives
from collectives.base.config import (
    Config,
    parse_bytes,
    stated_settings,
    unknown,
)
from collectives.base.errors import InvalidArgumentError


def test_an_empty_variable_counts_as_unset() -> None:
    assert Config.from_environment({"COLLECTIVES_TIMEOUT": "", "COLLECTIVES_ALGORITHM": ""}) == Config()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_TIMEOUT", "12.5")
    assert Config.from_environment().timeout == 12.5


def test_every_setting_has_its_own_variable() -> None:
    variables = [field.metadata["variable"] for field in dataclasses.fields(Config)]
    assert len(set(variables)) == len(variables)
    assert all(variable.startswith("COLLECTIVES_") for variable in variables)
    # Our variable comes first, then only Horovod's.
    sources = [list(field.metadata["sources"]) for field in dataclasses.fields(Config)]
    assert [names[0] for names in sources] == variables
    assert all(name.startswith("HOROVOD_") for names in sources for name in names[1:])


def test_what_only_a_rank_itself_goes_by_may_differ_between_ranks() -> None:
    differ = {field.name for field in dataclasses.fields(Config) if not field.metadata["alike"]}
    assert differ == {
        "timeout", "rendezvous", "network_interface", "allow_single", "result_pool", "arena", "cycle_time",
        "stall_warning", "stall_shutdown",
        "timeline", "timeline_mark_cycles", "autotune_log", "autotune_samples", "autotune_noise", "device", "log_level",
    }  # fmt: skip


def test_what_only_rank_0_goes_by_holds_for_all() -> None:
    first = Config(timeline="0.json", timeline_mark_cycles=True, log_level="info", autotune_log="0.csv")
    mine = Config(timeline="1.json", log_level="debug", timeout=7.0)
    assert mine.with_those_of(first) == dataclasses.replace(mine, timeline="0.json", timeline_mark_cycles=True)
    assert first.with_those_of(mine).timeline == "1.json"


@pytest.mark.parametrize(
    ("variable", "text", "attribute", "value"),
    [
        ("COLLECTIVES_ALGORITHM", "ring", "algorithm", "ring"),
        ("COLLECTIVES_TRANSPORT", "mpi", "transport", "mpi"),
        ("COLLECTIVES_SEGMENT", "512K", "segment", 512 << 10),
        ("COLLECTIVES_RESULT_POOL", "1GiB", "result_pool", 1 << 30),
        ("COLLECTIVES_ARENA", "4G", "arena", 4 << 30),
        ("COLLECTIVES_LOCAL_SIZE", "2", "local_size", 2),
        ("COLLECTIVES_TIMEOUT", "0.5", "timeout", 0.5),
        ("COLLECTIVES_FUSION_THRESHOLD", "64M", "fusion_threshold", 64 << 20),
        ("HOROVOD_FUSION_THRESHOLD", "33554432", "fusion_threshold", 32 << 20),
        ("COLLECTIVES_CYCLE_TIME", "0", "cycle_time", 0.0),
        ("HOROVOD_CYCLE_TIME", "3.5", "cycle_time", 3.5),
        ("COLLECTIVES_CACHE_CAPACITY", "0", "cache_capacity", 0),
        ("HOROVOD_CACHE_CAPACITY", "7", "cache_capacity", 7),
        ("COLLECTIVES_STALL_WARNING", "2.5", "stall_warning", 2.5),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "30", "stall_warning", 30.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_warning", 0.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "0", "stall_warning", 60.0),
        ("COLLECTIVES_STALL_SHUTDOWN", "90", "stall_shutdown", 90.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "120", "stall_shutdown", 120.0),
        ("COLLECTIVES_GRADIENTS", "horovod", "gradients", "horovod"),
        ("COLLECTIVES_TIMELINE", "DYNAMIC", "timeline", "DYNAMIC"),
        ("HOROVOD_TIMELINE", "/tmp/a b.json", "timeline", "/tmp/a b.json"),
        ("HOROVOD_TIMELINE", "DYNAMIC", "timeline", ""),
        ("COLLECTIVES_TIMELINE_MARK_CYCLES", "yes", "timeline_mark_cycles", True),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "1", "timeline_mark_cycles", True),
        ("COLLECTIVES_AUTOTUNE", "on", "autotune", True),
        ("HOROVOD_AUTOTUNE", "True", "autotune", True),
        ("HOROVOD_AUTOTUNE", "0", "autotune", False),
        ("COLLECTIVES_AUTOTUNE", " Off ", "autotune", False),
        ("COLLECTIVES_AUTOTUNE_LOG", "log.csv", "autotune_log", "log.csv"),
        ("HOROVOD_AUTOTUNE_LOG", "log.csv", "autotune_log", "log.csv"),
        ("COLLECTIVES_AUTOTUNE_WARMUP", "0", "autotune_warmup", 0),
        ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "5", "autotune_warmup", 5),
        ("COLLECTIVES_AUTOTUNE_STEPS", "1", "autotune_steps", 1),
        ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "5", "autotune_steps", 5),
        ("COLLECTIVES_AUTOTUNE_SAMPLES", "1", "autotune_samples", 1),
        ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "5", "autotune_samples", 5),
        ("COLLECTIVES_AUTOTUNE_NOISE", "0", "autotune_noise", 0.0),
        ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "1", "autotune_noise", 1.0),
        ("COLLECTIVES_LOG_LEVEL", "debug", "log_level", "debug"),
        ("HOROVOD_LOG_LEVEL", "TRACE", "log_level", "trace"),
    ],
)
def test_settings_are_read(variable: str, text: str, attribute: str, value: object) -> None:
    assert getattr(Config.from_environment({variable: text}), attribute) == value


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("COLLECTIVES_ALGORITHM", "Ring", "one of auto, ring"),
        ("COLLECTIVES_TRANSPORT", "udp", "one of auto, window"),
        ("COLLECTIVES_GRADIENTS", "right", "one of exact, horovod"),
        ("COLLECTIVES_SEGMENT", "1.5", "number of bytes"),
        ("COLLECTIVES_SEGMENT", "inf", "number of bytes"),
        ("COLLECTIVES_RESULT_POOL", "nan", "number of bytes"),
        ("COLLECTIVES_TIMEOUT", "0", "positive number of seconds"),
        ("COLLECTIVES_TIMEOUT", "nan", "positive number of seconds"),
        ("COLLECTIVES_LOCAL_SIZE", "-1", "whole number"),
        ("HOROVOD_FUSION_THRESHOLD", "-1", "number of bytes"),
        ("COLLECTIVES_CYCLE_TIME", "nan", "number of milliseconds, 0 or more"),
        ("HOROVOD_CACHE_CAPACITY", "-1", "whole number, 0 or more"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "nan", "number of seconds, 0 or more"),
        ("HOROVOD_STALL_CHECK_DISABLE", "2", "1, true, yes or on"),
        ("HOROVOD_AUTOTUNE", "maybe", "1, true, yes or on"),
        ("COLLECTIVES_AUTOTUNE_WARMUP", "-1", "whole number, 0 or more"),
        ("COLLECTIVES_AUTOTUNE_STEPS", "0", "whole number, 1 or more"),
        ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "0", "whole number, 1 or more"),
        ("COLLECTIVES_AUTOTUNE_NOISE", "nan", "number from 0 to 1"),
        ("HOROVOD_LOG_LEVEL", "loud", "one of trace, debug"),
    ],
)
def test_what_cannot_be_understood_is_an_error_that_names_variable_text_and_expectation(
    variable: str, text: str, expected: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Config.from_environment({variable: text})
    message = str(caught.value)
    assert variable in message and repr(text) in message and expected in message


@drawn(
    count=st.integers(0, 1 << 50),
    unit=st.sampled_from(["", "b", "k", "K", "kb", "KiB", "m", "MiB", "G", "gib", "MB"]),
    space=st.sampled_from(["", " "]),
)
def test_sizes_are_powers_of_two(count: int, unit: str, space: str) -> None:
    scale = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}[unit[:1].lower()]
    assert parse_bytes(f"{space}{count}{unit}{space}") == count * scale


def test_halves_of_a_unit_are_whole_bytes() -> None:
    assert parse_bytes("0.5K") == 512
    assert parse_bytes("1.5MiB") == 3 << 19


def test_our_variable_wins_over_horovods() -> None:
    both = {"HOROVOD_FUSION_THRESHOLD": "1", "COLLECTIVES_FUSION_THRESHOLD": "2"}
    assert Config.from_environment(both).fusion_threshold == 2
    assert Config.from_environment({**both, "COLLECTIVES_FUSION_THRESHOLD": ""}).fusion_threshold == 1
    assert (
        Config.from_environment({"HOROVOD_STALL_CHECK_DISABLE": "1", "COLLECTIVES_STALL_WARNING": "5"}).stall_warning
        == 5
    )


def test_a_variable_that_loses_is_not_read() -> None:
    assert Config.from_environment({"HOROVOD_CYCLE_TIME": "bogus", "COLLECTIVES_CYCLE_TIME": "2"}).cycle_time == 2


def test_horovods_switch_turns_the_whole_stall_check_off() -> None:
    times = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "30", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40"}
    config = Config.from_environment({"HOROVOD_STALL_CHECK_DISABLE": "1", **times})
    assert (config.stall_warning, config.stall_shutdown) == (0, 0)
    config = Config.from_environment({"HOROVOD_STALL_CHECK_DISABLE": "0", **times})
    assert (config.stall_warning, config.stall_shutdown) == (30, 40)


def test_what_is_given_is_told_from_the_defaults() -> None:
    assert stated_settings(
        {"HOROVOD_CYCLE_TIME": "1", "COLLECTIVES_SEGMENT": "", "HOROVOD_TIMELINE": "DYNAMIC", "PATH": "/bin"}
    ) == {"cycle_time": 1.0}


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (
            "COLLECTIVES_FUSION_TRESHOLD",
            "COLLECTIVES_FUSION_TRESHOLD is not a setting of collectives; did you mean COLLECTIVES_FUSION_THRESHOLD? "
            "[A67]",
        ),
        ("COLLECTIVES_QUX", "COLLECTIVES_QUX is not a setting of collectives [A67]"),
    ],
)
def test_a_misspelt_variable_is_told_with_what_was_meant(variable: str, said: str) -> None:
    assert unknown({variable: "1"}) == [said]


def test_every_variable_that_is_used_here_is_known() -> None:
    """What one of our programs sets for another must not be taken for a user's mistake."""
    root = Path(collectives.__file__).parents[1]
    sources = [path.read_text() for folder in ("collectives", "benchmarks") for path in (root / folder).rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"[\"'](COLLECTIVES_[A-Z_]+)[\"']", text)}
    assert len(used) > 20 and unknown(dict.fromkeys(used, "1")) == []


def test_other_variables_are_nobodys_mistake() -> None:
    settings = {field.metadata["variable"]: "1" for field in dataclasses.fields(Config)}
    others = dict.fromkeys(
        ["COLLECTIVES_RECORDS", "COLLECTIVES_TEST_TOKEN", "HOROVOD_FUSION_TRESHOLD", "_COLLECTIVES_PLACE_TAKEN"], "1"
    )
    assert unknown(settings | others) == []
