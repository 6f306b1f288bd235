"""Receives and messages meet as in a list that is searched from its beginning."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from collectives.engine.messages.matching import ANY_SOURCE, ANY_TAG, Matching


@dataclass(eq=False)
class Envelope:
    source: int
    tag: int


class Listed:
    """The same by searching lists."""

    def __init__(self) -> None:
        self.posted: list[Envelope] = []
        self.unexpected: list[Envelope] = []

    def post(self, receive: Envelope) -> Envelope | None:
        found = next((message for message in self.unexpected if _fits(receive, message)), None)
        (self.posted.append(receive) if found is None else self.unexpected.remove(found))
        return found

    def arrive(self, message: Envelope) -> Envelope | None:
        found = next((receive for receive in self.posted if _fits(receive, message)), None)
        (self.unexpected.append(message) if found is None else self.posted.remove(found))
        return found

    def withdraw(self, receive: Envelope) -> bool:
        known = receive in self.posted
        if known:
            self.posted.remove(receive)
        return known


def _fits(receive: Envelope, message: Envelope) -> bool:
    return receive.source in (ANY_SOURCE, message.source) and receive.tag in (ANY_TAG, message.tag)


STEPS = st.lists(st.tuples(st.sampled_from("pppaaaw"), st.integers(-1, 2), st.integers(-1, 2)), max_size=40)


@given(STEPS)
def test_it_does_what_lists_do(steps: list[tuple[str, int, int]]) -> None:
    tested: Matching[Envelope, Envelope] = Matching()
    model = Listed()
    receives = [Envelope(0, 0)]
    for what, source, tag in steps:
        if what == "w":
            receive = receives[source % len(receives)]
            assert tested.withdraw(receive) == model.withdraw(receive)
        elif what == "p":
            receives.append(Envelope(source, tag))
            assert tested.post(receives[-1]) is model.post(receives[-1])
        else:
            message = Envelope(abs(source), abs(tag))
            assert tested.arrive(message) is model.arrive(message)
        assert tested.unexpected() == model.unexpected
