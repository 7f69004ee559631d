"""Seeds of sampled responses, of which no two share a stream of random numbers.

A task's seed depends on the run's seed, its table and its name in it, an evaluated one's on the version too. Each
attempt at a member derives its own (`member_seed`), and so does each turn, call and continuation. Neither the generator
that samples nor the order in which requests arrive has a part in it.
"""

from __future__ import annotations

import xxhash

SEEDS = 2**63
"""Seeds are below it."""


def derived_seed(*parts: int | str) -> int:
    """The seed that these parts give: in [1, `SEEDS`), since 0 leaves the choice to an engine."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) % (SEEDS - 1) + 1


def member_seed(task: int, parent: str, attempt: int, member: int) -> int:
    """The seed of one member of a group.

    Args:
        task: seed of its task; 0 leaves the choice to the engine.
        parent: id of the group that this one replaces; empty for the first group of a task.
        attempt: number of the grant: others may have sampled before.
        member: its index.
    """
    return derived_seed(task, parent, attempt, member) if task else 0
