"""The decisions of an elastic job: who is started, who makes a generation, what members are told, how the job ends.

Members are played by `Play`: it carries out the driver's actions at once, and says what members would say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.launch.elastic_driver import Driver
from collectives.launch.elastic_hosts import EARLY_DEATHS, HostTable
from collectives.launch.elastic_terms import Action, Event, Kill, Rules, Set, Start
from collectives.launch.hosts import Host

FOR_EVER = 10_000.0


class Play:
    """A job whose members do what the test says.

    Attributes:
        started: how many processes were started.
        alive: the processes, each with the number of what it has said last.
        answers: the last answer to each member, until it is taken.
        generations: the ranks of each generation.
        notices, events, killed: of the driver so far. ``over``: the generations whose
            members were told of their ends, and whether by a death.
    """

    def __init__(self, hosts: str, **rules: Any) -> None:
        self.now = 0.0
        self.driver = Driver(Rules(**rules), self.now, lambda: 0.5)
        self.started = 0
        self.alive: dict[int, int] = {}
        self.answers: dict[int, dict[str, Any]] = {}
        self.generations: list[list[int]] = []
        self.notices: list[tuple[bool, bool]] = []
        self.events: list[Event] = []
        self.killed: list[int] = []
        self.over: list[tuple[int, bool]] = []
        self.hosts(hosts)

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                assert action.member == self.started, "no number is used twice"
                self.started += 1
                self.alive[action.member] = 0
            elif isinstance(action, Kill):
                self.killed.append(action.member)
            elif isinstance(action, Event):
                json.loads(action.line(0.0))
                self.events.append(action)
            elif isinstance(action, Set):
                self._set(action)

    def _set(self, action: Set) -> None:
        words = action.key.split("/")
        if words[1] == "notice":
            assert action.value["generation"] == len(self.generations)
            if "over" in action.value:
                self.over.append((len(self.generations), action.value["died"]))
            else:
                self.notices.append((action.value["added"], action.value["removed"]))
            return
        member = int(words[2])
        assert words[1] == "answer" and self.alive[member] == int(words[3]), "an answer to what was not asked"
        self.answers[member] = dict(action.value)
        if "members" in action.value:
            members = list(action.value["members"])
            if len(self.generations) < action.value["generation"]:
                self.generations.append(members)
            assert self.generations[action.value["generation"] - 1] == members

    def hosts(self, text: str) -> None:
        found = [Host(name, int(slots)) for name, _, slots in (word.partition(":") for word in text.split())]
        self.do(self.driver.discovered(found, self.now))

    def say(self, what: str, *members: int, **more: Any) -> None:
        for member in members:
            self.alive[member] += 1
            self.answers.pop(member, None)
            self.do(self.driver.said(member, self.alive[member], {"what": what, **more}, self.now))

    def exit(self, code: int, *members: int) -> None:
        for member in members:
            del self.alive[member]
            self.do(self.driver.exited(member, code, self.now))

    def lose(self, host: str) -> None:
        for member in [number for number, known in self.driver.members.items() if known.host == host]:
            self.alive.pop(member, None)
        self.do(self.driver.host_lost(host, f"lost {host}", self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.driver.tick(self.now))
        for member in self.killed:
            if member in self.alive:
                self.exit(137, member)

    def run(self) -> None:
        """All processes come to generation 1, and can recover."""
        started = list(self.alive)
        self.say("here", *started)
        self.say("runs", *started)

    def join(self, *members: int) -> None:
        """Newcomers become ready."""
        self.say("here", *members)
        assert all(self.answers[member]["alone"] for member in members)
        self.say("ready", *members)

    @property
    def ranks(self) -> list[int]:
        return self.generations[-1]

    @property
    def on(self) -> list[str]:
        return [self.driver.members[member].host for member in self.ranks]

    def kinds(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]


def test_the_first_generation_is_all_who_were_started() -> None:
    job = Play("a:2 b:2", smallest=2, largest=4)
    assert list(job.alive) == [0, 1, 2, 3]
    job.say("here", 3, 1, 0)
    assert not job.generations
    job.say("here", 2)
    assert job.ranks == [0, 1, 2, 3] and job.on == ["a", "a", "b", "b"]
    assert job.answers[2] == {"generation": 1, "members": [0, 1, 2, 3], "born": [1, 1, 1, 1]}


def test_no_more_are_started_than_asked_for() -> None:
    assert len(Play("a:2 b:2", smallest=2, largest=3).alive) == 3
    assert len(Play("a:2 b:2", smallest=2).alive) == 4


def test_nothing_starts_before_there_are_hosts_for_the_smallest_number() -> None:
    job = Play("a:1", smallest=2)
    assert not job.alive
    job.wait(11)
    assert job.kinds("waiting") == ["has waited 11 s for hosts with room for 2 ranks"]
    job.hosts("a:1 b:1")
    assert list(job.alive) == [0, 1]


def test_without_hosts_the_job_gives_up() -> None:
    job = Play("a:1", smallest=2, elastic_timeout=20)
    job.wait(20)
    assert job.driver.end is not None and job.driver.end.code == 1 and "--elastic-timeout" in job.driver.end.text


def test_a_death_shrinks_the_job_and_the_replacement_comes_warm() -> None:
    job = Play("a:3", smallest=2, largest=3)
    job.run()
    job.exit(137, 1)
    assert list(job.alive) == [0, 2, 3], "replaced at once, on the same host"
    job.say("ended", 2, generation=1, why="rank 1 has died")
    assert len(job.generations) == 1
    job.say("ended", 0, generation=1)
    assert job.ranks == [0, 2] and not job.driver.failed
    job.say("here", 3)
    assert job.answers[3]["alone"] and job.notices == []
    job.say("ready", 3)
    assert job.notices == [(True, False)] and 3 not in job.answers
    job.say("ended", 0, 2, why="hosts updated")
    assert job.ranks == [0, 2, 3] and job.answers[3]["born"] == [1, 1, 3]


def test_below_the_minimum_it_waits_for_a_replacement() -> None:
    job = Play("a:2", smallest=2, largest=2)
    job.run()
    job.exit(1, 0)
    job.say("ended", 1)
    assert len(job.generations) == 1
    job.wait(12)
    assert job.kinds("waiting") == ["has waited 12 s for 1 more rank (member 2 starting)"]
    job.join(2)
    assert job.ranks == [1, 2], "the survivor is first: it has the state"


def test_below_the_minimum_for_too_long_it_gives_up_with_the_failure_that_was_not_survived() -> None:
    job = Play("a:2", smallest=2, largest=2, elastic_timeout=5)
    job.run()
    job.exit(3, 0)
    job.say("ended", 1)
    job.wait(5)
    assert "give_up" in job.answers[1]
    assert job.driver.end is not None and job.driver.end.code == 3 and list(job.driver.failed) == [0]


def test_where_no_host_can_come_it_does_not_wait_for_one() -> None:
    job = Play("a:1 b:1", smallest=2, largest=2, fixed=True)
    job.run()
    job.lose("b")
    job.say("ended", 0)
    text = "the remaining hosts have room for only 1 rank, but --min-np is 2; add hosts, or lower --min-np [E5]"
    assert job.answers[0] == {"give_up": text} and job.driver.end is not None and job.driver.end.text == text


def test_after_the_end_nobody_waits_for_an_answer() -> None:
    for code, answer in ((0, "stop"), (7, "give_up")):
        job = Play("a:3", smallest=1, largest=2, spares=1)
        job.run()
        job.say("here", 2)
        if not code:
            job.say("finished", 0, 1)
        job.exit(code, 0, 1)
        assert job.driver.end is not None and job.driver.end.code == code
        job.say("ready", 2)
        assert list(job.answers[2]) == [answer]


def test_who_does_not_end_the_generation_is_declared_dead() -> None:
    job = Play("a:4", smallest=1, largest=4, grace=10)
    job.run()
    job.say("ended", 0, why="no word of rank 3", suspects=[3])
    job.wait(5)
    job.say("ended", 1, 2)
    assert job.killed == []
    job.wait(5)
    assert job.killed == [3] and job.ranks == [0, 1, 2]
    job.say("ended", 0, 1, 2)
    assert job.ranks == [0, 1, 2] and len(job.generations) == 3


def test_who_is_killed_may_write_no_more_before_the_others_go_on() -> None:
    play = Play("a:3")
    play.run()
    play.say("ended", 0, 1)
    play.now += 10
    play.do(play.driver.tick(play.now))
    assert play.killed == [2] and play.generations == [[0, 1, 2]]
    play.exit(137, 2)
    assert play.generations == [[0, 1, 2], [0, 1]]


def test_where_its_end_cannot_be_seen_it_is_not_waited_for_long() -> None:
    play = Play("a:2 b:1")
    play.run()
    play.say("ended", 0, 1)
    for seconds in (10, 2):
        assert play.generations == [[0, 1, 2]]
        play.now += seconds
        play.do(play.driver.tick(play.now))
    assert play.generations == [[0, 1, 2], [0, 1]]


def test_newcomers_wait_while_the_others_combine_their_gradients_again() -> None:
    play = Play("a:3", smallest=2)
    play.run()
    play.exit(137, 1)
    play.join(3)
    play.say("ended", 0, 2, alone=True)
    assert play.generations == [[0, 1, 2], [0, 2]] and play.over == [(1, True)]
    play.exit(137, 0)
    play.say("ended", 2, alone=True)
    assert play.generations[2:] == [[2, 3]], "too few are left without it"


def test_a_busy_member_is_waited_for_as_long_as_nobody_else_waits() -> None:
    job = Play("a:2", smallest=1, largest=2, grace=10)
    job.run()
    job.exit(9, 0)
    job.wait(100)
    assert job.killed == []
    job.say("ended", 1)
    assert job.ranks == [1]


def test_a_member_that_computes_is_waited_for_though_others_have_ended_the_generation() -> None:
    play = Play("a:3", elastic_timeout=100)
    play.run()
    play.say("ended", 0, 1)
    assert play.over == [(1, False)]
    for member in (0, 1, 2):
        play.do(play.driver.said(member, play.alive[member] + 1, {"what": "alive", "generation": 1}, play.now))
    play.wait(50)
    assert not play.killed and play.generations == [[0, 1, 2]]
    assert any("member 2 to leave generation 1" in event.text for event in play.events if event.kind == "waiting")
    play.say("ended", 2)
    assert play.generations == [[0, 1, 2], [0, 1, 2]]
    play.say("ended", 0, 1)
    play.wait(50)
    assert play.killed == [2], "it was alive a generation ago"


def test_but_not_for_ever() -> None:
    play = Play("a:3", elastic_timeout=100)
    play.run()
    play.say("ended", 0, 1)
    play.do(play.driver.said(2, 3, {"what": "alive", "generation": 1}, play.now))
    play.now += 100
    play.do(play.driver.tick(play.now))
    assert play.killed == [2] and play.generations == [[0, 1, 2]], "until it has ended"
    play.exit(137, 2)
    assert play.generations == [[0, 1, 2], [0, 1]]


def test_a_failed_forming_is_followed_by_the_next() -> None:
    job = Play("a:3", smallest=1, largest=3)
    job.run()
    job.exit(9, 0)
    job.say("ended", 1, 2)
    job.exit(9, 1)
    job.say("ended", 2, generation=2, why="it could not be formed")
    assert job.generations == [[0, 1, 2], [1, 2], [2]]


@pytest.mark.parametrize("come", [False, True])
def test_who_dies_before_training_begins_is_left_out_and_replaced_once_others_train(come: bool) -> None:
    job = Play("a:3", smallest=1)
    if come:
        job.say("here", 0, 1, 2)
    job.exit(137, 1)
    assert job.driver.end is None and list(job.alive) == [0, 2], "a broken program is not started again and again"
    if not come:
        job.say("here", 0, 2)
    job.say("runs", 0, 2)
    assert list(job.alive) == [0, 2, 3]
    if come:
        job.say("ended", 0, 2)
    assert job.ranks == [0, 2]
    job.say("finished", 0, 2)
    job.exit(0, 0, 2)
    assert job.driver.end is not None and job.driver.end.code == 0


@pytest.mark.parametrize("say", [[], ["here"]])
def test_where_all_die_before_training_begins_the_job_ends_with_the_first_of_them(say: list[str]) -> None:
    job = Play("a:3", smallest=1)
    for what in say:
        job.say(what, 0, 1, 2)
    for code, member in ((4, 1), (1, 0), (2, 2)):
        assert job.driver.end is None
        job.exit(code, member)
    assert job.driver.end is not None and job.driver.end.code == 4 and next(iter(job.driver.failed)) == 1
    assert not job.alive


def test_where_too_few_are_left_before_training_begins_the_job_ends() -> None:
    job = Play("a:3", smallest=3)
    job.say("here", 0)
    job.exit(4, 1)
    assert job.driver.end is not None and job.driver.end.code == 4 and list(job.driver.failed) == [1]


def test_a_failure_counts_where_the_others_end_without_training() -> None:
    job = Play("a:3", smallest=1)
    job.say("here", 0, 1, 2)
    job.exit(4, 1)
    job.exit(0, 0, 2)
    assert job.driver.end is not None and job.driver.end.code == 4


def test_a_host_that_is_lost_before_training_begins_is_left_out() -> None:
    for smallest in (1, 2):
        job = Play("a:1 b:1", smallest=smallest)
        job.say("here", 0, 1)
        job.lose("b")
        if smallest == 2:
            assert job.driver.end is not None and job.driver.end.text == "lost b"
            continue
        job.say("runs", 0)
        job.say("ended", 0)
        assert job.driver.end is None and job.ranks == [0]


def test_a_program_that_never_joins_is_a_job_too() -> None:
    job = Play("a:2", smallest=1, largest=2)
    job.exit(0, 0, 1)
    assert job.driver.end is not None and job.driver.end.code == 0 and not job.alive


def test_the_job_is_done_when_all_have_finished() -> None:
    job = Play("a:3 b:1", smallest=1, largest=3)
    job.run()
    job.say("finished", 1)
    job.exit(137, 0)
    assert job.driver.end is None and list(job.alive) == [1, 2], "no more starts"
    job.say("ended", 2)
    assert job.ranks == [2], "the others go on among themselves"
    job.say("finished", 2)
    job.exit(0, 1, 2)
    assert job.driver.end is not None and job.driver.end.code == 0


@pytest.mark.parametrize(("code", "failed"), [(5, [1]), (137, [])])
def test_a_failure_after_the_end_of_the_training_is_the_jobs(code: int, failed: list[int]) -> None:
    """But not that a process is killed, which elastic jobs survive."""
    job = Play("a:2", smallest=1, largest=2)
    job.run()
    job.say("finished", 0, 1)
    job.exit(0, 0)
    job.exit(code, 1)
    assert (
        job.driver.end is not None and job.driver.end.code == (5 if failed else 0) and list(job.driver.failed) == failed
    )
    assert all(event.fields["why"] for event in job.events if event.kind == "died")


def test_who_leaves_has_not_succeeded() -> None:
    """Horovod's #3852: a worker that exits with 0 because it was scaled down ends the job as a success."""
    job = Play("a:3", smallest=1, largest=3)
    job.run()
    job.exit(0, 1)
    assert job.driver.end is None and list(job.alive) == [0, 2], "and its place stays free"
    job.say("ended", 0, 2)
    assert job.ranks == [0, 2]
    job.exit(0, 0, 2)
    assert job.driver.end is not None and job.driver.end.code == 1


