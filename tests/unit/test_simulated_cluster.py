"""The simulator as a tool: rounds by kind against the schedules, clusters from files, steps, faults, pages, traces."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from math import inf, log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import predictions
from collectives.base.errors import InvalidArgumentError
from collectives.schedules import direct, registry
from collectives.schedules.schedule import StepKind
from collectives.simulation import chakra, gradients, nccl, topology
from collectives.simulation.clock import Fault, simulate
from collectives.simulation.links import Network, Topology
from collectives.simulation.prediction import Predictor, exact
from collectives.simulation.rounds import estimate, host_lists
from collectives.simulation.steps import Settings, Workload, changes, simulate_step
from collectives.tools.simulate import main

FILES = Path(__file__).parent / "topologies"
DESCRIBED = [
    (collective, name)
    for collective in registry.COLLECTIVES
    for name in registry.on_host(collective)
    if not registry.find(collective, name).native and (collective, name) != ("broadcast", "direct")
    if name != registry.REPRODUCIBLE
]


@pytest.mark.parametrize(("collective", "name"), DESCRIBED)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 12])
def test_rounds_by_kind_take_as_long_as_all_messages_played(collective: str, name: str, size: int) -> None:
    algorithm = registry.find(collective, name)
    for local in (1, 2, 4):
        hosts = host_lists(size, local)
        schedule = algorithm.schedules(hosts)
        chunks = schedule(0).chunks
        for network in (
            Network(5e-6, 1e9, hosts, 1e-6, 7e9, reduction=5e9),
            Network(5e-6, 1e9, hosts, 1e-6, 7e9, uplink=2e9, leaf=2, leaf_uplink=1.5e9),
        ):
            played = simulate(map(schedule, range(size)), [1000] * chunks, network)
            reckoned = estimate(collective, name, 1000 * chunks, network)
            assert reckoned.total == pytest.approx(played.total, rel=1e-9)
            assert reckoned.messages == played.messages


def test_closed_forms_at_65536_ranks() -> None:
    """Hosts of one rank: alpha-beta costs of ring, direct and recursive doubling; with hosts of 8 the hierarchy's."""
    size, nbytes, latency, bandwidth, message = 65536, 1 << 28, 5e-6, 1e9, 2e-6
    flat = Network(latency, bandwidth, host_lists(size, 1), message=message)
    moved = 2 * (size - 1) / size * nbytes / bandwidth

    def total(name: str, network: Network = flat) -> float:
        return estimate("allreduce", name, nbytes, network).total

    assert total("ring") == pytest.approx(2 * (size - 1) * (latency + message) + moved)
    assert total("direct") == pytest.approx(2 * (latency + (size - 1) * message) + moved)
    assert total("recursive-doubling") == pytest.approx(log2(size) * (latency + message + nbytes / bandwidth))
    network = Network(latency, bandwidth, host_lists(size, 8), 1e-6, 7e9)
    hosts, slices = size // 8, 2 * (1e-6 + 7 / 8 * nbytes / 7e9)
    ring = 2 * (hosts - 1) * (latency + nbytes / size / bandwidth)
    assert total("hierarchical", network) == pytest.approx(slices + ring)


def test_segments_of_rounds_cost_what_the_clock_says() -> None:
    network = Network(5e-6, 1e9, host_lists(5, 1), message=3e-6)
    for collective, name, chunks in (("allreduce", "ring", 5), ("broadcast", "ring", 1)):
        schedule = registry.find(collective, name).schedules(network.hosts or ())
        played = simulate(map(schedule, range(5)), [40_000] * chunks, network, 10_000)
        assert estimate(collective, name, 40_000 * chunks, network, 10_000).total == pytest.approx(
            played.total, rel=0.02
        )


