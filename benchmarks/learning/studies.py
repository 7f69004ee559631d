"""Parts that the studies of learning share: the demonstration's data per seed, runs one at a time, lasting results.

A study is many runs of the real mesh. Every finished run is written to the result file at once. A study that is started
again with the same file continues with the runs that are missing; failed ones are tried again.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import REPOSITORY, machine, write_json, yardstick
from benchmarks.mesh_run import MeshRun, RunFailedError, run_mesh

DEMO = REPOSITORY / "examples" / "demo" / "demo.yaml"


def prepare_demo(folder: Path, seed: int) -> Path:
    """Writes the demonstration's model and problems of a seed, where they are not there yet; returns the folder."""
    if not (folder / "prepared.json").exists():
        command = [sys.executable, "-m", "examples.demo.prepare", "--out", str(folder), "--seed", str(seed)]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, timeout=300)
    return folder


def demo_config(data: Path, folder: Path, name: str, seed: int, *changes: Mapping[str, Any]) -> dict[str, Any]:
    """The demonstration's configuration on prepared data, with changes laid over it, the last one on top.

    `algorithm` is replaced as a whole, every other section key by key.
    """
    config: dict[str, Any] = yaml.safe_load(DEMO.read_text(encoding="utf-8"))
    places = {
        "run": {"name": name, "dir": str(folder), "seed": seed},
        "model": {"path": str(data / "model")},
        "data": {"train": str(data / "train.parquet"), "eval": str(data / "eval.parquet")},
        # Nothing is resumed here, and what is not measured shall not disturb.
        "checkpoint": {"every_s": None},
        "logging": {"samples_per_step": 0},
        "network": {"metrics": False},
    }
    for change in (places, *changes):
        config = overlay(config, {key: value for key, value in change.items() if key != "algorithm"})
        if "algorithm" in change:
            config["algorithm"] = copy.deepcopy(change["algorithm"])
    return config


def fresh(folder: Path) -> Path:
    """The folder of a run, without what an interrupted one has left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merged key by key, at every depth."""
    merged = dict(below)
    for key, value in above.items():
        before = merged.get(key)
        merged[key] = overlay(before, value) if isinstance(before, dict) and isinstance(value, Mapping) else value
    return merged


@dataclass
class Results:
    """A result file: one record per run, by key; rewritten after every run.

    Attributes:
        path: the file; none: nothing is kept.
        benchmark: its name.
        records: key -> record.
    """

    path: Path | None
    benchmark: str
    records: dict[str, dict[str, Any]]

    @classmethod
    def open(cls, path: Path | None, benchmark: str) -> Results:
        """Reads what an earlier start has left.

        Raises:
            ValueError: the file holds another benchmark's results.
        """
        if path is None or not path.exists():
            return cls(path, benchmark, {})
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("benchmark") != benchmark:
            raise ValueError(f"{path} holds {document.get('benchmark')!r}, not {benchmark!r}")
        return cls(path, benchmark, document["runs"])

    def done(self, key: str) -> bool:
        """True where the run has been measured."""
        return key in self.records and "error" not in self.records[key]

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        """The records of runs that ended well."""
        return {key: record for key, record in self.records.items() if "error" not in record}

    def run(
        self,
        key: str,
        config: Mapping[str, Any],
        what: Mapping[str, Any],
        measure: Callable[[MeshRun], dict[str, Any]],
        *,
        timeout_s: float = 900.0,
    ) -> dict[str, Any]:
        """Runs a configuration to its end and keeps what `measure` finds, or how it failed.

        Args:
            key: of the run.
            config: for `rollmesh run`.
            what: what distinguishes the run; stands in the record with the algorithm's settings.
            measure: results of the finished run.
        """
        record: dict[str, Any] = {**what, "algorithm": config["algorithm"], "yardstick": yardstick()}
        try:
            record |= measure(run_mesh(dict(config), timeout_s=timeout_s))
        except RunFailedError as error:
            record["error"] = str(error)
        self.records[key] = record
        if self.path is not None:
            write_json(self.path, {"benchmark": self.benchmark, "machine": machine(), "runs": self.records})
        return record


def held_out(run: MeshRun) -> list[dict[str, Any]]:
    """The evaluations of a run that came to a result, in their order.

    Raises:
        RunFailedError: there is none.
    """
    looks = [look for look in run.summary["held_out"] if look["reward"] is not None]
    if not looks:
        raise RunFailedError(f"{run.folder}: no evaluation came to a result")
    return looks


def staleness(run: MeshRun, skip: int = 0) -> tuple[float, int]:
    """Mean and maximum staleness of the trained tokens, in versions, after the first `skip` batches."""
    totals: dict[int, int] = {}
    for step in run.steps[skip:]:
        for age, count in step["staleness/histogram"].items():
            totals[int(age)] = totals.get(int(age), 0) + count
    tokens = sum(totals.values())
    return (sum(age * count for age, count in totals.items()) / tokens if tokens else 0.0), max(totals, default=0)