def test_a_left_place_is_filled_where_ranks_are_missing() -> None:
    job = Play("a:2", smallest=2, largest=2)
    job.run()
    job.exit(0, 1)
    assert list(job.alive) == [0, 2]


def test_a_member_that_fails_is_not_waited_for() -> None:
    job = Play("a:2", smallest=1, largest=2, grace=10)
    job.run()
    job.say("failed", 0, why="ValueError: no good")
    job.say("ended", 1)
    assert job.ranks == [1] and "ValueError: no good" in job.events[-1].text
    job.wait(10)
    assert job.killed == [0], "it does not end by itself"


def test_a_member_that_fails_blacklists_its_host_before_it_has_ended() -> None:
    """So that no generation forms with members that are about to be ended."""
    job = Play("a:2 b:2", smallest=2, largest=4, blacklist_host=True, cooldown=(1.0, 100.0))
    job.run()
    job.say("failed", 0, why="ValueError: no good")
    assert job.killed == [1]
    job.say("ended", 2, 3)
    job.exit(137, 1)
    job.exit(1, 0)
    assert job.generations == [[0, 1, 2, 3], [2, 3]]
    assert [event.fields["host"] for event in job.events if event.kind == "blacklisted"] == ["a"]


def test_the_failure_counts_and_not_the_ends_of_the_others_on_its_host() -> None:
    job = Play("a:2", smallest=2, largest=2, blacklist_host=True)
    job.run()
    job.say("failed", 0, why="ValueError: no good")
    job.exit(137, 1)
    job.exit(3, 0)
    assert job.driver.end is not None and job.driver.end.code == 3 and next(iter(job.driver.failed)) == 0


