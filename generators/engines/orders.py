"""What other threads ask of any engine as a whole; each has a future."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from generators.engines.base import ProbeResult, SleepReport


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """See `InferenceEngine.probe`."""

    token_ids: Sequence[int]
    done: Future[ProbeResult]


@dataclass(frozen=True, slots=True, eq=False)
class Pause:
    """See `InferenceEngine.pause`."""

    done: Future[None]


@dataclass(frozen=True, slots=True, eq=False)
class Resume:
    """See `InferenceEngine.resume`."""

    done: Future[None]


@dataclass(frozen=True, slots=True, eq=False)
class Sleep:
    """See `InferenceEngine.sleep`."""

    keep_weights: bool
    done: Future[SleepReport]


@dataclass(frozen=True, slots=True, eq=False)
class Wake:
    """See `InferenceEngine.wake`."""

    done: Future[None]
