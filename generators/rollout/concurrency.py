"""An adaptive limit on the sequences in flight, AIMD over the engine's own load metrics: a pure state machine.

An engine with a KV cache too small for its slots preempts sequences and prefills them again, or leaves requests
waiting while slots are free. Fewer sequences in flight are decoded sooner then. The limit follows the engine's load:

- **Cut** on overload, which is one of three:

  - preemptions, decayed over `MEMORY_S` (`P <- P exp(-dt / MEMORY_S) + new`), reach `PREEMPTED_SHARE` of the sequences
    in flight, and two at least: a few in passing cost less than idle slots;
  - the use of the KV cache, smoothed over the same time, reaches `KV_USAGE_FULL`;
  - requests have waited for `WAIT_S` although slots are free.

  The limit L becomes `CUT_FACTOR` x min(L, in flight); after a probe, at most the level at which the probe began. The
  lowest level at which an overload was seen is remembered. Sequences in flight are not aborted: the next judgement
  comes when the surplus has ended, and `MEMORY_S` have passed.
- **Rise** while the engine is healthy and the limit binds, that is, all of it is in flight. L rises by one step,
  slots / `STEPS`, every `RISE_S`, up to just below the remembered level. Healthy means: the smoothed use of the KV
  cache is below `KV_USAGE_ROOMY`, preemptions are below half of an overload's, and nothing waits for too long.
- **Probe** beyond the remembered level after `PROBE_S`. Each failed probe doubles that time, up to `MAX_PROBE_S`. When
  a probe has held for as long, the level is forgotten.

Invariants: floor <= limit <= slots always. An engine that is never overloaded stays at `slots`. With a constant
capacity the limit stays between `CUT_FACTOR` x capacity and one step above it, and probes grow rare. After an overload
has ended the limit returns to `slots`. Times are seconds of a monotonic clock that the caller reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CUT_FACTOR = 0.92
KV_USAGE_FULL = 0.98
KV_USAGE_ROOMY = 0.94
PREEMPTED_SHARE = 0.2
MEMORY_S = 10.0
WAIT_S = 10.0
RISE_S = 2.0
STEPS = 32
PROBE_S = 16.0
MAX_PROBE_S = 256.0


@dataclass(frozen=True, slots=True)
class LoadSample:
    """An engine's load at one moment.

    Attributes:
        at: seconds.
        in_flight: sequences given to it and not finished.
        active: of these, being decoded.
        waiting: of these, those that wait for room alone (not for weights, nor for pinned requests).
        kv_usage: share of the KV cache in use; None where there is no such bound.
        preemptions: since the engine's start.
    """

    at: float
    in_flight: int
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
        limit: sequences that may be in flight; at `slots`, a queue ahead of the engine comes on top (see
            `generators.rollout.credits`).
        reason: of the last cut; empty before the first.
    """

    def __init__(self, slots: int, least: int) -> None:
        self._slots = slots
        self._floor = min(slots, max(least, math.ceil(slots / 16)))
        self._step = max(1, slots // STEPS)
        self._preemptions = 0
        self._preempted = 0.0
        self._usage: float | None = None
        self._sampled_at: float | None = None
        self._waiting_since: float | None = None
        self._overload_level: int | None = None
        # The limit before the last rise.
        self._risen_from = slots
        self._probe_s = PROBE_S
        # When the next judgement may come, at the earliest; None where there is no surplus.
        self._judge_from: float | None = None
        # When the limit last changed, or first bound in good health after that: rises are timed from here.
        self._healthy_since: float | None = None
        self.limit = slots
        self.reason = ""

    def observe(self, sample: LoadSample) -> int:
        """Judges one sample and returns the limit; samples come in the order of their times."""
        reason = self._overload_reason(sample)
        if self._judge_from is not None:
            if sample.in_flight <= self.limit and sample.at >= self._judge_from:
                self._judge_from, self._healthy_since = None, None
                # Overload while there was a surplus says nothing of the limit.
                self._preempted, self._waiting_since = 0.0, None
        elif reason:
            self._cut(sample, reason)
        elif self._preempted >= _preemption_bound(sample) / 2 or (
            self._usage is not None and self._usage >= KV_USAGE_ROOMY
        ):
            self._healthy_since = None
        else:
            self._raise_limit(sample)
        return self.limit

    def _overload_reason(self, sample: LoadSample) -> str:
        """The kind of overload; empty without one."""
        old = math.exp(-(sample.at - self._sampled_at) / MEMORY_S) if self._sampled_at is not None else 0.0
        self._sampled_at = sample.at
        # An engine that was started again counts from zero.
        preempted = sample.preemptions - min(self._preemptions, sample.preemptions)
        self._preemptions = sample.preemptions
        self._preempted = self._preempted * old + preempted
        if sample.kv_usage is None or self._usage is None:
            self._usage = sample.kv_usage
        else:
            self._usage = self._usage * old + sample.kv_usage * (1 - old)
        if not sample.waiting or sample.active >= self._slots:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = sample.at
        if self._preempted >= _preemption_bound(sample):
            return f"{self._preempted:.0f} preemptions in {MEMORY_S:.0f} s"
        if self._usage is not None and self._usage >= KV_USAGE_FULL:
            return f"its KV cache is {self._usage:.0%} full"
        if self._waiting_since is not None and sample.at - self._waiting_since >= WAIT_S:
            return f"{sample.waiting} requests wait although slots are free"
        return ""

    def _cut(self, sample: LoadSample, reason: str) -> None:
        level = min(self.limit, sample.in_flight)
        probed = self._overload_level is not None and self.limit >= self._overload_level
        if probed:
            self._probe_s = min(MAX_PROBE_S, 2 * self._probe_s)
        # The lowest overloaded level stays until it has held: levels above it prove nothing.
        self._overload_level = max(min(level, self._overload_level or level), self._floor + 1)
        limit = math.floor(CUT_FACTOR * level)
        if probed:
            # A step may be wider than a cut; where it began was good.
            limit = min(limit, self._risen_from)
        self.limit = max(self._floor, limit)
        self.reason = reason
        self._judge_from = sample.at + MEMORY_S

    def _raise_limit(self, sample: LoadSample) -> None:
        if self.limit == self._slots and self._overload_level is None:
            return
        # Fewer sequences in flight prove nothing of the limit; groups are whole, hence the slack.
        if sample.in_flight + self._floor <= self.limit:
            self._healthy_since = None
            return
        if self._healthy_since is None:
            self._healthy_since = sample.at
        healthy_s = sample.at - self._healthy_since
        beyond = min(self._slots, self.limit + self._step)
        if self._overload_level is None or beyond < self._overload_level:
            if healthy_s >= RISE_S:
                self._set_limit(beyond, sample.at)
        elif healthy_s >= self._probe_s:
            if self.limit >= self._overload_level:
                # The overloaded level has held.
                self._overload_level, self._probe_s = None, PROBE_S
            self._set_limit(beyond, sample.at)

    def _set_limit(self, limit: int, at: float) -> None:
        self._risen_from, self.limit, self._healthy_since = self.limit, limit, at


def _preemption_bound(sample: LoadSample) -> float:
    """The decayed preemptions from which on they cost more than idle slots."""
    return max(2.0, PREEMPTED_SHARE * sample.in_flight)
