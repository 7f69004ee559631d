"""Messages of clients to both machines, kept to be sent again: a connection may bring a copy at any later time.

A copy of a client's command, whatever came in between, changes nothing: the client has had its answer and continued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rollmesh.buffer.policy.rules import TableRules
from rollmesh.buffer.reference_model.resume_answers import Outdated
from rollmesh.buffer.reference_model.table_state import Fenced
from tests.buffer.comparison import MEMBERS, ComparedMachines

index = st.integers(0, 30)


class OldGeneration(Exception):
    """The member has joined again since."""


# Answers of the verbs for errors that the machine raises.
_REFUSALS = {Fenced: b"fenced", Outdated: b"outdated", OldGeneration: b"old_generation"}
# Counters of the copies themselves.
_OF_COPIES = {"duplicate_writes", "superseded_writes"}


@dataclass(frozen=True, slots=True)
class Said:
    """One command of a client.

    Attributes:
        verb, arguments: as Redis is told.
        read: of the verb's answer, what the machine says as well.
        to_machine: tells the machine the same; returns what it says.
        renews: it gives its holder's leases a term, whenever it comes.
    """

    verb: str
    arguments: tuple[Any, ...]
    read: Callable[[list[Any]], Any]
    to_machine: Callable[[], Any]
    renews: bool


class TellingMachines(ComparedMachines):
    """Both machines, and what they were told."""

    rules: TableRules
    version: int

    def begin_telling(self) -> None:
        self.said: dict[str, list[Said]] = {}
        self.generations = dict.fromkeys(MEMBERS, 1)
        # The last number of the calls that clients number.
        self.calls = 0

    @property
    def incarnation(self) -> int:
        return self.machine.lineage.incarnation

    @property
    def base(self) -> int:
        """The version at which the next batch trains, or the next round is evaluated."""
        return self.machine.u if self.rules.bounded else self.version

    def next_call(self) -> int:
        self.calls += 1
        return self.calls

    def verb(self, name: str, *arguments: Any) -> list[Any]:
        return self.call(self.redis.run_script(name, *arguments))  # type: ignore[no-any-return]

    def tell(
        self,
        verb: str,
        *arguments: Any,
        read: Callable[[list[Any]], Any],
        to_machine: Callable[[], Any],
        what: str = "",
        renews: bool = False,
    ) -> Any:
        """Tells both; what they say must be equal, and is returned.

        Args:
            verb, arguments, read, to_machine, renews: as of `Said`.
            what: of several uses of the verb.
        """
        said = Said(verb, arguments, read, to_machine, renews)
        self.said.setdefault(what or verb, []).append(said)
        return self._say(said)

    def forget_last(self, verb: str) -> None:
        """Forgets the last message, which may have an effect when it comes again."""
        copies = self.said[verb]
        copies.pop()
        if not copies:
            del self.said[verb]

    def _say(self, said: Said) -> Any:
        answer = self.verb(said.verb, *said.arguments)
        try:
            expected = said.to_machine()
        except tuple(_REFUSALS) as refusal:
            assert answer[0] == _REFUSALS[type(refusal)], (said.verb, said.arguments)
            return None
        assert answer[0] == b"ok", (said.verb, said.arguments)
        assert said.read(answer) == expected, (said.verb, said.arguments)
        return expected

    def check_generation(self, member: str, generation: int) -> None:
        if generation != self.generations[member]:
            raise OldGeneration

    @precondition(lambda self: self.said)
    @rule(at=st.integers(0, 9999))
    def late_copy(self, at: int) -> None:
        # Each verb as often as the others, and what was said of late as often as what was said long ago.
        back, verb = divmod(at, len(self.said))
        copies = self.said[sorted(self.said)[verb]]
        said = copies[-1 - back % min(len(copies), 6 if back % 2 else len(copies))]
        before = self._footing(said)
        self._say(said)
        assert self._footing(said) == before, f"a late copy of {said.verb} {said.arguments} has changed something"

    def _footing(self, said: Said) -> str:
        """All that a late copy might change."""
        machine = self.machine
        counts = {name: count for name, count in machine.counts.items() if name not in _OF_COPIES}
        drafts = {group_id: of_group for group_id, of_group in machine.drafts.items() if of_group}
        return repr(
            (
                machine.groups, drafts, machine.pending, None if said.renews else machine.holders,
                machine.dead_letters.notes,
                counts, machine.u, machine.lineage, machine.committed, machine.seeded, machine.end_of_data,
            )
        )  # fmt: skip
