"""A connection within one process: order, turns of their own, and ends."""

from collections import deque
from collections.abc import Callable

import pytest

from gateway.ipc.local_channel import LocalChannel, local_pair


class Turns:
    """Calls to be made in turns of their own."""

    def __init__(self) -> None:
        self.due: deque[Callable[[], None]] = deque()
        self.one: LocalChannel[str, str]
        self.other: LocalChannel[str, str]
        self.one, self.other = local_pair(self.due.append)
        self.heard: list[str] = []
        self.lost: list[str] = []
        self.other.on_message = self.heard.append
        self.other.on_lost = self.lost.append

    def run(self) -> None:
        while self.due:
            self.due.popleft()()


def test_what_is_said_is_heard_in_order_and_never_inside_the_call() -> None:
    turns = Turns()
    turns.other.on_message = lambda text: turns.other.send(f"{text}, too")
    answers: list[str] = []
    turns.one.on_message = answers.append
    turns.one.send("a")
    turns.one.send("b")
    assert answers == []
    turns.due.popleft()()
    assert answers == ["a, too", "b, too"]
    assert not turns.due


def test_what_is_said_while_one_hears_is_heard_as_well() -> None:
    turns = Turns()

    def hear(text: str) -> None:
        turns.heard.append(text)
        if text == "a":
            turns.one.send("c")

    turns.other.on_message = hear
    turns.one.send("a")
    turns.one.send("b")
    turns.run()
    assert turns.heard == ["a", "b", "c"]


def test_a_message_that_fails_keeps_no_other_from_being_heard() -> None:
    turns = Turns()

    def hear(text: str) -> None:
        if text == "bad":
            raise ValueError(text)
        turns.heard.append(text)

    turns.other.on_message = hear
    for text in ("a", "bad", "b"):
        turns.one.send(text)
    with pytest.raises(ValueError, match="bad"):
        turns.run()
    turns.run()
    assert turns.heard == ["a", "b"]


def test_an_end_is_heard_once_and_nothing_after_it() -> None:
    turns = Turns()
    turns.one.send("last")
    turns.one.close()
    turns.one.send("too late")
    turns.run()
    assert (turns.heard, turns.lost) == (["last"], ["it ended"])
    assert turns.other.closed
    turns.other.lose("again")
    assert turns.lost == ["it ended"]


def test_who_loses_it_is_told_as_well() -> None:
    turns = Turns()
    told: list[str] = []
    turns.one.on_lost = told.append
    turns.one.lose("it does not read")
    turns.run()
    assert (told, turns.lost) == (["it does not read"], ["it ended"])
