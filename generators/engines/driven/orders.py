"""What is asked of a driven engine as a whole, the swaps of weights among it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from generators.engines.base import SwapTimings
from generators.engines.orders import Pause, Probe, Resume, Sleep, Wake
from mesh.versions import PolicyVersion


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Weights to be swapped in.

    Attributes:
        version, digest: as given to `update_weights`.
        staged: what the backend made of the tensors.
        staging_s: it took.
        staged_at: performance counter at its end.
        done: of the swap.
    """

    version: PolicyVersion
    digest: str
    staged: Any
    staging_s: float
    staged_at: float
    done: Future[SwapTimings]


Control = Pause | Resume | Sleep | Wake
Order = Control | Probe | Update
