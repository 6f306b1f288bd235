"""Which option of ``collectivesrun``, and which key of a configuration file, sets which setting: one table for both.

Names and meanings are Horovod's where Horovod has them, so that its command lines and files go on working. An option beats the
environment, which beats the file; each ends as the ``COLLECTIVES_...`` variable of its setting, which the ranks read.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from collectives.config import Config, given


@dataclass(frozen=True, slots=True)
class Value:
    """An option that is followed by a value.

    Attributes:
        flags: its spellings; the first is its name in the table.
        setting: what it sets.
        metavar, help: for ``--help``.
        key: ``section.key`` in a configuration file; empty: none.
        template: makes the variable's text of the option's.
        expected: what the text should be, where that is not what the variable's should be.
    """

    flags: tuple[str, ...]
    setting: str
    metavar: str
    help: str
    key: str = ""
    template: str = "{}"
    expected: str = ""

    def text(self, word: str) -> str:
        """The variable's text.

        Raises:
            ValueError: the text cannot be understood; says what is expected.
        """
        metadata = Config.__dataclass_fields__[self.setting].metadata
        parse = metadata["sources"][metadata["variable"]]
        text = self.template.format(word)
        try:
            if not word.strip():
                raise ValueError(word)
            parse(text)
        except (ValueError, IndexError):
            raise ValueError(f"expected {self.expected or parse.__doc__}, got {word!r}") from None
        return text


@dataclass(frozen=True, slots=True)
class Switch:
    """An option without a value: ``--autotune``, and ``--no-autotune`` if it can be switched off.

    Attributes:
        flags: its spelling.
        on: variables' texts by setting; values that are given as well go before these.
        off: variables' texts by setting; these go before values.
        help: for ``--help``.
        key: ``section.key`` in a configuration file.
    """

    flags: tuple[str]
    on: Mapping[str, str]
    off: Mapping[str, str]
    help: str
    key: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option of Horovod's that changes nothing here; that it does not is said, and why."""

    flags: tuple[str, ...]
    why: str
    takes_value: bool = False
    keys: tuple[str, ...] = field(default=())


Chosen = Mapping[str, "str | bool"]
"""What has been chosen, by the option's first spelling: a value's text for its variable, or whether a switch is on."""

VALUES = (
    Value(("--algorithm",), "algorithm", "NAME", "the algorithm for every operation that has it: ring, direct, hierarchical, ..."),
    Value(("--transport",), "transport", "NAME", "how ranks on one host exchange bytes: window, direct-read or mpi"),
    Value(("--timeout",), "timeout", "SECONDS", "how long a call waits for a rank that is alive but does not come (default: 1800)"),
    Value(
        ("--fusion-threshold-mb",),
        "fusion_threshold",
        "N",
        "most MiB of tensors that are reduced together; 0: each by itself (default: 128)",
        key="params.fusion_threshold_mb",
        template="{}M",
        expected="a number of MiB such as 64, 0 or more",
    ),
    Value(
        ("--cycle-time-ms",),
        "cycle_time",
        "X",
        "milliseconds that operations may gather before they are done (default: 1)",
        key="params.cycle_time_ms",
    ),
    Value(("--cache-capacity",), "cache_capacity", "N", "how many operations are remembered (default: 1024)", key="params.cache_capacity"),
    Value(
        ("--timeline-filename", "--timeline"),
        "timeline",
        "FILE",
        "record a timeline; in FILE.html a report to look at, with the trace in FILE.html.json",
        key="timeline.filename",
    ),
    Value(("--autotune-log-file",), "autotune_log", "FILE", "record what autotuning tries", key="autotune.log_file"),
    Value(
        ("--autotune-warmup-samples",),
        "autotune_warmup",
        "N",
        "samples that are discarded at first (default: 3)",
        key="autotune.warmup_samples",
    ),
    Value(
        ("--autotune-steps-per-sample",),
        "autotune_steps",
        "N",
        "steps that make one sample (default: 10)",
        key="autotune.steps_per_sample",
    ),
    Value(
        ("--autotune-bayes-opt-max-samples",),
        "autotune_samples",
        "N",
        "most samples before the best is kept (default: 20)",
        key="autotune.bayes_opt_max_samples",
    ),
    Value(
        ("--autotune-gaussian-process-noise",),
        "autotune_noise",
        "X",
        "the noise assumed in a sample, from 0 to 1 (default: 0.8)",
        key="autotune.gaussian_process_noise",
    ),
    Value(
        ("--stall-check-warning-time-seconds",),
        "stall_warning",
        "SECONDS",
        "when to warn of an operation that some ranks have not submitted; 0: never (default: 60)",
        key="stall_check.warning_time_seconds",
    ),
    Value(
        ("--stall-check-shutdown-time-seconds",),
        "stall_shutdown",
        "SECONDS",
        "when to end the job because of it; 0: never (default: 0)",
        key="stall_check.shutdown_time_seconds",
    ),
    Value(("--log-level",), "log_level", "LEVEL", "trace, debug, info, warning, error or fatal (default: warning)", key="logging.level"),
)

