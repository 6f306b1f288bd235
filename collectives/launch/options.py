"""The table of settings that options of ``collectivesrun`` and keys of a configuration file set.

Names and meanings are Horovod's where Horovod has them, so that its command lines and files keep working.
`command_line` parses the options, `config_file` the file, and `rank_environment` makes the ranks' variables of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from collectives.base.config import Config, count, parse_bool, parser
from collectives.base.errors import InvalidArgumentError


def parsed(parse: Callable[[str], Any], text: str, expected: str | None = None) -> Any:
    """Parse a text; a ValueError says what is ``expected``, by default the parser's docstring, or what is wrong."""
    try:
        return parse(text)
    except InvalidArgumentError:
        raise
    except (ValueError, LookupError):
        raise ValueError(f"expected {expected or parse.__doc__}, got {text!r}") from None


@dataclass(frozen=True, slots=True)
class Value:
    """An option with a value.

    Attributes:
        flags: its spellings; the first is its name in the table.
        setting: the field of `Config` that it sets.
        key: ``section.key`` in a configuration file; empty: none.
        template: converts the option's text to the variable's.
        expected: describes a valid text, if it differs from that of the variable.
    """

    flags: tuple[str, ...]
    setting: str
    metavar: str
    help: str
    key: str = ""
    template: str = "{}"
    expected: str = ""

    def text(self, word: str) -> str:
        """Return the variable's text for the option's; raises as `parsed`."""
        metadata = Config.__dataclass_fields__[self.setting].metadata
        parse = metadata["sources"][metadata["variable"]]
        text = self.template.format(word)
        parsed(lambda word: parse(text) if word.strip() else nonempty(word), word, self.expected or parse.__doc__)
        return text