@pytest.mark.parametrize(("limit", "good"), [(1, False), (2, True)])
def test_reset_limit(limit: int, good: bool) -> None:
    job = Play("a:4", smallest=1, largest=4, reset_limit=limit)
    job.run()
    for victim in (0, 1):
        job.exit(9, victim)
        job.say("ended", *(member for member in job.ranks if member in job.alive))
    if good:
        assert job.ranks == [2, 3]
    else:
        text = "Horovod was shutdown because number of resets during elastic job exceeded limit: 1 [E7]"
        assert job.answers[2] == job.answers[3] == {"give_up": text}
        assert job.driver.end is not None and job.driver.end.text == text and job.driver.end.code == 9


def test_a_newcomer_that_fits_is_admitted_with_those_who_are_on_the_way() -> None:
    job = Play("a:2", smallest=2, largest=4, grace=10)
    job.run()
    job.hosts("a:2 b:2")
    job.join(2)
    assert job.notices == []
    job.join(3)
    assert job.notices == [(True, False)]
    job.say("ended", 0, 1)
    assert job.ranks == [0, 1, 2, 3]


def test_but_not_for_longer_than_the_grace() -> None:
    job = Play("a:2", smallest=2, largest=4, grace=10)
    job.run()
    job.hosts("a:2 b:2")
    job.join(2)
    job.wait(10)
    assert job.notices == [(True, False)]