def test_what_is_not_described_is_refused_or_played() -> None:
    with pytest.raises(InvalidArgumentError, match="'direct': this broadcast can only be simulated exactly"):
        estimate("broadcast", "direct", 8, Network(0.0, 1.0, host_lists(4, 1)))
    cluster = replace(topology.CLUSTERS["ethernet-10g"], ranks=4)
    played = exact("broadcast", "direct", 1 << 20, cluster.network()).total + cluster.overhead
    # One host would be chosen for; across hosts the caller asks for it.
    assert Predictor(cluster).predict("broadcast", 1 << 20, "direct").seconds == pytest.approx(played, rel=0.01)
    with pytest.raises(InvalidArgumentError, match="can only be simulated exactly"):
        Predictor(replace(cluster, ranks=2048)).predict("broadcast", 1 << 20, "direct")


def test_a_leaf_switch_and_a_lowered_link_bound_what_crosses_them() -> None:
    """Two hosts to a leaf, ring of four hosts: one message a round leaves each leaf."""
    network = Network(0.0, 100.0, host_lists(4, 1), leaf=2, leaf_uplink=10.0)
    assert exact("allreduce", "ring", 400, network).total == pytest.approx(6 * 10.0)
    assert exact("allreduce", "ring", 400, network).links["leaf 0 out"] == 600
    lowered = replace(network, leaf_uplink=inf, lowered={"host 1 out": 0.5, "rank 1 out": 0.25})
    assert estimate("allreduce", "ring", 400, lowered).total == pytest.approx(6 * 4.0)
    with pytest.raises(InvalidArgumentError, match=r"link 'rank 4 out': expected .* of 4 ranks on 4 hosts"):
        Topology(replace(network, lowered={"rank 4 out": 0.5}), 4)


def test_the_numbers_of_links_are_those_of_their_names() -> None:
    links = Topology(Network(0.0, 1.0, host_lists(6, 2), leaf=2), 6)
    names = links.names
    assert len(set(names)) == len(names) == len(links.capacity) - 1 == 4 * 6 + 2 * 3 + 2 * 2
    assert [links.number(name) for name in names] == list(range(1, len(names) + 1))


def test_a_late_rank_and_a_failing_link() -> None:
    """Direct exchange of 3 ranks, 100 bytes to each peer at 100 bytes a second: two rounds of 2 s."""
    network = Network(0.0, 100.0, host_lists(3, 1))

    def total(**options: Any) -> float:
        return exact("allreduce", "direct", 300, network, **options).total

    assert total() == pytest.approx(4.0)
    assert total(late={1: 5.0}) == pytest.approx(9.0)
    # After one second half of the first round's 200 bytes are left, which take twice the time, as does the second.
    assert total(faults=[Fault(1.0, "rank 0 out", 50.0)]) == pytest.approx(1.0 + 2.0 + 4.0)
    report = exact("allreduce", "ring", 300, network, faults=[Fault(1.5, "rank 0 out")])
    assert list(report.times) == [inf, inf, inf] and report.busbw == 0.0
    assert total(faults=[Fault(100.0, "rank 0 out")]) == pytest.approx(4.0)


def test_a_gpu_matrix() -> None:
    cluster = topology.load(str(FILES / "nvidia_smi_h100.txt"))
    assert (cluster.ranks, cluster.local, cluster.nvlink, cluster.nvls, cluster.gpus) == (4, 4, True, True, True)
    assert cluster.local_bandwidth == pytest.approx(18 * 20.6e9)
    by_pcie = topology.gpu_matrix("\tGPU0\tGPU1\nGPU0\t X \tNODE\nGPU1\tNODE\t X \n")
    assert (by_pcie.ranks, by_pcie.nvlink, by_pcie.local_bandwidth) == (2, False, 12e9)


def test_nccls_topology() -> None:
    cluster = topology.load(str(FILES / "nccl_h100.xml"), 16)
    assert (cluster.ranks, cluster.local, cluster.hosts, cluster.nvls) == (16, 2, 8, True)
    assert cluster.local_bandwidth == pytest.approx(18 * 20.6e9)
    assert cluster.bandwidth == 50e9 and cluster.way_out == 100e9


