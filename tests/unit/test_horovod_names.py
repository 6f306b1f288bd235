"""``import horovod`` without Horovod: each way to it, what is found there, and that Horovod itself always goes
first."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import collectives.horovod
from collectives import launch
from collectives.base import errors
from collectives.horovod.unavailable import INSTEAD
from collectives.launch import cli, job
from collectives.launch.mpirun import Launcher, Vendor
from tests.support.launching.mpirun import ROOT

FOLDER = collectives.horovod.FOLDER
COMPAT = ROOT / "compat"
WAYS = {
    "import": ("import collectives.horovod\n", ()),
    "path": ("", (FOLDER,)),
    "compat": ("", (COMPAT,)),
    "both": ("", (FOLDER, COMPAT)),
}
"""By way: what a program does before it imports ``horovod``, and what is on its PYTHONPATH."""
DOCS = (ROOT / "docs" / "horovod.md").read_text()


def section(title: str) -> str:
    return DOCS.partition(f"\n## {title}")[2].partition("\n## ")[0]


def listed(there: bool) -> dict[str, list[str]]:
    """By module, the names outside of the frameworks that docs/horovod.md says are there, or not."""
    rows = re.findall(r"^\| `(horovod\.[\w.]+)`: ([^|]*) \| ([^|]*) \|", section("`horovod.common`"), re.MULTILINE)
    found: dict[str, list[str]] = {}
    for module, names, here in rows:
        needs_more = module.startswith(("horovod.tensorflow.", "horovod._keras", "horovod.spark")) or (
            module == "horovod.ray" and find_spec("ray") is None
        )
        if not needs_more and (here != "not there") == there:
            found.setdefault(module, []).extend(re.findall(r"`(\w+)`", names))
    return found


def listed_of_torch() -> list[tuple[str, str]]:
    """Module and name of what docs/horovod.md says is there in the tables of names."""
    tables = re.findall(r"^\| name \|.*\n(?:\|.*\n)+", section("`horovod.torch`"), re.MULTILINE)
    found = []
    for row in "".join(tables[:-1]).splitlines():  # the last is of what Horovod has not
        first = row.split(" | ")[0]
        names, _, where = first.partition(" (in ")
        if "| not there |" not in row:
            module = f"horovod.torch.{where.strip('`) ')}" if where else "horovod.torch"
            found += [(module, name) for name in re.findall(r"`([A-Za-z][\w.]*)", names)]
    return found


IN_USE = {"horovod": ["__version__", "run"], "horovod.runner": ["run"], **listed(True)}
"""What programs import, by module."""
IN_USE_OF_TORCH = {
    "horovod.torch": "DistributedOptimizer SyncBatchNorm Compression init HorovodInternalError check_extension",
    "horovod.torch.mpi_ops": """
        allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce_async_ sparse_allreduce_async
        allgather allgather_async broadcast broadcast_ broadcast_async_ alltoall reducescatter_async poll
        synchronize join barrier init shutdown size rank local_size local_rank cross_rank Average Sum Adasum
        rocm_built nccl_built mpi_threads_supported is_homogeneous ProcessSet HorovodInternalError _basics
        handle_average_backwards_compatibility check_num_rank_power_of_2 gpu_available
    """,
    "horovod.torch.functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "horovod.torch.optimizer": "DistributedOptimizer _DistributedOptimizer",
    "horovod.torch.compression": "Compression Compressor FP16Compressor NoneCompressor",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.torch.elastic": "run TorchState ElasticSampler state.TorchState sampler.ElasticSampler",
    "horovod.torch.elastic.state": "get_handler_registry set_handler_registry StateHandler ModelStateHandler",
}


def run(program: str, *path: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=cwd, check=True)


def shown(program: str, *path: Path, cwd: Path = ROOT) -> Any:
    return json.loads(run(f"import json\n{program}", *path, cwd=cwd).stdout)


@pytest.mark.parametrize("way", WAYS)
def test_what_programs_import_is_there(way: str) -> None:
    first, path = WAYS[way]
    program = f"""{first}import importlib, sys
from importlib.metadata import version
import horovod
missing = [f"{{module}}.{{name}}" for module, names in {IN_USE}.items()
           for name in names if not hasattr(importlib.import_module(module), name)]
found = importlib.util.find_spec("horovod.torch") is not None
too_many = [f"{{module}}.{{name}}" for module, names in {listed(False)}.items()
            for name in names if hasattr(importlib.import_module(module), name)]
print(json.dumps([missing + too_many, horovod.__version__, version("horovod"), found, "torch" in sys.modules]))"""
    assert shown(program, *path) == [[], collectives.horovod.VERSION, collectives.horovod.VERSION, True, False]


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_what_programs_import_for_torch_is_there_and_is_ours() -> None:
    program = f"""import importlib, pickle, horovod.torch, collectives.torch