def test_a_newcomer_is_told_the_place_that_it_will_have() -> None:
    job = Play("a:2 b:2", smallest=1, largest=4)
    job.run()
    job.exit(137, 1)
    job.exit(137, 3)
    job.say("here", 4, 5)
    assert job.answers == {4: {"alone": True, "place": (2, 4, 1, 2)}, 5: {"alone": True, "place": (3, 4, 1, 2)}}


def test_spares_wait_ready() -> None:
    job = Play("a:4", smallest=2, largest=2, spares=1)
    job.run()
    assert list(job.alive) == [0, 1, 2]
    job.join(2)
    assert job.notices == []
    job.exit(9, 0)
    assert list(job.alive) == [1, 2, 3]
    job.say("ended", 1)
    assert job.ranks == [1, 2], "at once"


def test_a_removed_host_is_left_at_the_next_commit() -> None:
    job = Play("a:2 b:2", smallest=2, largest=4)
    job.run()
    job.hosts("a:2")
    assert job.notices == [(False, True)]
    job.say("ended", 0, 1, 2, 3)
    assert job.ranks == [0, 1] and all("stop" in job.answers[member] for member in (2, 3))
    stopped = [event.fields for event in job.events if event.kind == "stopped"]
    assert [each["member"] for each in stopped] == [2, 3]
    assert all(each["why"] == job.answers[each["member"]]["stop"] for each in stopped)
    job.exit(0, 2, 3)
    assert job.driver.end is None and len(job.generations) == 2


