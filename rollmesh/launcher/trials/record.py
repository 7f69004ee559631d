"""`RUN/placement.json`: what `placement: auto` has measured, and the placement that it has chosen.

A run that continues on the same machine with the same configuration keeps the choice, and measures nothing again. It
does measure again where too few steps were left for a trial, and `learner.steps` has been raised since.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.placement import PlacementMode
from rollmesh.mesh.files import write_atomically

_FILE = "placement.json"
# They decide how fast both sides are.
_SECTIONS = (
    "algorithm",
    "buffer",
    "data",
    "learner",
    "model",
    "placement",
    "resources",
    "reward",
    "rollout",
    "weights",
)
# A run that is prolonged has the same speed, and so have rewards at another port.
_WITHOUT = {"learner": {"steps"}, "reward": {"endpoints", "key_files", "tls"}}


@dataclass(frozen=True, slots=True)
class Estimated:
    """Bounds of the seconds per batch of a placement that was not tried when they were computed."""

    placement: str
    low_s: float
    high_s: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """A placement that was tried.

    Attributes:
        placement: its name.
        batch_s: seconds per batch; None where the trial failed.
        batches: measured.
        failure: why the trial failed, or nothing.
    """

    placement: str
    batch_s: float | None
    batches: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """The placement of a run.

    Attributes:
        mode: in force.
        asked: `placement.mode` of the configuration.
        name: of the placement in force, among the others that were compared.
        settings: keys that the configuration has otherwise.
        decided: it stays.
        undecided: why no decision will come; empty where one may, or has.
        step: at which it was decided.
        steps: `learner.steps` of the run that has decided.
        untried: placements that may be faster, and for whose trials too few steps were left; the most promising first.
        estimates: bounds, as they were printed at first.
        measured: in the order of the trials.
        left_out: placements that are not possible here, and why.
        trial_s: seconds from the first change of the placement to the decision.
        change_s: those of them in which the mesh did not train, because services were replaced.
        valid_for: digest of the configuration and the machine.
    """

    mode: PlacementMode
    asked: PlacementMode
    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    decided: bool = False
    undecided: str = ""
    step: int = 0
    steps: int = 0
    untried: tuple[str, ...] = ()
    estimates: tuple[Estimated, ...] = ()
    measured: tuple[Measured, ...] = ()
    left_out: tuple[str, ...] = ()
    trial_s: float = 0.0
    change_s: float = 0.0
    valid_for: str = ""

    @property
    def text(self) -> str:
        """In one line; empty where the configuration has named the placement."""
        if self.asked != "auto":
            return ""
        times = ", ".join(
            f"{one.placement} {'failed' if one.batch_s is None else f'{one.batch_s:.3g} s'}" for one in self.measured
        )
        if self.undecided:
            return f"no decision: {self.undecided}" + (f"; seconds per batch: {times}" if times else "")
        if not self.decided:
            return f"auto, now {self.name}; seconds per batch so far: {times or 'none yet'}"
        return f"auto chose {self.name} at step {self.step}; seconds per batch: {times}{self._untried_text()}"

    def _untried_text(self) -> str:
        if not self.untried:
            return ""
        others = f" and {len(self.untried) - 1} more" if len(self.untried) > 1 else ""
        return f"; too few steps were left to try {self.untried[0]}{others}"

    def to_summary(self) -> dict[str, Any]:
        """For `summary.json`."""
        return {**asdict(self), "text": self.text}

    def write(self, folder: Path) -> None:
        """Writes it into a run folder.

        Raises:
            OSError: the disk refuses.
        """
        write_atomically(folder / _FILE, json.dumps(asdict(self), indent=2) + "\n")


_RECORD = TypeAdapter(PlacementRecord)


def read_record(folder: Path) -> PlacementRecord | None:
    """The record in a run folder; None without one, and where it is of another program."""
    try:
        return _RECORD.validate_json((folder / _FILE).read_bytes())
    except (OSError, ValueError):
        return None


def digest_of(config: Config, cores: int, devices: Sequence[str]) -> str:
    """A digest of everything on which the choice depends.

    Args:
        config: as asked for.
        cores: of this machine.
        devices: its CUDA devices.
    """
    values = config.model_dump(mode="json", include=set(_SECTIONS))
    for section, keys in _WITHOUT.items():
        for key in keys:
            del values[section][key]
    text = json.dumps([values, cores, list(devices)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def finite(seconds: float) -> float | None:
    """Seconds for JSON, which knows no infinity."""
    return seconds if math.isfinite(seconds) else None
