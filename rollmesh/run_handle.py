"""A run by its folder, in Python: its results, its checkpoints as models, and requests while it is in progress."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.mesh.errors import DataError
from rollmesh.report.metrics import Record, run_records
from rollmesh.report.samples import read_samples
from rollmesh.report.summary import Summary, read_summary
from rollmesh.run_files import read_any_config, read_launch, trained_by
from rollmesh.training.state import training_state
from rollmesh.training.summary import TrainingSummary, training_records

if TYPE_CHECKING:
    from rollmesh.mesh.config.models import Config
    from rollmesh.mesh.config.trainers.configs import TrainerConfig

LATEST = "latest"
"""Name that stands for the checkpoint that was written last."""
_ANSWER_S = 30.0
_CHECKPOINT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of a run.

    Attributes:
        name: of its folder, as `Run.export` takes it.
        incarnation, version: of its weights.
        folder: where it is.
        is_best: `eval.metric` was best for it.
    """

    name: str
    incarnation: int
    version: int
    folder: Path
    is_best: bool


class Run:
    """A run of `rollmesh run` or `rollmesh.train`, or of a training on data, by its folder; nothing is kept open.

    Args:
        folder: of the run, `run.dir`/`run.name`.

    Raises:
        DataError: it is not a run folder.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        _ = self.config

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def config(self) -> Config | TrainerConfig:
        """The configuration with which the run was last taken over."""
        return read_any_config(self.folder)

    @property
    def run_id(self) -> str:
        """The id by which trackers know the run.

        Raises:
            DataError: no learner has taken it over yet.
        """
        from rollmesh.learner.recovery.run_id import read_run_id

        if (known := read_run_id(self.folder)) is None:
            raise DataError(f"run {self.folder} has no id yet", hint="its first learner makes one")
        return known

    def metrics(self) -> list[Record]:
        """The records of all steps and evaluations, those of steps that a restart has undone left out."""
        return run_records(self.folder) if trained_by(self.folder) is None else training_records(self.folder)

    def samples(self, number: int = 10, *, worst: bool = False) -> list[Mapping[str, Any]]:
        """Kept responses, the newest first.

        Args:
            number: of them at most.
            worst: those with the lowest rewards instead.

        Raises:
            DataError: the run has kept none.
        """
        return read_samples(self.folder, worst=worst, number=number)

    def summary(self) -> Summary | TrainingSummary:
        """The summary of a run that has ended; of a training on data as far as it went.

        Raises:
            DataError: there is none yet.
        """
        return training_state(self.folder) or read_summary(self.folder)

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that are there, by incarnation and version."""
        from rollmesh.learner.checkpoint.best import best_checkpoint

        root = self.folder / CHECKPOINTS_NAME
        best = best_checkpoint(root)
        return [
            Checkpoint(
                path.name, policy.incarnation, policy.version, path, best is not None and best.checkpoint == path.name
            )
            for policy, path in list_checkpoints(root)
        ]

    def export(self, to: Path | str, checkpoint: str = LATEST) -> Path:
        """Writes a checkpoint as a Hugging Face model folder.

        Args:
            to: the folder; it must not hold files yet.
            checkpoint: name of one, `best`, or `latest`.

        Returns:
            The folder.

        Raises:
            ConfigError: the folder is not empty.
            DataError: no such checkpoint, or one that cannot be read.
        """
        from rollmesh.checkpoint_choice import checkpoint_path
        from rollmesh.export import export_checkpoint, latest_checkpoint

        chosen = latest_checkpoint(self.folder) if checkpoint == LATEST else checkpoint_path(self.folder, checkpoint)
        export_checkpoint(self.config, chosen, Path(to))
        return Path(to)

    def push(self, repository: str, checkpoint: str = LATEST, *, private: bool = True) -> str:
        """Uploads a checkpoint as a model to the Hugging Face Hub; returns the URL of the commit.

        Args:
            repository: `NAMESPACE/NAME`; it is made where it does not exist.
            checkpoint: name of one, `best`, or `latest`.
            private: of a repository that is made.

        Raises:
            ConfigError: the hub refuses the token or the name.
            DataError: no such checkpoint, or one that cannot be read.
            UnreachableError: the hub does not answer.
        """
        from rollmesh.push import push_folder

        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".push-") as scratch:
            model = self.export(Path(scratch, "model"), checkpoint)
            return push_folder(model, repository, private=private, message=f"{self.run_id}: {checkpoint} checkpoint")

    def request_checkpoint(self, timeout_s: float = _CHECKPOINT_S) -> Path:
        """Has the run in progress write a checkpoint after its present step; returns its folder once it is durable.

        Args:
            timeout_s: longest wait.

        Raises:
            DataError: the run is not in progress.
            RollmeshError: the learner could not write it in time.
        """
        from rollmesh.launcher.learner_requests import request_checkpoint

        return Path(self._ask_learner(request_checkpoint, timeout_s, timeout_s))

    def stop(self) -> None:
        """Has the run in progress end after its present step, with a checkpoint; returns at once.

        Raises:
            DataError: the run is not in progress.
            RollmeshError: its learner does not answer.
        """
        from rollmesh.launcher.learner_requests import stop_learner

        self._ask_learner(stop_learner, _ANSWER_S)

    def _ask_learner(self, request: Any, within_s: float, *arguments: Any) -> Any:
        from rollmesh.launcher.folder import read_mesh
        from rollmesh.launcher.learner_requests import learner_address
        from rollmesh.launcher.mesh_client import MeshClient
        from rollmesh.mesh.runtime.async_bridge import AsyncBridge

        mesh, security = read_mesh(self.folder), read_launch(self.folder).security

        async def ask() -> Any:
            async with MeshClient(mesh, security) as client:
                address = learner_address((await client.members()).members)
            return await request(address, security, *arguments)

        # A notebook's thread has an event loop of its own.
        bridge = AsyncBridge("request")
        try:
            return bridge.call(ask(), within_s + _ANSWER_S)
        finally:
            bridge.close()