SWITCHES = (
    Switch(
        ("--hierarchical-allreduce",),
        on={"algorithm": "hierarchical"},
        off={},
        help="the same as --algorithm hierarchical; --algorithm goes before it",
        key="params.hierarchical_allreduce",
    ),
    Switch(("--autotune",), {"autotune": "1"}, {"autotune": "0"}, "tune the settings while the program runs", "autotune.enabled"),
    Switch(
        ("--timeline-mark-cycles",),
        on={"timeline_mark_cycles": "1"},
        off={"timeline_mark_cycles": "0"},
        help="show in the timeline when each cycle begins",
        key="timeline.mark_cycles",
    ),
    Switch(
        ("--stall-check",),
        on={"stall_warning": str(Config().stall_warning)},
        off={"stall_warning": "0", "stall_shutdown": "0"},
        help="whether to watch for operations that some ranks have not submitted (default: yes)",
        key="stall_check.enabled",
    ),
)

_BY_MPI = "the ranks are started and connected by MPI; see --mpi-args"
_BY_SSH = "mpirun makes the connections; set it in ~/.ssh/config, or for mpirun by --mpi-args"
_BY_LOGGING = "messages are logged by Python's logging"
IGNORED = (
    Ignored(
        ("--no-hierarchical-allreduce", "--torus-allreduce", "--no-torus-allreduce"),
        "what is hierarchical is chosen by size and hosts; --algorithm chooses another",
    ),
    Ignored(
        ("--hierarchical-allgather", "--no-hierarchical-allgather"),
        "an allgather has one algorithm for ranks on several hosts",
        keys=("params.hierarchical_allgather",),
    ),
    Ignored(("--gloo", "--jsrun", "--tcp"), _BY_MPI),
    Ignored(("--network-interface", "--network-interfaces"), _BY_MPI, takes_value=True),
    Ignored(("-p", "--ssh-port", "-i", "--ssh-identity-file"), _BY_SSH, takes_value=True),
    Ignored(("--start-timeout",), "mpirun decides how long starting may take; --timeout bounds init()", takes_value=True),
    Ignored(("--disable-cache",), "nothing is remembered between jobs"),
    Ignored(
        ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        "MPI is started with the threads that are needed",
        keys=("library_options.mpi_threads_disable",),
    ),
    Ignored(("--num-nccl-streams",), "NCCL has one stream", takes_value=True, keys=("library_options.num_nccl_streams",)),
    Ignored(
        ("--thread-affinity", "--ccl-bgt-affinity", "--mlsl-bgt-affinity"),
        "threads stay where the system puts them",
        takes_value=True,
        keys=("library_options.thread_affinity", "library_options.ccl_bgt_affinity", "library_options.mlsl_bgt_affinity"),
    ),
    Ignored(
        ("--gloo-timeout-seconds",), "gloo is not used; see --timeout", takes_value=True, keys=("library_options.gloo_timeout_seconds",)
    ),
    Ignored(
        ("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"),
        _BY_LOGGING,
        keys=("logging.hide_timestamp", "logging.with_timestamp"),
    ),
    Ignored(("-prefix-timestamp", "--prefix-output-with-timestamp"), "lines are tagged with their rank; --no-tag leaves them as they are"),
)


class _Ignore(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        row = next(row for row in IGNORED if option_string in row.flags)
        namespace.ignored = [*namespace.ignored, f"{option_string} has no effect: {row.why}"]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Give the parser all options of the table."""
    group = parser.add_argument_group("settings, for all ranks")
    for value in VALUES:
        group.add_argument(*value.flags, dest=value.flags[0], metavar=value.metavar, help=value.help, type=_Text(value))
    for switch in SWITCHES:
        if switch.off:
            group.add_argument(*switch.flags, dest=switch.flags[0], help=switch.help, action=argparse.BooleanOptionalAction)
        else:
            group.add_argument(*switch.flags, dest=switch.flags[0], help=switch.help, action="store_const", const=True)
    parser.set_defaults(ignored=[])
    for row in IGNORED:
        for flag in row.flags:
            nargs = None if row.takes_value else 0
            parser.add_argument(flag, dest="ignored", action=_Ignore, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _Text:
    """A value's text as argparse wants it: argparse shows an ``ArgumentTypeError`` as it is."""

    def __init__(self, value: Value) -> None:
        self._value = value

    def __call__(self, text: str) -> str:
        try:
            return self._value.text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def chosen(options: argparse.Namespace) -> dict[str, str | bool]:
    """What the parsed options choose."""
    names = [row.flags[0] for row in (*VALUES, *SWITCHES)]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def merge(environment: Mapping[str, str], flags: Chosen, file: Chosen) -> dict[str, str]:
    """The environment for the ranks.

    Args:
        environment: as it is.
        flags: what the options choose; goes before the environment.
        file: what the configuration file chooses; goes after it.

    Raises:
        InvalidArgumentError: a variable in the environment cannot be understood.
    """
    merged = {**environment, **{_variable(setting): text for setting, text in _settings(flags).items()}}
    known = given(merged)
    return {**merged, **{_variable(setting): text for setting, text in _settings(file).items() if setting not in known}}


def _settings(chosen: Chosen) -> dict[str, str]:
    """The variables' texts by setting. A switch that is off goes before values, one that is on after them."""
    off: dict[str, str] = {}
    on: dict[str, str] = {}
    for switch in SWITCHES:
        state = chosen.get(switch.flags[0])
        if state is not None:
            (on if state else off).update(switch.on if state else switch.off)
    values = {value.setting: str(chosen[value.flags[0]]) for value in VALUES if value.flags[0] in chosen}
    return {**on, **values, **off}


def _variable(setting: str) -> str:
    return str(Config.__dataclass_fields__[setting].metadata["variable"])
