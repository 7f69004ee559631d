"""Checks before a training on data: its model, its rows, and a hub that can be asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rollmesh.doctor.before.checks import IMPORTING
from rollmesh.doctor.before.inputs import DATA, HUB, MODEL, is_cached, judge_hub
from rollmesh.doctor.examination import Check, run_checks
from rollmesh.doctor.findings import Diagnosis, Finding, ok, problem, warning
from rollmesh.learner.data.locations import is_hub_id
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import ConfigError

NAMES = (MODEL, DATA, HUB)
"""Names of the checks, in their order."""
# All rows are read, and the libraries are loaded.
_DEADLINE_S = 600.0


def diagnose_training(config: TrainerConfig, command: str, subject: str, only: Sequence[str] = ()) -> Diagnosis:
    """Examines this machine for a training on data; nothing is started.

    Args:
        config: of the training.
        command: `sft`, `rm` or `dpo`.
        subject: it, in words.
        only: names of the checks to make; empty: all.

    Raises:
        ConfigError: a name is not one of `NAMES`.
    """
    if unknown := [name for name in only if name not in NAMES]:
        raise ConfigError(f"there is no check {unknown[0]!r} of `{command}`", hint=f"checks: {', '.join(NAMES)}")
    examine: dict[str, Callable[[], Iterator[Finding]]] = {
        MODEL: partial(_check_model, config, command),
        DATA: partial(_check_rows, config, command, subject),
        HUB: partial(_check_hub, config),
    }
    checks = [Check(name, examine[name], _DEADLINE_S) for name in NAMES if not only or name in only]
    return Diagnosis(subject, run_checks(checks))


def _check_model(config: TrainerConfig, command: str) -> Iterator[Finding]:
    path = Path(config.model.path)
    if path.is_dir():
        with IMPORTING:
            from rollmesh.learner.examination.folder import READ_S, examine

            found = examine(path, "model.path", backbone_only=command == "rm", read_s=READ_S)
        for notice in found:
            yield warning(MODEL, notice, "nothing is wrong where that is meant")
        yield ok(MODEL, f"model.path {path} is whole")


def _check_rows(config: TrainerConfig, command: str, subject: str) -> Iterator[Finding]:
    with IMPORTING:
        from rollmesh.data.check_rows import check_rows

        report = check_rows(config, examples=1)
    remedy = f"`rollmesh data check {subject} --for {command}` names the rows"
    for found, severity in ((report.errors, problem), (report.warnings, warning)):
        for finding in found:
            first = f" (first: {finding.examples[0]})" if finding.examples else ""
            yield severity(DATA, f"{finding.count} x {finding.what}{first}", remedy)
    if not report.errors:
        yield ok(DATA, f"{sum(source.rows for source in report.sources)} rows can be read")


def _check_hub(config: TrainerConfig) -> Iterator[Finding]:
    wanted = {} if Path(config.model.path).is_dir() else {"model.path": config.model.path}
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval or ())):
        wanted |= {f"{key} {source.label}": source.path for source in sources if is_hub_id(source.path)}
    yield from judge_hub(os.environ, wanted, {path for path in wanted.values() if is_cached(path)})