def test_newcomers_of_a_removed_host_end() -> None:
    job = Play("a:2", smallest=1, largest=4)
    job.run()
    job.hosts("a:2 b:2")
    job.join(2)
    job.hosts("a:2")
    assert "stop" in job.answers[2] and job.killed == [3]


def test_an_empty_list_of_hosts_is_survived() -> None:
    job = Play("a:2", smallest=1, largest=2)
    job.run()
    job.hosts("")
    job.say("ended", 0, 1)
    assert len(job.generations) == 1 and not job.answers
    job.hosts("a:2")
    assert job.ranks == [0, 1] and len(job.generations) == 2


def test_when_all_hosts_are_replaced_the_state_is_handed_over() -> None:
    """Horovod ends the job: 'No hosts from previous set remaining, unable to broadcast state.'"""
    job = Play("a:2", smallest=2, largest=2)
    job.run()
    job.hosts("b:2")
    assert list(job.alive) == [0, 1, 2, 3]
    job.say("ended", 0, 1)
    assert len(job.generations) == 1
    job.join(2, 3)
    assert job.ranks == [0, 1, 2, 3] and job.notices[-1] == (False, True)
    job.say("ended", 0, 1, 2, 3)
    assert job.ranks == [2, 3] and "stop" in job.answers[0]


