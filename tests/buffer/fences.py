"""Actors that are fenced off: learners of the past, old connections, replaced streams, outdated proposals."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hypothesis.stateful import rule

from rollmesh.buffer.protocol.leases import LEARNER
from tests.buffer.comparison import HOLDERS
from tests.buffer.telling import TellingMachines


class FencedMachines(TellingMachines):
    """Both machines, and those they refuse."""

    @abstractmethod
    def heartbeat(self, holder: str) -> None:
        """The holder lives."""

    @rule()
    def fences_hold(self) -> None:
        """Zombies, old connections, replaced streams and proposals that are out of date change nothing."""
        u, version, old = self.machine.u, self.version, self.incarnation - 1
        stray = self.generations["m1"] + 1
        refused: list[tuple[str, tuple[Any, ...], bytes]] = [
            ("commit", (old, 99, "path", 100), b"fenced"),
            ("sample", (old, 0, "", "train-1"), b"fenced"),
            ("claim", (old, u, "train-1", "s1"), b"fenced"),
            ("nack", (old, "filter", "why", 64, "train-1", "s1"), b"fenced"),
            ("seed", (old, 0, 0, 1), b"fenced"),
            ("set_priorities", (old, 1), b"fenced"),
            ("sample", (self.incarnation, u, "older stream", "train-1"), b"replaced"),
            ("admit", ("m1", stray, self.incarnation, version, 5, u, 99, ""), b"old_generation"),
            ("admit", ("m1", self.generations["m1"], self.incarnation, version, 5, u, 99, "older stream"), b"replaced"),
            ("admit", ("m1", self.generations["m1"], old, version, 5, u, 99, ""), b"other_incarnation"),
            ("attach", ("m1", stray, "token"), b"old_generation"),
            ("release", ("m1", stray), b"old_generation"),
            ("end_unnamed_leases", ("m1", stray, ""), b"old_generation"),
            ("end_unnamed_leases", ("m1", self.generations["m1"], "older stream"), b"replaced"),
            ("end_unnamed_leases", (LEARNER, old, ""), b"fenced"),
            ("end_unnamed_leases", (LEARNER, self.incarnation, "older stream"), b"replaced"),
            ("read_cancellations", ("m1", stray, 10), b"old_generation"),
        ]
        if self.rules.bounded:
            moved = ("m1", self.generations["m1"], self.incarnation, version, 5, u + 1, 99, "")
            refused.append(("admit", moved, b"moved"))
        if self.machine.committed:
            below = self.machine.committed - 1
            refused.append(("resume", ("learner", below, 1, 0, 1000, self.next_call()), b"below_commit"))
        for verb, arguments, status in refused:
            assert self.verb(verb, self.table, *arguments)[0] == status, (verb, arguments)
        assert self.verb("set_policy", "", old, 99)[0] == b"fenced"
        assert self.verb("heartbeat", "", "m1", stray, b"status", 0, 1000)[1:3] == [0, 0]
        for holder in HOLDERS:
            self.verb("detach", self.table, holder, "older stream")
        self.heartbeat(LEARNER)
        assert self.verb("resume", "train", "other", self.version, 0, 0, 1000, self.next_call())[0] == b"held"
