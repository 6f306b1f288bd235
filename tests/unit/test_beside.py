"""What runs beside a loop."""

from __future__ import annotations

import queue
import select
import threading

from collectives.launch.beside import Mailbox, Workers


def deliver(mail: Mailbox) -> None:
    """Wait for calls, and make them."""
    assert select.select([mail], [], [], 10.0)[0]
    mail.deliver()


def test_what_a_thread_returns_or_raises_comes_to_the_loop() -> None:
    mail = Mailbox()
    workers, outcomes = Workers(mail, 1), list[object]()
    error = ValueError("no good")

    def fail() -> None:
        raise error

    workers.do(lambda: threading.get_ident(), outcomes.append)
    workers.do(fail, outcomes.append)
    while len(outcomes) < 2:
        deliver(mail)
    assert outcomes[0] != threading.get_ident() and outcomes[1] is error
    workers.close(10.0)
    assert not any(thread.is_alive() for thread in workers._threads)


def test_a_thread_that_is_held_up_holds_up_no_other() -> None:
    mail = Mailbox()
    workers, outcomes = Workers(mail, 2), list[object]()
    goes_on: queue.Queue[str] = queue.Queue()
    workers.do(goes_on.get, outcomes.append)
    workers.do(lambda: "quick", outcomes.append)
    deliver(mail)
    assert outcomes == ["quick"]
    goes_on.put("slow")
    deliver(mail)
    assert outcomes == ["quick", "slow"]
    workers.close(10.0)


def test_a_loop_that_is_late_finds_every_call() -> None:
    mail, calls = Mailbox(), list[int]()
    for number in range(10_000):
        mail.post(calls.append, number)
    deliver(mail)
    assert calls == list(range(10_000))