from operator import attrgetter
missing = []
for module, name in {
        listed_of_torch() + [(module, name) for module, names in IN_USE_OF_TORCH.items() for name in names.split()]
    }:
    try: attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError): missing.append(f"{{module}}.{{name}}")
ours = collectives.torch
public = [name for name in ours.__all__ if getattr(horovod.torch, name) is not getattr(ours, name)]
again = pickle.loads(pickle.dumps(horovod.torch.mpi_ops.allreduce)) is collectives.torch.allreduce
mpi_ops = horovod.torch.mpi_ops
found = [mpi_ops.synchronize is ours.synchronize, mpi_ops._basics.is_initialized()]
print(json.dumps([missing, public, again, importlib.reload(horovod.torch) is horovod.torch, found]))"""
    assert len(listed_of_torch()) > 60
    # Under Horovod's names `elastic` has Horovod's modules, and a process set of the ranks of another is refused.
    assert shown(program, FOLDER) == [[], ["elastic", "add_process_set"], True, True, [True, False]]


GRADIENTS = """import collectives, {import_} as _, os
from collectives.worlds import runtime
collectives.init()
print(json.dumps([runtime.world().config.gradients, os.environ.get("COLLECTIVES_GRADIENTS")]))"""


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_horovods(way: str) -> None:
    first, path = WAYS[way]
    assert shown(first + GRADIENTS.format(import_="horovod.common.util"), *path) == ["horovod", "horovod"]


def test_gradients_are_exact_without_it_or_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(GRADIENTS.format(import_="collectives.horovod")) == ["exact", None]
    monkeypatch.setenv("COLLECTIVES_GRADIENTS", "exact")
    assert shown(GRADIENTS.format(import_="horovod"), FOLDER) == ["exact", "exact"]


def test_a_world_that_is_there_keeps_its_gradients_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    late = "import collectives\ncollectives.init()\nimport horovod"
    assert "horovod was imported after init()" in run(late, FOLDER).stderr
    monkeypatch.setenv("COLLECTIVES_GRADIENTS", "exact")
    assert run(late, FOLDER).stderr == ""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which a Horovod is installed."""
    package = tmp_path / "site-packages" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '9.9'")
    (package / "torch.py").write_text("value = 5")
    return package.parent


@pytest.mark.parametrize("way", ["import", "path"])
def test_horovod_itself_goes_first(way: str, installed: Path) -> None:
    first, path = WAYS[way]
    program = f"""{first}import importlib.metadata, sys, horovod, horovod.torch
left = [entry for entry in sys.path if entry.endswith("/site")]
print(json.dumps([horovod.__version__, horovod.torch.value, horovod.__file__, len(left)]))"""
    result = run(f"import json\n{program}", *path, installed)
    # Behind an installed one, our folder does no harm; before it, it has to go.
    assert json.loads(result.stdout) == ["9.9", 5, str(installed / "horovod" / "__init__.py"), int(way == "import")]
    assert ("RuntimeWarning: collectives: Horovod is installed" in result.stderr) == (way == "path")


def test_horovod_is_found_where_another_finder_has_it(installed: Path) -> None:
    program = f"""import sys
from importlib.machinery import PathFinder
class Editable:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, [{str(installed)!r}]) if name == "horovod" else None
sys.meta_path.append(Editable())
import horovod
print(json.dumps(horovod.__version__))"""
    assert shown(program, FOLDER) == "9.9"


@pytest.mark.parametrize("way", ["import", "path"])
def test_a_folder_of_that_name_is_not_horovod(way: str, tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    first, path = WAYS[way]
    assert (
        shown(f"{first}import horovod\nprint(json.dumps(horovod.__version__))", *path, cwd=tmp_path)
        == collectives.horovod.VERSION
    )


def test_another_collectives_on_the_path_is_not_horovod(tmp_path: Path) -> None:
    other = tmp_path / "collectives" / "horovod" / "site"
    (other / "horovod").mkdir(parents=True)
    (other / "horovod" / "__init__.py").write_text((FOLDER / "horovod" / "__init__.py").read_text())
    program = "import horovod, horovod.runner\nprint(json.dumps(horovod.run.__module__))"
    assert shown(program, FOLDER, other) == "horovod.runner"


def test_spawned_processes_find_it_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """import multiprocessing, sys
def child(): sys.exit(__import__("horovod.common.util").common.util.num_rank_is_power_2(8) + 3)
if __name__ == "__main__":
    import collectives.horovod
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start(); process.join(50); print(process.exitcode)"""
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    assert (
        subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True).stdout == "4\n"
    )


