"""Kept samples and records of a run, as an audit looks at them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rollmesh.doctor.after.run_records import RunRecords
from rollmesh.learner.metrics.files import SAMPLES
from rollmesh.mesh.errors import DataError
from rollmesh.report.metrics import Record
from rollmesh.report.samples import read_all, read_spread
from rollmesh.report.unscored import UnscoredMembers

# A longer file is not read whole, but the samples of some steps that are spread over the run.
_WHOLE_BYTES = 256 << 20
_PLACES = 1000


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept sample.

    Attributes:
        step, group, member: its place in the run.
        prompt, response: text.
        reward: of it.
        components: parts of the reward, without the total.
        group_rewards: of all scored members of its group.
        length: of the response in tokens; in characters where tokens are not kept.
        ground_truth: as it is in the data; None without one.
        source: its `data_source`.
    """

    step: int
    group: str
    member: int
    prompt: str
    response: str
    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    group_rewards: Sequence[float] = ()
    length: int = 0
    ground_truth: Any = None
    source: str = ""

    @property
    def truth(self) -> str:
        """The ground truth as text; empty without one."""
        if self.ground_truth is None or isinstance(self.ground_truth, str):
            return self.ground_truth or ""
        return json.dumps(self.ground_truth)

    @classmethod
    def of(cls, sample: Mapping[str, Any]) -> Kept:
        """From a line of `samples.jsonl`.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        response = str(sample["response"])
        members = sample.get("members") or []
        return cls(
            step=int(sample["step"]),
            group=str(sample["group"]),
            member=int(sample["member"]),
            prompt=str(sample.get("prompt", "")),
            response=response,
            reward=float(sample["reward"]),
            components={name: float(value) for name, value in (sample.get("components") or {}).items()},
            group_rewards=[float(reward) for _, reward in members if reward is not None],
            length=int((sample.get("tokens") or {}).get("count", len(response))),
            ground_truth=sample.get("ground_truth"),
            source=str(sample.get("data_source", "")),
        )

    @property
    def where(self) -> str:
        """Its place, in words."""
        return f"step {self.step}, group {self.group}, member {self.member}"

    @property
    def place(self) -> dict[str, int | str]:
        """Its place, for programs."""
        return {"step": self.step, "group": self.group, "member": self.member}


@dataclass(frozen=True)
class RunEvidence:
    """A run as an audit sees it.

    Attributes:
        samples: in the order of the steps.
        steps: training records, in the same order.
        evaluations: records of held-out rounds.
        unscored: responses without a reward.
    """

    samples: Sequence[Kept]
    steps: Sequence[Record] = ()
    evaluations: Sequence[Record] = ()
    unscored: UnscoredMembers = field(default_factory=UnscoredMembers)

    @classmethod
    def read(cls, folder: Path) -> RunEvidence:
        """Reads a run folder.

        Raises:
            DataError: it is not the folder of `rollmesh run`, or has no samples.
        """
        run = RunRecords.read(folder)
        path = folder / SAMPLES
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(
                f"no samples in {folder}: {error.strerror}",
                hint="logging.samples_per_step sets how many samples are kept",
            ) from error
        found = read_all(folder) if size <= _WHOLE_BYTES else read_spread(folder, _PLACES)
        return cls(kept_samples(found), run.steps, run.evaluations, run.unscored)

    @cached_property
    def early(self) -> list[Kept]:
        """The samples of the first third of the steps."""
        return self._third(0)

    @cached_property
    def late(self) -> list[Kept]:
        """Those of the last third."""
        return self._third(2)

    @cached_property
    def top(self) -> float:
        """The highest reward of all samples."""
        return max((sample.reward for sample in self.samples), default=0.0)

    @cached_property
    def bottom(self) -> float:
        """The lowest."""
        return min((sample.reward for sample in self.samples), default=0.0)

    def is_high(self, sample: Kept) -> bool:
        """True for a reward near the highest of the run."""
        return sample.reward > self.bottom and sample.reward >= self.top - 0.1 * (self.top - self.bottom)

    def is_low(self, sample: Kept) -> bool:
        """True for a reward in the lower half of the run's range."""
        return self.top > self.bottom and sample.reward < self.bottom + 0.5 * (self.top - self.bottom)

    def _third(self, which: int) -> list[Kept]:
        steps = sorted({sample.step for sample in self.samples})
        if not steps:
            return []
        low, high = steps[which * len(steps) // 3], steps[max(0, (which + 1) * len(steps) // 3 - 1)]
        return [sample for sample in self.samples if low <= sample.step <= high]


def kept_samples(found: Iterable[Mapping[str, Any]]) -> list[Kept]:
    """Samples in the order of their steps; one that a continued run has kept again counts once, as the last.

    Lines that are no samples are left out.
    """
    kept: dict[tuple[int, str, int], Kept] = {}
    for line in found:
        try:
            sample = Kept.of(line)
        except (KeyError, TypeError, ValueError):
            continue
        kept[sample.step, sample.group, sample.member] = sample
    return sorted(kept.values(), key=lambda sample: sample.step)
