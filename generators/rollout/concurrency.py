"""How many sequences a generator has in hand, from the engine's own figures: a clock-fed state machine, without I/O.

An engine whose KV cache is too small for its slots throws sequences out and prefills them again, or leaves requests
waiting although it has slots. Then fewer in hand are decoded sooner. The limit follows what the engine bears:

- **Overload** is one of three. Preemptions, counted with a memory of `MEMORY_S` (P <- P exp(-dt / MEMORY_S) + new),
  reach `LOST` of what is in hand, and two at least: a few in passing cost less than idle slots. The KV cache's use,
  smoothed over the same time, reaches `FULL`. Or requests have waited for `WAIT_S` beside free slots. The limit L
  becomes `CUT` x min(L, in hand), behind a probe no more than where that began, and the least level at which an
  overload was seen is remembered as `bad`. What is in hand is not taken back: nothing is judged again until the surplus
  has ended, and `MEMORY_S` have passed.
- **Health** is a smoothed use of the KV cache below `ROOMY`, less than half of the preemptions that are an overload
  (one that shows itself slowly must not pass for a level that holds), and nothing else the matter. While the limit
  binds (all of it is in hand), L rises by one step, slots / `STEPS`, every `RISE_S`, up to just below `bad`; a step
  beyond is a probe. Probes come after `PROBE_S`, twice as long after each that failed, at most `MAX_PROBE_S`; one that
  held for as long forgets `bad`.

Invariants: floor <= limit <= slots always; an engine that never complains stays at `slots`; under a constant plant the
limit stays between `CUT` x capacity and one step above the capacity, probes grow rare, and after an overload has ended
the limit returns to `slots`. Times are seconds of a monotonic clock that the caller reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CUT = 0.92
FULL = 0.98
ROOMY = 0.94
LOST = 0.2
MEMORY_S = 10.0
WAIT_S = 10.0
RISE_S = 2.0
STEPS = 32
PROBE_S = 16.0
MAX_PROBE_S = 256.0


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What is seen of an engine at one moment.

    Attributes:
        at: seconds.
        in_hand: sequences given to it and not finished.
        active: of these, being decoded.
        waiting: of these, those that wait for nothing but room (not for weights, nor behind pinned requests).
        kv_usage: share of the KV cache in use; None where there is no such bound.
        preemptions: since the engine's start.
    """

    at: float
    in_hand: int
    active: int
    waiting: int
    kv_usage: float | None
    preemptions: int


class ConcurrencyController:
    """The limit of one generator.

    Args:
        slots: sequences that the engine decodes together: the ceiling.
        least: sequences that must be possible (one group); the floor is that, or a sixteenth of the slots.

    Attributes:
        limit: sequences that may be in hand; at `slots`, a line ahead of the engine comes on top (see
            `generators.rollout.credits`).
        reason: of the last cut; empty before the first.
        cuts: since the start.
    """

    def __init__(self, slots: int, least: int) -> None:
        self._slots = slots
        self._floor = min(slots, max(least, math.ceil(slots / 16)))
        self._step = max(1, slots // STEPS)
        self._preemptions = 0
        self._lost = 0.0
        self._usage: float | None = None
        self._seen_at: float | None = None
        self._waiting_since: float | None = None
        self._bad: int | None = None
        # Where the last rise began.
        self._from = slots
        self._probe_s = PROBE_S
        # Until when nothing is judged, at least; None where no surplus is being worked off.
        self._settling: float | None = None
        # When the limit last changed, or first bound in good health behind that: rises are counted from here.
        self._since: float | None = None
        self.limit = slots
        self.reason = ""
        self.cuts = 0

    def observe(self, look: LoadSample) -> int:
        """Takes a look in; returns the limit. Looks come in the order of their times."""
        trouble = self._trouble(look)
        if self._settling is not None:
            if look.in_hand <= self.limit and look.at >= self._settling:
                self._settling, self._since = None, None
                # What happened while there was a surplus says nothing of the limit.
                self._lost, self._waiting_since = 0.0, None
        elif trouble:
            self._cut(look, trouble)
        elif self._lost >= _overload(look) / 2 or (self._usage is not None and self._usage >= ROOMY):
            self._since = None
        else:
            self._rise(look)
        return self.limit

    def _trouble(self, look: LoadSample) -> str:
        """What is the matter; empty where nothing is."""
        old = math.exp(-(look.at - self._seen_at) / MEMORY_S) if self._seen_at is not None else 0.0
        self._seen_at = look.at
        # An engine that was started again counts from zero.
        preempted = look.preemptions - min(self._preemptions, look.preemptions)
        self._preemptions = look.preemptions
        self._lost = self._lost * old + preempted
        if look.kv_usage is None or self._usage is None:
            self._usage = look.kv_usage
        else:
            self._usage = self._usage * old + look.kv_usage * (1 - old)
        if not look.waiting or look.active >= self._slots:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = look.at
        if self._lost >= _overload(look):
            return f"{self._lost:.0f} preemptions in {MEMORY_S:.0f} s"
        if self._usage is not None and self._usage >= FULL:
            return f"its KV cache is {self._usage:.0%} full"
        if self._waiting_since is not None and look.at - self._waiting_since >= WAIT_S:
            return f"{look.waiting} requests wait beside free slots"
        return ""

    def _cut(self, look: LoadSample, trouble: str) -> None:
        level = min(self.limit, look.in_hand)
        probed = self._bad is not None and self.limit >= self._bad
        if probed:
            self._probe_s = min(MAX_PROBE_S, 2 * self._probe_s)
        # The least level that was bad stays, until it has held: what lies above it proves nothing.
        self._bad = max(min(level, self._bad or level), self._floor + 1)
        limit = math.floor(CUT * level)
        if probed:
            # A step may be wider than a cut; where it began was good.
            limit = min(limit, self._from)
        self.limit = max(self._floor, limit)
        self.reason = trouble
        self.cuts += 1
        self._settling = look.at + MEMORY_S

    def _rise(self, look: LoadSample) -> None:
        if self.limit == self._slots and self._bad is None:
            return
        # Whatever is in hand below the limit proves nothing of the limit; groups are whole, hence the slack.
        if look.in_hand + self._floor <= self.limit:
            self._since = None
            return
        if self._since is None:
            self._since = look.at
        healthy_s = look.at - self._since
        beyond = min(self._slots, self.limit + self._step)
        if self._bad is None or beyond < self._bad:
            if healthy_s >= RISE_S:
                self._move(beyond, look.at)
        elif healthy_s >= self._probe_s:
            if self.limit >= self._bad:
                # The level that was bad has held.
                self._bad, self._probe_s = None, PROBE_S
            self._move(beyond, look.at)

    def _move(self, limit: int, at: float) -> None:
        self._from, self.limit, self._since = self.limit, limit, at


def _overload(look: LoadSample) -> float:
    """Preemptions in memory from which on they cost more than idle slots."""
    return max(2.0, LOST * look.in_hand)