@dataclass(frozen=True, slots=True)
class Switch:
    """An option without a value: ``--autotune``, and ``--no-autotune`` if it can be switched off.

    Attributes:
        on: variables' texts by setting when on; options with values take precedence over these.
        off: variables' texts by setting when off; these take precedence over options with values.
        key: ``section.key`` in a configuration file.
        tells: the variable that ``horovodrun`` sets, and its texts for on and off; empty: that of the setting.
    """

    flags: tuple[str]
    on: Mapping[str, str]
    off: Mapping[str, str]
    help: str
    key: str
    tells: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option of Horovod's that has no effect here; using it prints a message with the reason.

    Attributes:
        flags: its spellings; ``--no-...`` is the negation.
        parse: parses its value; its docstring describes valid values. None: it has no value.
        keys: ``section.key`` in a configuration file.
        variable: the one that ``horovodrun`` sets; empty: none.
        on, off: the variable's texts, for an option without a value.
    """

    flags: tuple[str, ...]
    why: str
    parse: Callable[[str], Any] | None = None
    keys: tuple[str, ...] = ()
    variable: str = ""
    on: str = "1"
    off: str = "0"

    def variables(self, name: str, text: str | None) -> dict[str, str]:
        """Return the variables that ``horovodrun`` would set for a spelling or key; raises as `parsed`."""
        on = not name.startswith("--no-") if text is None else parsed(self.parse or parse_bool, text)
        if not self.variable:
            return {}
        return {self.variable: str(on) if self.parse else (self.on if on else self.off)}


nonempty = parser(str, "some text", lambda text: bool(text.strip()))

VALUES = (
    Value(
        ("--algorithm",),
        "algorithm",
        "NAME",
        "the algorithm of every collective that has it: ring, direct, hierarchical, ..., or FILE.py:NAME",
    ),
    Value(
        ("--transport",), "transport", "NAME", "how ranks on one host exchange bytes: window, direct-read, mpi or tcp"
    ),
    Value(
        ("--timeout",),
        "timeout",
        "SECONDS",
        "how long a call waits for a rank that is alive but does not make the call (default: 1800)",
    ),
    Value(
        ("--fusion-threshold-mb",),
        "fusion_threshold",
        "N",
        "largest size in MiB of tensors that are reduced together; 0: reduce each tensor by itself (default: 128)",
        key="params.fusion_threshold_mb",
        template="{}M",
        expected="a number of MiB such as 64, 0 or more",
    ),
    Value(
        ("--cycle-time-ms",),
        "cycle_time",
        "X",
        "milliseconds for which operations are collected before they start (default: 1)",
        key="params.cycle_time_ms",
    ),
    Value(
        ("--cache-capacity",),
        "cache_capacity",
        "N",
        "how many operations the cache holds (default: 1024)",
        key="params.cache_capacity",
    ),
    Value(
        ("--timeline-filename", "--timeline"),
        "timeline",
        "FILE",
        "record a timeline; for FILE.html, write a report, and the trace to FILE.html.json",
        key="timeline.filename",
    ),
    Value(
        ("--autotune-log-file",),
        "autotune_log",
        "FILE",
        "record the settings that autotuning tries",
        key="autotune.log_file",
    ),
    Value(
        ("--autotune-warmup-samples",),
        "autotune_warmup",
        "N",
        "first samples to discard (default: 3)",
        key="autotune.warmup_samples",
    ),
    Value(
        ("--autotune-steps-per-sample",),
        "autotune_steps",
        "N",
        "steps in a sample (default: 10)",
        key="autotune.steps_per_sample",
    ),
    Value(
        ("--autotune-bayes-opt-max-samples",),
        "autotune_samples",
        "N",
        "samples after which the best settings are kept (default: 20)",
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
        "when to end the job because of such an operation; 0: never (default: 0)",
        key="stall_check.shutdown_time_seconds",
    ),
    Value(
        ("--network-interface", "--network-interfaces"),
        "network_interface",
        "NAME",
        "the network interface for TCP between ranks: its name, address or network, such as 10.0.0.0/8",
    ),
    Value(
        ("--log-level",),
        "log_level",
        "LEVEL",
        "trace, debug, info, warning, error or fatal (default: warning)",
        key="logging.level",
    ),
)

SWITCHES = (
    Switch(
        ("--hierarchical-allreduce",),
        on={"algorithm": "hierarchical"},
        off={},
        help="same as --algorithm hierarchical; --algorithm takes precedence",
        key="params.hierarchical_allreduce",
        tells=("HOROVOD_HIERARCHICAL_ALLREDUCE", "1", "0"),
    ),
    Switch(
        ("--autotune",),
        {"autotune": "1"},
        {"autotune": "0"},
        "tune the settings while the program runs",
        "autotune.enabled",
    ),
    Switch(
        ("--timeline-mark-cycles",),
        on={"timeline_mark_cycles": "1"},
        off={"timeline_mark_cycles": "0"},
        help="mark the beginning of each cycle in the timeline",
        key="timeline.mark_cycles",
    ),
    Switch(
        ("--stall-check",),
        on={"stall_warning": str(Config().stall_warning)},
        off={"stall_warning": "0", "stall_shutdown": "0"},
        help="warn of operations that some ranks have not submitted (default: yes)",
        key="stall_check.enabled",
        tells=("HOROVOD_STALL_CHECK_DISABLE", "0", "1"),
    ),
)

_BY_LOGGING = "messages are logged by Python's logging"
_BY_SYSTEM = "threads stay where the system puts them"
_BY_SIZE = "what is hierarchical is chosen by size and hosts; --algorithm chooses another"
IGNORED = (
    Ignored(("--no-hierarchical-allreduce",), _BY_SIZE, variable="HOROVOD_HIERARCHICAL_ALLREDUCE"),
    Ignored(
        ("--torus-allreduce", "--no-torus-allreduce"),
        _BY_SIZE,
        keys=("params.torus_allreduce",),
        variable="HOROVOD_TORUS_ALLREDUCE",
    ),
    Ignored(
        ("--hierarchical-allgather", "--no-hierarchical-allgather"),
        "an allgather has one algorithm for ranks on several hosts",
        keys=("params.hierarchical_allgather",),
        variable="HOROVOD_HIERARCHICAL_ALLGATHER",
    ),
    Ignored(("--jsrun",), "the ranks are started by mpirun or by ssh; see --launcher"),
    Ignored(("--tcp",), "for MPI, see --mpi-args; NCCL is told not to use InfiniBand", variable="NCCL_IB_DISABLE"),
    Ignored(("--disable-cache",), "nothing is remembered between jobs"),
    Ignored(
        ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        "MPI is started with the threads that are needed",
        keys=("library_options.mpi_threads_disable",),
        variable="HOROVOD_MPI_THREADS_DISABLE",
    ),
    Ignored(
        ("--num-nccl-streams",),
        "NCCL has one stream",
        count,
        keys=("library_options.num_nccl_streams",),
        variable="HOROVOD_NUM_NCCL_STREAMS",
    ),
    Ignored(
        ("--thread-affinity",),
        _BY_SYSTEM,
        count,
        keys=("library_options.thread_affinity",),
        variable="HOROVOD_THREAD_AFFINITY",
    ),
    Ignored(
        ("--ccl-bgt-affinity", "--mlsl-bgt-affinity"),
        _BY_SYSTEM,
        count,
        keys=("library_options.ccl_bgt_affinity", "library_options.mlsl_bgt_affinity"),
    ),
    Ignored(
        ("--gloo-timeout-seconds",),
        "gloo is not used; see --timeout",
        count,
        keys=("library_options.gloo_timeout_seconds",),
        variable="HOROVOD_GLOO_TIMEOUT_SECONDS",
    ),
    Ignored(
        ("--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"),
        _BY_LOGGING,
        keys=("logging.hide_timestamp",),
        variable="HOROVOD_LOG_HIDE_TIME",
    ),
    Ignored(
        ("--log-with-timestamp",),
        _BY_LOGGING,
        keys=("logging.with_timestamp",),
        variable="HOROVOD_LOG_HIDE_TIME",
        on="0",
        off="1",
    ),
    Ignored(
        ("-prefix-timestamp", "--prefix-output-with-timestamp"),
        "lines are tagged with their rank; --no-tag leaves them as they are",
    ),
)
