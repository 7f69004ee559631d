"""MLflow, through its client alone: the fluent interface keeps the active run in globals of the process."""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollmesh.learner.metrics.trackers.interface import Record, Sample, Tracker, numbers
from rollmesh.learner.metrics.trackers.sample_table import COLUMNS, TABLE, rows

RUN_TAG = "rollmesh.run_id"
# MLflow's own limits.
_METRICS_PER_BATCH, _PARAMS_PER_BATCH, _PARAM_LENGTH = 1000, 100, 6000
_NO_NAME = re.compile(r"[^/\w.\- :]")
# Tables that MLflow's page shows: their names have to fit into one tag.
_SHOWN_TABLES = 50


class MlflowTracker(Tracker):
    """A run in an MLflow experiment; samples are tables among its artifacts.

    Args:
        uri: of a tracking server, or of a store.
        experiment: its name; it is made where it is missing.
        name: of the run, for people.
        run_id: kept as a tag, by which a run that exists is found and continued.
        config: its values become parameters, as far as the run has none of these names.

    Raises:
        mlflow.exceptions.MlflowException: the server does not answer, or refuses.
    """

    def __init__(self, uri: str, experiment: str, *, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        # A folder of files cannot have both `reward` and `reward/math`.
        self._separator = "." if (in_files := urlsplit(uri).scheme in ("", "file")) else "/"
        if in_files:
            # MLflow asks for this consent before it writes to a folder.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # Reports of its own use to its makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        at = self._client.create_experiment(experiment) if found is None else found.experiment_id
        runs = self._client.search_runs([at], filter_string=f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
        run = runs[0] if runs else self._client.create_run(at, tags={RUN_TAG: run_id}, run_name=name)
        self._id = run.info.run_id
        if runs:
            self._client.update_run(self._id, status="RUNNING")
        # Also of a run that was made, but could not be filled. Parameters that it has cannot change.
        self._log_config(config, known=run.data.params)
        shown = json.loads(run.data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        self._tables: deque[dict[str, str]] = deque(shown, maxlen=_SHOWN_TABLES)

    def log(self, step: int, record: Record) -> None:
        from mlflow.entities import Metric

        now = int(1000 * record.get("time", time.time()))
        metrics = [Metric(self._name(key), value, now, step) for key, value in numbers(record).items()]
        for start in range(0, len(metrics), _METRICS_PER_BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + _METRICS_PER_BATCH])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        file = f"{TABLE}/step-{step:08}.json"
        self._client.log_text(self._id, json.dumps({"columns": COLUMNS, "data": rows(samples)}), file)
        table = {"path": file, "type": "table"}
        if table not in self._tables:
            self._tables.append(table)
        self._client.set_tag(self._id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*self._tables]))

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _name(self, metric: str) -> str:
        return _NO_NAME.sub("_", metric).replace("/", self._separator)

    def _log_config(self, config: Mapping[str, Any], known: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(key, value[:_PARAM_LENGTH]) for key, value in _flat(config, "") if key not in known]
        for start in range(0, len(params), _PARAMS_PER_BATCH):
            self._client.log_batch(self._id, params=params[start : start + _PARAMS_PER_BATCH])


def local_store(folder: Path) -> str:
    """The URI of a store in a folder."""
    return folder.absolute().as_uri()


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Keys of the configuration with dots, as on the command line, and their values as text."""
    for key, value in values.items():
        name = _NO_NAME.sub("_", f"{prefix}{key}")
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value)