def test_what_the_doctor_measured() -> None:
    cluster = topology.load(str(FILES / "doctor.json"))
    assert (cluster.ranks, cluster.local) == (2, 1)
    assert cluster.latency == pytest.approx(45e-6) and cluster.bandwidth == 1150e6


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("base: h100-rails\nranks: 256\nleaf: 4\nleaf_uplink: 800e9\nlatency: 1e-5\n")
    cluster = topology.load(str(file), local=4, latency=None)
    assert (cluster.ranks, cluster.local, cluster.leaf, cluster.leaf_uplink) == (256, 4, 4, 800e9)
    assert cluster.latency == 1e-5 and cluster.source == str(file)
    assert cluster.way_out == pytest.approx(4 * 48e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks: 4\nhosts: 2\n", "unknown hosts; expected base, ranks"),
        ("base: moon\n", "base: 'moon': expected one of h100-rails"),
        ("base: [1]\n", r"base: \[1\]: expected one of h100-rails"),
        ("1: 2\n", "unknown 1; expected base, ranks"),
        ("ranks: many\n", "ranks: expected a whole number from 1 to 1048576, got 'many'"),
        ("ranks: 4.5\n", "ranks: expected a whole number .*, got '4.5'"),
        ("ranks:\n", "ranks: expected a whole number .*, got 'None'"),
        ("local: 100000000\n", "local: expected a whole number .*, got '100000000'"),
        ("leaf: -1\n", "leaf: expected a whole number from 0 .*, got '-1'"),
        ("bandwidth: 0\n", "bandwidth: expected a number of bytes per second, 1 or more, got '0'"),
        ("bandwidth: .inf\n", "bandwidth: .*, got 'inf'"),
        ("uplink: .nan\n", "uplink: .*, or inf, got 'nan'"),
        ("latency: -1e-6\n", "latency: expected a number of seconds from 0 to 1e9, got '-1e-6'"),
        ("overhead: .inf\n", "overhead: .*, got 'inf'"),
        ("gpus: perhaps\n", "gpus: expected 1, true, .*, got 'perhaps'"),
        ("protocols: UDP\n", "protocols: expected some of LL,LL128,Simple, got 'UDP'"),
        ("4 ranks", "expected 'field: value' on each line, .*: found '4 ranks'"),
        ("", "expected 'field: value' .*: found None"),
        ("ranks: {", "expected 'field: value' .*: while parsing a flow node"),
        ("ranks: !!timestamp x", "expected 'field: value'"),
        ("<system/>", "expected NCCL's topology in XML: no <gpu> in it"),
        ("<system><gpu/></system>", "expected NCCL's topology in XML: no 'sm'"),
        ("<system", "unclosed token"),
        ("[]", "expected what collectivesrun --doctor .*: no measured connection"),
        ("[1]", "expected what collectivesrun --doctor"),
        ("GPU0\n", "ranks: expected a whole number from 1 to 1048576, got '0'"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidArgumentError, match=message):
        topology.load(str(tmp_path / "file"))
    with pytest.raises(InvalidArgumentError, match=r"No such file.*expected one of h100-rails"):
        topology.load(str(tmp_path / "nothing"))


def test_nccl_by_its_published_model() -> None:
    one = replace(topology.CLUSTERS["h100-rails"], ranks=8)
    nbytes = 8 << 30
    seconds, way = nccl.time("allreduce", nbytes, one)
    assert way == "NVLS" and seconds == pytest.approx(25e-6 + nbytes * 9 / 8 / (0.85 * 370.8e9))
    without_nvls = replace(one, nvls=False)
    seconds, way = nccl.time("allreduce", nbytes, without_nvls)
    assert way == "ring, Simple" and seconds == pytest.approx((8.4 + 14 * 3.4) * 1e-6 + 1.75 * nbytes / 370.8e9)
    assert nccl.time("allreduce", 1024, without_nvls)[1] == "ring, LL"
    assert nccl.time("allgather", nbytes, without_nvls)[0] < seconds
    assert nccl.time("allreduce", nbytes, replace(one, ranks=1))[0] == 0.0
    by_pcie = replace(without_nvls, nvlink=False, protocols="LL128,Simple")
    assert nccl.time("allreduce", 1024, by_pcie)[1] == "ring, Simple"


def _predictor(ranks: int = 4) -> Predictor:
    """One rank per host, without latencies: an all-reduce of S bytes takes 1.5 S microseconds."""
    return Predictor(topology.Cluster(ranks, 1, 0.0, 1e6))


def test_a_step_hides_what_fits_behind_the_backward_pass() -> None:
    """Three gradients, ready at 5, 7 and 9 of 9 s; the first two are sent meanwhile."""
    workload = Workload((300_000, 300_000, 300_000), 9.0)
    settings = Settings(cycle=0.0)
    one = _predictor().predict("allreduce", 300_000).seconds
    step = simulate_step(workload, _predictor(), settings)
    assert workload.ready_at() == pytest.approx([5.0, 7.0, 9.0])
    assert step.step == pytest.approx(9.0 + one) and step.exposed == pytest.approx(one)
    assert step.communication == pytest.approx(3 * one) and step.efficiency == pytest.approx(9.0 / (9.0 + one))
    after = simulate_step(workload, _predictor(), replace(settings, overlap=False))
    assert after.buckets == (900_000,) and after.exposed == pytest.approx(after.communication)
    apart = simulate_step(workload, _predictor(), replace(settings, overlap=False, fusion=600_000))
    assert apart.buckets == (600_000, 300_000)
    half = simulate_step(workload, _predictor(), replace(settings, compression=0.5))
    assert half.exposed == pytest.approx(one / 2, rel=0.01)


def test_a_slow_bucket_gathers_what_becomes_ready_meanwhile() -> None:
    workload = Workload((4_000_000, 10_000, 10_000, 10_000), 4.0)
    assert simulate_step(workload, _predictor(), Settings()).buckets == (4_000_000, 30_000)


def test_stragglers_lengthen_the_step_of_all() -> None:
    workload = Workload((1000,), 1.0)
    step = simulate_step(workload, _predictor(), Settings(slower=1.5, late=0.25))
    assert step.step == pytest.approx(1.75, rel=0.01) and step.compute == 1.0
    assert simulate_step(workload, _predictor(1)).step == 1.0
    found = changes(workload, _predictor().cluster, Settings(slower=1.5))
    assert found["no straggler"].step == min(step.step for step in found.values())


def test_changes_come_with_the_greatest_gain_first() -> None:
    workload, cluster = Workload((8_000_000,) * 4, 0.1), topology.CLUSTERS["ethernet-10g"]
    found = changes(workload, cluster)
    steps = [step.step for step in found.values()]
    assert steps == sorted(steps)
    assert next(iter(found)) in ("twice the bandwidth between hosts", "gradients sent in 16 bits")
    assert {"half the latency between hosts", "no overlap with computing", "algorithm ring"} <= set(found)


class _TorchLike:
    """What the simulator asks of a torch model's parameters."""

    class Parameter:
        def __init__(self, shape: tuple[int, ...], dtype: str, trained: bool = True) -> None:
            self.shape, self.dtype, self.requires_grad = shape, dtype, trained

    def parameters(self) -> list[Parameter]:
        make = self.Parameter
        return [make((3, 4), "torch.float32"), make((9,), "torch.float32", False), make((5,), "torch.bfloat16")]


class _KerasLike:
    trainable_variables = (np.zeros((2, 3), np.float32), np.zeros(7, np.float16))


instance = _TorchLike()
NOTHING = object()


def test_gradients_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gradients.of_model(f"{__name__}:instance") == gradients.of_model(f"{__name__}:_TorchLike") == (10, 48)
    assert gradients.of_model(f"{__name__}:_KerasLike") == (14, 24)
    for path, message in (("nowhere:x", "No module"), (f"{__name__}:missing", "missing"), ("", "expected package")):
        with pytest.raises(InvalidArgumentError, match=message):
            gradients.of_model(path)


def test_gradients_of_a_timeline(tmp_path: Path) -> None:
    """Two steps of two buckets on two ranks."""
    events: list[dict[str, Any]] = []
    for step in range(2):
        for number, (tensors, nbytes) in enumerate(((["b", "c"], 4096), (["a"], 512))):
            for rank in range(2):
                args = {"tensors": tensors, "bytes": nbytes}
                at = 1000 * step + 100 * number
                events.append(
                    {"ph": "X", "pid": rank, "tid": 1, "cat": "engine", "ts": at, "dur": 50, "name": "allreduce"}
                    | {"args": args}
                )
    (tmp_path / "trace.json").write_text(json.dumps(events))
    assert gradients.of_timeline(tmp_path / "trace.json") == (4096, 512)
    (tmp_path / "trace.json").write_text("[]")
    with pytest.raises(InvalidArgumentError, match="has no all-reduce"):
        gradients.of_timeline(tmp_path / "trace.json")


class _Loaded(HTMLParser):
    """Collects what a page's elements would load."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "data", "srcset")]


def test_the_command_writes_a_page_that_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "step.html", tmp_path / "step.json"
    arguments = ["step", "-np", "16", "--cluster", "h100-rails", "--gradients", "4M,64M", "--compute", "0.01"]
    assert main([*arguments, "--html", str(page), "--json", str(data)]) == 0
    shown, content = capsys.readouterr().out, json.loads(data.read_text())
    assert f"efficiency {content['step']['efficiency']:.1%}" in shown and "twice the bandwidth" in shown
    reader = _Loaded()
    reader.feed(page.read_text())
    assert reader.addresses == [] and {"svg", "table"} <= set(reader.tags) and "script" not in reader.tags
    assert not re.search(r"url\(|@import|https?://", page.read_text())


def test_the_command_names_the_fullest_link(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["collective", "-np", "4", "--local-size", "2", "--bytes", "1M", "--algorithm", "ring"]
    assert main([*arguments, "--lower", "rank 3 out=0.5"]) == 0
    assert "rank 3 out is the fullest link" in capsys.readouterr().out


def test_the_command_says_what_waits_for_a_lost_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "-np", "8", "--bytes", "16M", "--algorithm", "ring", "--lose", "host 1 out@0.001"]) == 0
    shown = capsys.readouterr().out
    assert "ranks 0, 1, 2" in shown and "an elastic job continues with 7 ranks: ring" in shown


def test_a_reader_that_has_gone_is_no_error_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    with pytest.raises(BrokenPipeError):
        main(["collective", "-np", "2", "--bytes", "8"])


def test_the_command_compares_the_planners_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["planner", "-np", "8,65536", "--bytes", "64K", "--cluster", "ethernet-10g"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[1]) for row in rows[:1]] == [("allreduce", "8")] and rows[5][1] == "65536"
    assert all(float(row[-1]) <= float(row[5]) for row in rows)


PUBLISHED = {
    "AttributeProto": {"name": (1, 9), "int32_val": (7, 5), "int64_val": (9, 3), "uint64_val": (13, 4)}
    | {"bool_val": (27, 8), "string_val": (29, 9)},
    "GlobalMetadata": {"version": (1, 9), "attr": (2, "AttributeProto")},
    "Node": {"id": (1, 4), "name": (2, 9), "type": (3, 5), "ctrl_deps": (4, [4]), "data_deps": (5, [4])}
    | {"attr": (10, "AttributeProto")},
}
"""Fields of mlcommons/chakra's et_def.proto: number and type as descriptor.proto counts types; an enum is an int32 on
the wire; a name: repeated messages."""


def _messages() -> dict[str, Any]:
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, members in PUBLISHED.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for member, (number, kind) in members.items():
            field = message.field.add(name=member, number=number, label=1)
            if member.endswith("_val"):
                field.oneof_index = 0
            if isinstance(kind, int):
                field.type = kind
            elif isinstance(kind, list):
                field.type, field.label = kind[0], 3
            else:
                field.type, field.label, field.type_name = 11, 3, f".ChakraProtoMsg.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in PUBLISHED
    }


def test_traces_are_read_back_with_the_published_fields() -> None:
    messages = _messages()
    schedule, sizes = direct.allreduce(1, 3), [1000, 1001, 70_000]
    data, at, found = chakra.trace(schedule, sizes), 0, []
    while at < len(data):
        length = shift = 0
        while True:
            byte, at = data[at], at + 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        found.append(messages["Node" if found else "GlobalMetadata"].FromString(data[at : at + length]))
        found[-1].DiscardUnknownFields()
        assert found[-1].ByteSize() == length
        at += length
    metadata, *nodes = found
    assert metadata.version == "0.0.4" and metadata.attr[0].string_val == "allreduce, direct, 3 ranks"
    assert [node.id for node in nodes] == list(range(len(nodes)))
    attributes = [{one.name: one for one in node.attr} for node in nodes]
    sends = [
        (a["comm_dst"].int32_val, a["comm_size"].int64_val)
        for a, n in zip(attributes, nodes, strict=True)
        if n.type == 5
    ]
    expected = [
        (step.peer, sizes[step.chunk]) for steps in schedule.rounds for step in steps if step.kind is StepKind.SEND
    ]
    assert sends == expected
    assert all(a["comm_src"].int32_val == 1 for a, n in zip(attributes, nodes, strict=True) if n.type == 5)
    assert sum(node.type == 6 for node in nodes) == 4 and sum(node.type == 4 for node in nodes) == 2
    reductions = [node for node in nodes if node.type == 4]
    assert all(list(node.data_deps) == [node.id - 1] for node in reductions)
    first = [node.id for node in nodes if not node.data_deps]
    last = next(node for node in nodes[::-1] if node.type == 5)
    assert len(first) == 4 and list(last.data_deps) == [node.id for node in nodes[:6]]


def test_traces_of_all_ranks_are_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chakra", "ring", "-np", "3", "--bytes", "12K", "--to", str(tmp_path / "traces")]) == 0
    assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == [f"ring.{rank}.et" for rank in range(3)]
    assert "3 traces" in capsys.readouterr().out


def test_what_goes_through_host_memory_on_gpus_is_no_choice_of_the_simulator() -> None:
    predictor = Predictor(topology.load("p100-25gbit", 512))
    assert "reproducible" not in [one.algorithm for one in predictor.every("allreduce", 1 << 24)]
    with pytest.raises(InvalidArgumentError, match="host memory, which is not simulated"):
        predictor.predict("allreduce", 1 << 24, "reproducible")


def test_the_page_lists_every_cluster() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    assert all(f"`{name}`" in page for name in topology.CLUSTERS)


def test_constants_are_found_again_in_times_that_follow_from_them() -> None:
    """Two of the set-ups, 2 and 8 hosts, have constants; those of 4 hosts lie a third of the way between them."""
    few, many = np.array([30e-6, 5e-6, 0.8e-9]), np.array([42e-6, 35e-6, 1.1e-9])
    runs: dict[str, Any] = {"4x10gbit": {"cores": 2}}
    for setup, constants in zip(predictions.FITTED, (few, many), strict=True):
        machine = predictions.Machine(setup, 2, constants)
        # What the cores take, whatever the link does: the fit has nothing else.
        times = {str(size): float(machine.work(size)[0] @ constants) for size in predictions.SIZES}
        runs[setup] = {"cores": 2, "collectives": times}
    found = predictions.fit(runs)
    np.testing.assert_allclose(found["2x10gbit"], few, rtol=1e-6)
    np.testing.assert_allclose(found["8x10gbit"], many, rtol=1e-6)
    np.testing.assert_allclose(found["4x10gbit"], few + (many - few) / 3, rtol=1e-6)
    link = predictions.Machine("2x1gbit", 2, few).predict("allreduce", 64 << 20).seconds
    assert link == pytest.approx((64 << 20) / (1e9 / 8 * 1448 / 1514))


def test_every_cluster_says_where_its_figures_come_from() -> None:
    assert all(cluster.source for cluster in topology.CLUSTERS.values())
    for name in topology.CLUSTERS:
        assert Predictor(topology.load(name)).predict("allreduce", 1 << 20).seconds > 0
