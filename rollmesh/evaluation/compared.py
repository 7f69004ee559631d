"""Models and runs that are compared: folders of evaluations, and runs with their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rollmesh.evaluation.comparison import Measured, PairedMetric, compare
from rollmesh.evaluation.identity import IDENTITY, read_identity
from rollmesh.evaluation.runs import changed_settings, run_outcome
from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.evaluation.result_log import ResultLog
from rollmesh.learner.standalone.response_file import RESPONSES, read_responses
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.run_files import is_run, read_config

_AT = "@"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Models and runs, each compared with the first.

    Attributes:
        measured: the models with responses; the first is the baseline.
        pairs: paired metrics of each further one, by its place in `measured`.
        runs: folders, where several runs were given and nothing else.
    """

    measured: Sequence[Measured]
    pairs: Sequence[Sequence[PairedMetric]]
    runs: Sequence[Path]

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON."""
        others = zip(self.measured[1:], self.pairs, strict=True)
        return {
            "baseline": self.measured[0].name if self.measured else None,
            "pairs": {
                other.name: [{**asdict(paired), "verdict": paired.verdict} for paired in found]
                for other, found in others
            },
            "runs": {str(run): run_outcome(run) for run in self.runs},
            "changed": changed_settings(self.runs) if self.runs else {},
        }


def compare_all(given: Sequence[str]) -> Comparison:
    """Compares models and runs with the first.

    Args:
        given: see `read_measured`; at least two.

    Raises:
        DataError: one cannot be read, or not be compared with the first.
        ConfigError: there are not two.
    """
    if len(given) < 2:
        raise ConfigError("there is nothing to compare with", hint="give two folders or more")
    everyone = [read_measured(one) for one in given]
    paths = [_split(one)[0] for one in given]
    runs = list(dict.fromkeys(paths))
    if len(runs) == 1 or any((path / IDENTITY).exists() for path in runs):
        runs = []
    measured = [one for one in everyone if one is not None]
    if measured and len(measured) < len(everyone):
        raise DataError(
            f"{given[everyone.index(None)]} has no evaluation, and others have", hint="evaluate it with `rollmesh eval`"
        )
    if len({one.name for one in measured}) < len(measured):
        measured = [replace(one, name=name) for one, name in zip(measured, given, strict=True)]
    return Comparison(measured, [compare(measured[0], other) for other in measured[1:]], runs)


def read_measured(given: str) -> Measured | None:
    """The responses that are meant; None for a run without evaluations.

    Args:
        given: folder of an evaluation or of a run, or `RUN@[I:]V`, the round of a version. A run alone stands for its
            best round, or for the newest where none is the best.

    Raises:
        DataError: there is no such folder or round, or it cannot be compared.
    """
    path, version = _split(given)
    if (path / IDENTITY).exists():
        identity = read_identity(path)
        records = [record for record in read_responses(path / RESPONSES) if "refused" not in record]
        return Measured(path.name, str(identity["data"]), identity["measurement"], records)
    if not is_run(path):
        raise DataError(
            f"{path} is neither a run nor an evaluation", hint="give RUN, RUN@VERSION, or a folder of `rollmesh eval`"
        )
    return _round(path, version)


def _split(given: str) -> tuple[Path, str]:
    folder, _, version = given.rpartition(_AT)
    return (Path(folder), version) if folder and not Path(given).exists() else (Path(given), "")


def _round(run: Path, version: str) -> Measured | None:
    log = ResultLog(run)
    results = {(result["incarnation"], result["version"]): result for result in log.results()}
    if not results:
        return None
    best = best_checkpoint(run / CHECKPOINTS_NAME)
    chosen = (best.incarnation, best.version) if best is not None else max(results)
    if version:
        found = [name for name in sorted(results) if version in (f"{name[0]}:{name[1]}", str(name[1]))]
        if not found:
            raise DataError(
                f"version {version} of {run} was not evaluated", hint="`rollmesh evals RUN` lists the rounds"
            )
        chosen = found[-1]
    rows = log.rows(*chosen)
    if not rows or "measurement" not in results.get(chosen, {}):
        raise DataError(
            f"the prompts of version {chosen[1]} of {run} are not kept, or their measurement is not known",
            hint=f"see eval.keep_rows, or evaluate it again: `rollmesh eval {run}/config.yaml --model {run}`",
        )
    name = f"{run.name}@{chosen[0]}:{chosen[1]}"
    return Measured(name, read_config(run).data.held_out, results[chosen]["measurement"], rows)
