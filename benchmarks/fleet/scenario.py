"""One cell as data: the fleet, what its generators sample, and what happens to them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response lengths: log-normal, as those of language models are, seeded by prompt and member.

    Attributes:
        median: tokens.
        sigma: standard deviation of the logarithm.
        most: tokens at which a response is cut off.
    """

    median: int = 128
    sigma: float = 0.7
    most: int = 1024

    def of(self, seed: int, ordinal: int, member: int) -> int:
        """Tokens of one response: the same in each attempt at it."""
        drawn = Random(f"{seed}:{ordinal}:{member}").lognormvariate(0.0, self.sigma)
        return max(1, min(self.most, round(self.median * drawn)))

    @property
    def mean(self) -> float:
        """Mean tokens of a response, from seeded draws."""
        draws = 2000
        return sum(self.of(0, ordinal, 0) for ordinal in range(draws)) / draws


@dataclass(frozen=True, slots=True)
class Scenario:
    """The contents of one cell.

    Attributes:
        generators: streams that join before anything is measured.
        fronts: front processes.
        cluster: Redis is a cluster of three primaries instead of one server.
        rate: trajectories/s that all generators together sample in the paced phase, whatever their number.
        slots: responses that a generator samples at once.
        n: members of a group.
        groups_per_step: groups that the learner claims together.
        lengths: of responses.
        slow: share of the generators that sample ten times slower.
        victims: share that is killed at once (kill -9 of their process).
        frozen: share that hangs for a while (SIGSTOP of their process).
        joiners: share that joins while the others work, after the kill.
        seconds: of each measured phase.
        processes: that the simulated generators share, apart from those that are killed or hang.
        lease_s: `buffer.lease_s`. Heartbeats and inventories come as often as this demands.
        draft_every_s: `rollout.draft_every_s`.
        seed: of lengths and of who is slow.
    """

    generators: int
    fronts: int = 1
    cluster: bool = False
    rate: float = 200.0
    slots: int = 4
    n: int = 4
    groups_per_step: int = 128
    lengths: Lengths = Lengths()
    slow: float = 0.05
    victims: float = 0.1
    frozen: float = 0.0
    joiners: float = 0.05
    seconds: float = 10.0
    processes: int = 2
    lease_s: float = 60.0
    draft_every_s: float = 60.0
    seed: int = 1

    @property
    def name(self) -> str:
        """Names the cell in results."""
        return f"N{self.generators}/f{self.fronts}{'/cluster' if self.cluster else ''}"

    @property
    def victim_count(self) -> int:
        """Generators that are killed; at least one."""
        return max(1, round(self.generators * self.victims))

    @property
    def frozen_count(self) -> int:
        """Generators that hang; at least one if any."""
        return max(1, round(self.generators * self.frozen)) if self.frozen else 0

    @property
    def joiner_count(self) -> int:
        """Generators that join late; at least one."""
        return max(1, round(self.generators * self.joiners))

    @property
    def speed(self) -> float:
        """Tokens/s of one response at which the fleet reaches `rate`, slow generators included."""
        share = 1 - self.slow + self.slow / 10
        return self.rate * self.lengths.mean / (self.generators * self.slots * share)

    def shares(self) -> list[range]:
        """Numbers of the generators of each process: the one to be killed first, then the one that hangs, if any."""
        starts = [0, self.victim_count]
        if self.frozen_count:
            starts.append(starts[-1] + self.frozen_count)
        left = self.generators - starts[-1]
        for index in range(self.processes):
            starts.append(starts[-1] + left // self.processes + (index < left % self.processes))
        return [range(*pair) for pair in pairwise(starts)]