def test_fewer_slots_are_a_removal() -> None:
    job = Play("a:3", smallest=1, largest=3)
    job.run()
    job.hosts("a:2")
    assert job.notices == [(False, True)]
    job.say("ended", 0, 1, 2)
    assert job.ranks == [0, 1] and "stop" in job.answers[2]


def test_after_three_early_deaths_a_host_gets_no_more_members() -> None:
    job = Play("a:1 b:1", smallest=1, largest=2)
    job.run()
    job.exit(1, 1)
    job.say("ended", 0)
    for victim in (2, 3, 4):
        assert victim in job.alive
        job.exit(1, victim)
    assert list(job.alive) == [0] and "several in a row" in job.kinds("closed")[0]
    assert EARLY_DEATHS == 3


def test_newcomers_that_cannot_take_the_state_are_not_replaced_for_ever() -> None:
    job = Play("a:2", smallest=1)
    job.run()
    job.exit(9, 1)
    job.say("ended", 0)
    for newcomer in (2, 3, 4):
        job.join(newcomer)
        job.say("ended", 0)
        assert job.ranks == [0, newcomer]
        job.say("failed", newcomer, why="MismatchError: attribute 'w'")
        job.exit(1, newcomer)
        job.say("ended", 0)
    assert list(job.alive) == [0]
    assert "first commit; the last one: MismatchError: attribute 'w' [E4]" in job.kinds("closed")[0]


def test_a_newcomer_that_has_committed_is_no_sign_of_an_unfit_host() -> None:
    job = Play("a:2", smallest=1)
    job.run()
    job.exit(9, 1)
    job.say("ended", 0)
    for newcomer in range(2, 8):
        job.join(newcomer)
        job.say("ended", 0)
        if newcomer % 3 == 0:
            job.say("runs", newcomer)
        job.exit(1, newcomer)
        job.say("ended", 0)
    assert not job.kinds("closed")


def test_who_is_there_stays_after_early_deaths() -> None:
    job = Play("a:3", smallest=1)
    job.run()
    job.exit(1, 2)
    job.say("ended", 0, 1)
    for victim in (3, 4, 5):
        job.exit(1, victim)
    assert list(job.alive) == [0, 1] and job.ranks == [0, 1] and not job.notices and not job.killed


def test_a_program_may_train_twice() -> None:
    job = Play("a:3", smallest=1)
    job.run()
    job.say("finished", 0, 1, 2)
    job.say("runs", 0, 1, 2)
    job.exit(137, 1)
    assert list(job.alive) == [0, 2, 3], "it is replaced"
    job.say("ended", 0)
    assert job.ranks == [0, 1, 2]
    job.say("ended", 2)
    assert job.ranks == [0, 2]


def test_a_lost_host_is_blacklisted_and_the_job_goes_on_elsewhere() -> None:
    job = Play("a:2 b:2", smallest=2, largest=4, cooldown=(5.0, 100.0))
    job.run()
    job.lose("a")
    job.say("ended", 2, 3)
    assert job.ranks == [2, 3] and list(job.alive) == [2, 3]
    job.wait(12)
    assert list(job.alive) == [2, 3]
    job.wait(1)
    assert list(job.alive) == [2, 3, 4, 5], "after two to three times the shortest time"


def test_the_loss_of_all_is_a_failure() -> None:
    job = Play("a:2", smallest=1, largest=2)
    job.run()
    job.lose("a")
    assert job.driver.end is not None and job.driver.end.code == 1


def test_newcomers_never_go_on_without_any_survivor() -> None:
    job = Play("a:2 b:1", smallest=1, largest=2, spares=1)
    job.run()
    job.join(2)
    job.exit(9, 0)
    job.exit(9, 1)
    assert job.driver.end is not None and job.driver.end.code == 9


