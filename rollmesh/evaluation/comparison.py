"""Two models on the same prompts: paired differences with confidence intervals, wins, losses and ties. No I/O.

Invariants: prompts are paired by their rows of one file, and only those that both models have answered count. Values
that were measured with other data or rewards are never compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.evaluation.summary import PromptRecord, scored_responses
from rollmesh.learner.evaluation.intervals import LEVEL, Estimate, estimate_mean
from rollmesh.learner.evaluation.metrics import prompt_metrics
from rollmesh.mesh.errors import DataError

# Settings by which values become incomparable.
_SAME = ("data.", "reward.", "rollout.agent", "eval.right_at")
_MEAN = "mean"
# Fewer prompts may all differ in one direction by chance: two-sided sign test, 2 * 0.5 ** n <= 1 - LEVEL.
_FEWEST_DIFFERING = math.ceil(1 - math.log2(1 - LEVEL))
ALL = "all"
"""Stands for the prompts of all sources."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A model's responses to held-out prompts.

    Attributes:
        name: of the evaluation's folder, or of the run and its version.
        data: the file of the prompts, for people.
        measurement: all that its values depend on (`learner.evaluation.measurement_identity.measurement`).
        records: its prompts.
    """

    name: str
    data: str
    measurement: Mapping[str, Any]
    records: Sequence[PromptRecord]

    @property
    def n(self) -> int:
        """Responses asked for per prompt."""
        return int(self.measurement["eval.n"])

    @property
    def right_at(self) -> float:
        """Reward from which a response is right."""
        return float(self.measurement["eval.right_at"])


@dataclass(frozen=True, slots=True)
class PairedMetric:
    """A metric of two models over the prompts that both have answered.

    Attributes:
        source: data source, or `ALL`.
        metric: `mean` (of the rewards), and those of `prompt_metrics` that both have.
        baseline, other: means.
        difference: of the other model from the baseline.
        wins, losses, ties: prompts on which the other is better, worse, and the same.
    """

    source: str
    metric: str
    baseline: float
    other: float
    difference: Estimate
    wins: int
    losses: int
    ties: int

    @property
    def verdict(self) -> str:
        """`better` or `worse` where zero is excluded and enough prompts differ, else `the same` or `not decided`.

        Zero is excluded by the interval; by the difference alone where all prompts have the same one.
        """
        mean, low, high = self.difference.value, self.difference.low, self.difference.high
        if low is None or high is None:
            low = high = mean
            if mean == 0:
                return "the same"
        if self.wins + self.losses < _FEWEST_DIFFERING:
            return "not decided"
        return "better" if low > 0 else "worse" if high < 0 else "not decided"


def other_settings(baseline: Measured, other: Measured) -> list[str]:
    """Settings of the responses in which two measurements differ, in words.

    Raises:
        DataError: they have other data or other rewards, and cannot be compared; names them.
    """
    one, two = baseline.measurement, other.measurement
    differing = [key for key in {**one, **two} if one.get(key) != two.get(key)]
    refused = [key for key in differing if key.startswith(_SAME)]
    if refused:
        named = [f"{key} ({_told(key, baseline)}, {_told(key, other)})" for key in refused]
        raise DataError(
            f"{baseline.name} and {other.name} cannot be compared, for they differ in {'; '.join(named)}",
            hint="evaluate both with one configuration: `rollmesh eval CFG.YAML --model MODEL`",
        )
    return [f"{key} {one.get(key)} -> {two.get(key)}" for key in differing if key != "eval.rows"]


def compare(baseline: Measured, other: Measured) -> list[PairedMetric]:
    """Paired metrics, of all prompts and by source.

    Raises:
        DataError: other data or rewards, or no prompt that both have answered.
    """
    other_settings(baseline, other)
    ours, theirs = _by_row(baseline), _by_row(other)
    rows = sorted(ours.keys() & theirs.keys())
    if not rows:
        raise DataError(
            f"{baseline.name} and {other.name} have no prompt in common",
            hint="evaluate both on the same rows: eval.rows",
        )
    sources = sorted({ours[row][0] for row in rows})
    parts = [(ALL, rows)]
    if len(sources) > 1:
        parts += [(source, [row for row in rows if ours[row][0] == source]) for source in sources]
    return [
        paired for source, some in parts for paired in _paired(source, [(ours[row][1], theirs[row][1]) for row in some])
    ]


def _by_row(measured: Measured) -> dict[int, tuple[str, dict[str, float]]]:
    """Source and metrics of each prompt with a scored response."""
    found = {}
    for record in measured.records:
        values = prompt_metrics(scored_responses(record), n=measured.n, right_at=measured.right_at)
        if values:
            # The mean of n responses estimates the same whatever n is.
            found[int(record["row"])] = (record["data_source"], {_MEAN: values.pop(f"mean@{measured.n}"), **values})
    return found


def _paired(source: str, pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> Iterator[PairedMetric]:
    names = dict.fromkeys(name for one, two in pairs for name in one if name in two)
    for name in names:
        values = [(one[name], two[name]) for one, two in pairs if name in one and name in two]
        differences = [two - one for one, two in values]
        wins, losses = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
        yield PairedMetric(
            source=source,
            metric=name,
            baseline=sum(one for one, _ in values) / len(values),
            other=sum(two for _, two in values) / len(values),
            difference=estimate_mean(differences),
            wins=wins,
            losses=losses,
            ties=len(values) - wins - losses,
        )


def _told(key: str, measured: Measured) -> str:
    """A setting for people: a file by its name, not by its content."""
    return measured.data if key == "data.eval" else str(measured.measurement.get(key))