_NEEDS_A_FRAMEWORK = ("horovod.torch.", "horovod.tensorflow.", "horovod.keras.", "horovod._keras.", "horovod.spark.")


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in INSTEAD if not name.startswith(_NEEDS_A_FRAMEWORK)),
        "horovod.mxnet.x",
        "horovod.runner.http.http_server",
    ],
)
def test_what_is_not_here_says_so(name: str) -> None:
    message = r"horovod\.\S+ is not part of collectives, which is installed in Horovod's place: there (is|are) no"
    with pytest.raises(ModuleNotFoundError, match=message) as raised:
        importlib.import_module(name)
    assert raised.value.name in (name, name.rpartition(".")[0])


@pytest.mark.parametrize("spark", [True, False], ids=["with Spark", "without Spark"])
def test_the_estimator_for_lightning_is_said_not_to_be_here(spark: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if re.match(r"(collectives|horovod)\.spark\b", name)]:
        monkeypatch.delitem(sys.modules, name)
    if spark:
        package = types.ModuleType("horovod.spark")
        package.__path__ = []
        monkeypatch.setitem(sys.modules, "horovod.spark", package)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ImportError, match=r"no estimator for Lightning; have horovod\.spark\.run call") as raised:
        importlib.import_module("horovod.spark.lightning")
    assert ("pip install pyspark" in str(raised.value)) != spark


def test_what_is_not_here_is_listed_and_nothing_else_is_said_to_be_missing() -> None:
    table = section("`horovod.common`").partition("\n| module |")[2]
    assert set(re.findall(r"`(horovod\.[\w.]+)`", table)) == set(INSTEAD)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'horovod\.bogus'"):
        importlib.import_module("horovod.bogus")


def test_python_m_prints_the_folder() -> None:
    command = [sys.executable, "-m", "collectives.horovod"]
    assert (
        subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True).stdout
        == f"{FOLDER}\n"
    )


def test_horovods_error_is_what_a_new_start_can_cure() -> None:
    kinds = importlib.import_module("horovod.common.exceptions")
    failures = (errors.RankFailedError, errors.CollectiveTimeoutError, errors.TransportError)
    assert all(issubclass(kind, kinds.HorovodInternalError) for kind in failures)
    mistakes = (
        errors.InvalidArgumentError,
        errors.InvalidTypeError,
        errors.MismatchError,
        errors.NotInitializedError,
        kinds.HostsUpdatedInterrupt,
    )
    assert not any(issubclass(kind, kinds.HorovodInternalError) for kind in mistakes)
    assert kinds.HostsUpdatedInterrupt(skip_sync=True).skip_sync


def test_basics_have_what_collectives_has() -> None:
    basics = importlib.import_module("horovod.common.basics").HorovodBasics(__file__, "mpi_lib")
    assert basics.is_initialized() is False and basics.Average is collectives.Average and basics.gloo_built() is True
    with pytest.raises(ValueError, match="init"):
        basics.rank()


def test_small_helpers() -> None:
    util = importlib.import_module("horovod.common.util")
    assert [list(part) for part in util.split_list([1, 2, 3, 4, 5], 3)] == [[1, 2], [3, 4], [5]]
    assert util.split_list([1], 3) == [[1], [], []]
    assert [number for number in range(-1, 10) if util.num_rank_is_power_2(number)] == [1, 2, 4, 8]
    assert util.is_iterable("a") and not util.is_iterable(1)
    assert util.nccl_built(verbose=True) == collectives.horovod.nccl_built()
    os.environ["COLLECTIVES_A"] = "before"
    with util.env(COLLECTIVES_A="while", COLLECTIVES_B="while", COLLECTIVES_C=None):
        assert (os.environ["COLLECTIVES_A"], os.environ["COLLECTIVES_B"], os.environ.get("COLLECTIVES_C")) == (
            "while",
            "while",
            None,
        )
    assert os.environ.pop("COLLECTIVES_A") == "before" and "COLLECTIVES_B" not in os.environ