def test_repeated_words_change_nothing() -> None:
    job = Play("a:1", smallest=1, largest=1)
    job.say("here", 0)
    job.do(job.driver.said(0, 1, {"what": "here"}, job.now))
    assert job.driver.members[0].state.name == "IN" and job.driver.said(7, 1, {"what": "here"}, job.now) == []


class TestHorovodsScenarios:
    """What Horovod's ``test_elastic_driver.py`` checks, with hosts that lose their ranks as a whole as there."""

    def test_rank_and_size(self) -> None:
        job = Play("host-1:2 host-2:2", smallest=2, largest=4, blacklist_host=True)
        job.run()
        assert job.ranks == [0, 1, 2, 3] and job.on == ["host-1", "host-1", "host-2", "host-2"]

    def test_rank_and_size_with_host_failure(self) -> None:
        job = Play("host-1:2 host-2:2", smallest=2, largest=4, blacklist_host=True)
        job.lose("host-1")
        job.say("here", 2, 3)
        assert job.ranks == [2, 3] and job.on == ["host-2", "host-2"]

    def test_rank_and_size_with_worker_failure(self) -> None:
        job = Play("host-1:2 host-2:2", smallest=2, largest=4, blacklist_host=True)
        job.run()
        job.exit(1, 0)
        assert job.killed == [1], "the whole host goes"
        job.exit(137, 1)
        job.say("ended", 2, 3)
        assert job.ranks == [2, 3]

    def test_rank_and_size_with_host_added(self) -> None:
        job = Play("host-1:2", smallest=2, largest=4, blacklist_host=True)
        job.run()
        assert job.ranks == [0, 1]
        job.hosts("host-1:2 host-2:2")
        job.join(2, 3)
        job.say("ended", 0, 1)
        assert job.ranks == [0, 1, 2, 3], "the old ranks stay as they are"

    def test_rank_0s_host_is_removed(self) -> None:
        """elastic_common: hosts 2 -> 4 -> 2 with the original host removed."""
        job = Play("localhost:2", smallest=2, largest=4, blacklist_host=True)
        job.run()
        job.hosts("localhost:2 127.0.0.1:2")
        job.join(2, 3)
        job.say("ended", 0, 1)
        job.hosts("127.0.0.1:2")
        job.say("ended", *job.ranks)
        assert job.ranks == [2, 3] and job.on == ["127.0.0.1"] * 2 and len(job.generations) == 3

    def test_wait_for_available_slots(self) -> None:
        job = Play("", smallest=2)
        for found in ("host-1:1", "host-1:1 host-2:1"):
            assert not job.alive
            job.hosts(found)
        assert len(job.alive) == 2

    def test_wait_for_min_hosts(self) -> None:
        job = Play("host-1:1", smallest=2, elastic_timeout=1)
        job.wait(1)
        assert job.driver.end is not None and job.driver.end.code == 1

    def test_all_workers_fail(self) -> None:
        job = Play("host-1:2 host-2:2", smallest=2, largest=4, blacklist_host=True)
        job.run()
        job.exit(1, 0)
        job.exit(1, 2)
        assert len(job.kinds("blacklisted")) == 2
        assert job.driver.end is not None and job.driver.end.code == 1

    def test_shutdown_on_success(self) -> None:
        job = Play("host-1:2 host-2:2", smallest=2, largest=4, blacklist_host=True)
        job.run()
        job.say("finished", *job.ranks)
        job.exit(0, *job.ranks)
        assert job.driver.end is not None and job.driver.end.code == 0

    def test_host_shutdown_on_worker_failure(self) -> None:
        job = Play("host-1:2 host-2:2", smallest=2, largest=4, blacklist_host=True)
        job.run()
        job.exit(1, 2)
        job.wait(0)
        assert list(job.alive) == [0, 1]
        job.say("ended", 0, 1)
        job.say("finished", 0, 1)
        job.exit(0, 0, 1)
        assert job.driver.end is not None and job.driver.end.code == 0

    def test_notifications(self) -> None:
        job = Play("host-1:2", smallest=2, largest=4)
        job.run()
        job.hosts("host-1:2 host-2:2")
        job.join(2, 3)
        job.say("ended", 0, 1)
        job.hosts("host-1:2")
        assert job.notices == [(True, False), (False, True)]

    def test_no_notice_where_nothing_would_change(self) -> None:
        job = Play("host-1:2", smallest=2, largest=2)
        job.run()
        job.hosts("host-1:2 host-2:2")
        job.hosts("host-1:2")
        assert job.notices == [] and list(job.alive) == [0, 1]

    def test_order_of_hosts(self) -> None:
        table = HostTable(None, lambda: 0.0)
        assert table.update([Host("a"), Host("b")]) == (["a", "b"], [])
        assert table.update([Host("c"), Host("b", 2), Host("a")]) == (["c"], [])
        assert list(table.slots.items()) == [("a", 1), ("b", 2), ("c", 1)]
        assert table.update([Host("c")]) == ([], ["a", "b"])

    def test_cooldown(self) -> None:
        """2 to 3 times the shortest time, then twice as long each time, up to the longest."""
        table = HostTable((2.0, 15.0), lambda: 0.5)
        table.update([Host("a")])
        assert [table.blacklist("a", 0.0) for _ in range(4)] == [5.0, 9.0, 15.0, 15.0]
        assert not table.usable("a", 14.9) and table.usable("a", 15.0)
        assert HostTable(None, lambda: 0.5).blacklist("a", 0.0) == float("inf")


