"""Names of the keys. Metadata of a run shares one cluster slot (hash tag); payloads and prompts spread over all."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.buffer.protocol.leases import LEARNER


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one run."""

    run_name: str

    @property
    def run(self) -> str:
        """The run's hash; all other keys of metadata begin with it."""
        return f"{{rollmesh:{self.run_name}}}"

    @property
    def config(self) -> str:
        return f"{self.run}:config"

    @property
    def wake(self) -> str:
        """Pub/sub channel of hints: `table rev`."""
        return f"{self.run}:wake"

    @property
    def members(self) -> str:
        return f"{self.run}:members"

    def role(self, role: int) -> str:
        """Member ids of one role, by its number in membership.proto."""
        return f"{self.run}:role:{role}"

    @property
    def status(self) -> str:
        """The last heartbeat of each member."""
        return f"{self.run}:status"

    @property
    def heartbeats(self) -> str:
        return f"{self.run}:heartbeats"

    def table(self, table: str, part: str = "") -> str:
        """A table's hash, or one of its sets."""
        return f"{self.run}:{table}:{part}" if part else f"{self.run}:{table}"

    def held_groups(self, table: str, holder: str) -> str:
        """The groups that a generator, or the learner, holds."""
        return self.table(table, "leased" if holder == LEARNER else f"held:{holder}")

    def prompt(self, table: str, name: str) -> str:
        """A prompt's key: its name has its ordinal and the digest of its bytes."""
        return f"rollmesh:{self.run_name}:{table}:p:{name}"

    def digest(self, table: str, ordinal: int | str) -> str:
        """The key of the digest of a prompt in use."""
        return self.table(table, f"digest:{ordinal}")

    def payloads(self, table: str, group_id: str) -> str:
        """The prefix of the keys of a group's payloads."""
        return f"rollmesh:{self.run_name}:{table}:v:{group_id}:"

    def payload(self, table: str, group_id: str, *name: int | str) -> str:
        """A value's key: its name has its member, its attempt and the digest of its bytes (`buffer.store.payloads`)."""
        return self.payloads(table, group_id) + ":".join(map(str, name))