def test_extensions_are_frameworks_with_an_adapter() -> None:
    util = importlib.import_module("horovod.common.util")
    assert util.extension_available("torch") == (find_spec("torch") is not None)
    assert not util.extension_available("mxnet") and not util.gpu_available("mxnet")
    with pytest.raises(ImportError, match=r"horovod\.mxnet cannot be used"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have no job started; return the arguments of those that would have been."""
    calls: list[Any] = []
    monkeypatch.setattr(launch, "run", lambda *args, **kwargs: calls.append((args, kwargs)) or [args[0](*args[1])])
    return calls


def test_horovod_run_takes_horovods_arguments(called: list[Any]) -> None:
    horovod = importlib.import_module("horovod")
    importlib.import_module("horovod.runner.launch")
    options = {
        "hosts": "a:1,b:2",
        "ssh_port": 22,
        "mpi_args": "-x A",
        "verbose": 2,
        "use_gloo": True,
        "use_mpi": False,
        "executable": "py",
    }
    assert horovod.run(len, ("abc",), np=3, **options) == [3]
    options["network_interfaces"] = ["eth0", "eth1"]
    assert horovod.run(len, ("abc",), num_proc=5, np=3, **options) == [3]
    nics = "--network-interfaces=eth0,eth1"
    given = ["--as-horovod", "--verbose", "--gloo", "--hosts=a:1,b:2", "--ssh-port=22", "--mpi-args=-x A"]
    assert called.pop() == ((len, ("abc",), None), {"np": 3, "options": [*given, nics], "executable": "py"})
    assert called == [((len, ("abc",), None), {"np": 3, "options": given, "executable": "py"})]
    cli.check_arguments(["-np", "3", *given])


def test_horovod_run_takes_horovods_arguments_of_elastic_jobs(called: list[Any]) -> None:
    elastic = {"min_num_proc": 1, "max_num_proc": 4, "slots": 2, "reset_limit": 3, "cooldown_range": (1, 5)}
    importlib.import_module("horovod").run(len, ("abc",), num_proc=2, host_discovery_script="find", **elastic)
    options = called.pop()[1]["options"]
    assert options[0] == "--as-horovod" and options[-3:] == ["--blacklist-cooldown-range", "1", "5"]
    assert set(options[1:-3]) == {
        "--min-np=1", "--max-np=4", "--host-discovery-script=find", "--slots-per-host=2", "--reset-limit=3",
    }  # fmt: skip
    assert cli.check_arguments(["-np", "2", *options, "program"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": "a:1", "hostfile": "f"}, "hosts or hostfile, got both"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo or use_mpi, got both"),
    ],
)
def test_horovod_run_refuses_what_makes_no_sense(arguments: dict[str, Any], message: str, called: list[Any]) -> None:
    with pytest.raises(ValueError, match=message):
        importlib.import_module("horovod").run(len, ("abc",), **arguments)
    assert not called


def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Have jobs end at once, as if their ranks had joined each other; returns their commands and environments."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def run(ranks: Any, output: Any) -> int:
        started.append((ranks.command, ranks.environment))
        output.records.joined = True
        return 0

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(cli, "find", lambda: Launcher("mpirun", Vendor.MPICH, "5.0"))
    return started


def test_as_horovod_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started = launches(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", sys.executable])
    assert (
        cli.main(["--as-horovod", "-np", "2", sys.executable])
        == cli.horovodrun()
        == cli.main(["-np", "2", sys.executable])
        == 0
    )
    paths = [environment["PYTHONPATH"] for _, environment in started]
    assert paths == [f"{FOLDER}{os.pathsep}/theirs"] * 2 + ["/theirs"]
    assert [command[-3] for command, _ in started] == ["=2", "=2", "="]


def test_as_horovod_tells_the_ranks_in_horovods_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = launches(monkeypatch)
    file = tmp_path / "settings.yaml"
    file.write_text("params:\n  cycle_time_ms: 3\nlibrary_options:\n  num_nccl_streams: 2\n  thread_affinity: 4\n")
    options = ["--fusion-threshold", "32", "--num-nccl", "5", "--config-file", str(file), "-H", "a:4,b:1,c:9"]
    assert cli.main(["--as-horovod", "-np", "6", *options, "train"]) == 0
    command, environment = started[0]
    told = {name[8:]: environment[name] for name in environment if name.startswith("HOROVOD_")}
    assert told == {
        "FUSION_THRESHOLD": str(32 << 20),
        "CYCLE_TIME": "3",
        "NUM_NCCL_STREAMS": "5",
        "THREAD_AFFINITY": "4",
    }
    assert command[-3] == "=4,1,1" and "-genvall" in command


def test_the_version_of_horovodrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["horovodrun", "--version"])
    with pytest.raises(SystemExit):
        cli.horovodrun()
    assert capsys.readouterr().out == f"{collectives.horovod.VERSION} (collectives {collectives.__version__})\n"


def test_what_is_built_is_said_as_horovodrun_says_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives.worlds.capabilities, "nccl_built", lambda: 22304)
    cli.main(["--as-horovod", "--check-build"])
    output = capsys.readouterr().out
    for name, package in (("PyTorch", "torch"), ("TensorFlow", "tensorflow")):
        assert f"    [{'X' if find_spec(package) else ' '}] {name}\n" in output
    assert "    [ ] MXNet\n" in output
    assert "Available Tensor Operations:\n    [X] NCCL\n    [ ] DDL\n" in output
    cli.main(["--check-build"])
    assert "Available" not in capsys.readouterr().out


def test_init_takes_horovods_word_for_process_sets_and_no_other() -> None:
    with pytest.raises(ValueError, match=r"process_sets: expected process sets or \"dynamic\", got 'all'"):
        collectives.init(process_sets="all")
    assert not collectives.is_initialized()