Moves = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 7)), max_size=60)


@given(Moves, st.integers(1, 3), st.integers(3, 5), st.booleans(), st.integers(0, 1))
def test_whatever_happens(
    moves: Sequence[tuple[int, int]], smallest: int, largest: int, blacklist_host: bool, spares: int
) -> None:
    """No number twice, no generation too large or too small or with anybody dead, survivors first and in order, and
    whatever waits is answered or ended in bounded time."""
    rules = {"smallest": smallest, "largest": largest, "blacklist_host": blacklist_host, "spares": spares}
    job = Play("a:2 b:2", **rules, cooldown=(1.0, 8.0), elastic_timeout=50, grace=10)
    for move, choice in moves:
        before = list(job.generations)
        alive = sorted(job.alive)
        member = alive[choice % len(alive)] if alive else None
        if member is not None:
            place = job.driver.members[member].state.name
            if move == 0 and place == "STARTED":
                job.say("here", member)
            elif move == 1 and place == "IN":
                job.say("runs", member)
            elif move == 2 and place == "ALONE":
                job.say("ready", member)
            elif move in (3, 4) and place == "IN":
                job.say("ended", member)
            elif move == 5 and place == "IN" and choice == 0:
                job.say("finished", member)
            elif move == 6 and place in ("IN", "ALONE", "STARTED") and choice < 2:
                job.exit(choice, member)
            elif move == 7 and place == "FINISHED":
                job.exit(0, member)
            elif move == 8 and choice == 0:
                job.lose(job.driver.members[member].host)
        if move == 9:
            job.wait(choice)
        if move == 10:
            job.hosts(["a:2 b:2", "a:2", "b:2 c:2", "a:1 b:1 c:1", "", "c:3", "a:2 b:2 c:2", "b:1"][choice])
        for earlier, ranks in zip([*before[-1:], *job.generations], job.generations[len(before) :], strict=False):
            survivors = [rank for rank in ranks if rank in earlier]
            assert survivors == [rank for rank in earlier if rank in survivors] == ranks[: len(survivors)]
            assert len(set(ranks)) == len(ranks) and set(ranks) <= set(job.alive)
        if job.driver.end is not None:
            break
    # Everybody who lives does what can be expected: the job ends.
    job.hosts("a:2 b:2 c:2")
    for _ in range(100):
        if job.driver.end is not None:
            break
        for member in sorted(job.alive):
            if member in job.alive and member in job.driver.members:
                place = job.driver.members[member].state.name
                if place == "STARTED":
                    job.say("here", member)
                elif place == "ALONE":
                    job.say("ready", member)
                elif place == "IN" and job.driver._ended:
                    job.say("ended", member)
                elif place == "IN":
                    job.say("finished", member)
                elif place == "FINISHED" or place == "GONE":
                    job.exit(0, member)
        job.wait(5)
    assert job.driver.end is not None
