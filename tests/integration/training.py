"""An example's run without a launcher: the real buffer, generator and learner in this process."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from rollmesh.learner.recording.recording import Recording, decode_groups
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.protos import buffer_pb2
from tests.learner.live.test_runs import assert_nothing_twice, ledger, records
from tests.learner.live.tiny import mesh_of, run_learner


class Trained:
    """A run that was trained to its end and audited.

    Attributes:
        ledger: of the training table.
    """

    def __init__(self, config: Config, counts: buffer_pb2.LedgerResponse) -> None:
        self.ledger = counts
        self._config = config

    def metric(self, name: str) -> list[float]:
        """By step, of those that have it."""
        return [record[name] for record in records(self._config) if name in record]

    def trend(self, name: str) -> tuple[float, float]:
        """Means of a metric over the first and the last fifth of the steps."""
        found = self.metric(name)
        fifth = len(found) // 5
        return fmean(found[:fifth]), fmean(found[-fifth:])

    def trajectories(self) -> list[Trajectory]:
        """The trained trajectories, as they were recorded."""
        recording = Recording(self._config.run.folder / "recording")
        batches = [recording.batch(version) for version in recording.versions]
        groups = [group for batch in batches if batch is not None for group in decode_groups(batch)]
        return [m.trajectory for group in groups for m in group.members if m.trajectory is not None]

    def texts(self, trajectory: Trajectory) -> list[tuple[bool, str]]:
        """(sampled, text), in order."""
        tokenizer = AutoTokenizer.from_pretrained(self._config.model.path)
        mask = trajectory.response_mask
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
        return [
            (bool(mask[begin]), str(tokenizer.decode(trajectory.response_ids[begin:end].tolist())))
            for begin, end in itertools.pairwise(edges)
        ]


def train(config: str, data: Path, folder: Path, **overrides: Any) -> Trained:
    """Trains an example on what its `prepare` has written; the ledger balances, and nothing is trained twice.

    Args:
        config: YAML file of the example.
        data: folder with `model`, `train.parquet` and `eval.parquet`.
        folder: for the run.
        overrides: keys with __ for the dots.
    """
    values = {
        "run__dir": str(folder),
        "model__path": str(data / "model"),
        "data__train": str(data / "train.parquet"),
        "data__eval": None,
        "reward__in_process": True,
        "rollout__replicas": 1,
        "network__metrics": False,
        **overrides,
    }
    loaded = load_config(
        Path(config), [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]
    )
    with mesh_of(loaded) as mesh:
        assert run_learner(loaded, mesh) == 0
        counts = ledger(mesh)
    assert_nothing_twice(loaded)
    return Trained(loaded, counts)
