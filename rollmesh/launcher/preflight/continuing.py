"""The continuation of a run in a used folder: its step, and the changes of its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from rollmesh.launcher import folder as folders
from rollmesh.launcher.preflight.finished import why_finished
from rollmesh.launcher.preflight.former_groups import FormerGroups, former_groups
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, newest_version, version_of
from rollmesh.learner.recovery.run_identity import held_out_files, nothing_trained
from rollmesh.mesh.config import yaml_text
from rollmesh.mesh.config.buffer import BufferSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.report.changes import describe_changes
from rollmesh.report.metrics import is_training, run_records

# The identity of a run, before it has trained anything.
_OF = ("model.", "algorithm.", "reward.", "data.")
# The safest first.
_DURABILITIES: tuple[str, ...] = get_args(BufferSection.model_fields["durability"].annotation)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A run that continues.

    Attributes:
        folder: of the run.
        step: of its checkpoint; 0 without one.
        trained: the last step that was trained.
        changes: of the configuration, see `changes`.
        former: groups that were begun before the changes; None if they are like the others.
        starts_over: nothing was trained, and the run's identity has changed: its contents are of no use any more.
        finished: why nothing is left to do; empty where something is.
        start_from: name of the checkpoint that was asked for; empty where it is the newest one.
    """

    folder: Path
    step: int
    trained: int
    changes: tuple[str, ...]
    former: FormerGroups | None = None
    starts_over: bool = False
    finished: str = ""
    start_from: str = ""

    @classmethod
    def of(
        cls, config: Config, edited: Sequence[str] = (), *, inputs_differ: bool = False, start_from: Path | None = None
    ) -> Continuation | None:
        """The continuation; None where no learner has taken a run over in its folder yet.

        Args:
            config: of the present attempt.
            edited: files of rewards, agents and held-out data with another content than before.
            inputs_differ: model or data have changed.
            start_from: checkpoint to continue from; None: the newest.

        Raises:
            ConfigError: it would begin with an empty Redis, because the data of the last launch would not be read.
            DataError: the configuration in the folder is damaged.
        """
        folder = config.run.folder
        if not folders.takeover_stamp(folder):
            return None
        before = _configuration(folder / folders.CONFIG)
        changes = [*_lowered_durability(before["buffer"]["durability"], config.buffer)]
        described = describe_changes(before, config.model_dump(mode="json"))
        changes += described
        changes += [f"{path} (edited)" for path in edited]
        checkpoint = newest_version(folder / CHECKPOINTS_NAME) if start_from is None else version_of(start_from.name)
        trained = max((int(record["step"]) for record in run_records(folder) if is_training(record)), default=0)
        other = inputs_differ or bool(edited) or any(change.startswith(_OF) for change in changes)
        step = 0 if checkpoint is None else checkpoint.version
        keys = [change.split(" ")[0] for change in described]
        held_out = {str(path) for path in held_out_files(config.data.eval)}
        return cls(
            folder,
            step,
            trained,
            tuple(changes),
            former_groups(before, config, keys, edited=not held_out.issuperset(edited), step=step, trained=trained),
            starts_over=other and nothing_trained(folder),
            finished=why_finished(config, changes) if start_from is None else "",
            start_from=start_from.name if start_from is not None else "",
        )

    def lines(self, *, named: bool) -> list[str]:
        """The continuation in words.

        Args:
            named: the run has a name of its own.
        """
        later = self.trained - self.step
        what = "undone" if self.start_from else "trained again"
        again = f"; {later} later steps are {what}" if later > 0 else ""
        where = f", checkpoint {self.start_from}" if self.start_from else ", its newest checkpoint"
        where = where if self.step or self.start_from else ": it has no checkpoint"
        lines = [f"continues from step {self.step}{where}{again}"]
        if not named:
            lines.append("run.name is not set: --run.name=NAME begins another run, --fresh starts this one over")
        if self.changes:
            lines.append(f"changed since the last launch: {'; '.join(self.changes)}")
        if self.former is not None:
            lines.append(self.former.line())
        return lines


def _configuration(path: Path) -> Mapping[str, Any]:
    """The run's configuration as written: an earlier version of Rollmesh may have had other keys."""
    try:
        values = yaml_text.parse(path.read_text(encoding="utf-8"))
        if values["buffer"]["durability"] in _DURABILITIES and all(isinstance(each, dict) for each in values.values()):
            return cast("Mapping[str, Any]", values)
        why = "it is not the configuration of a run"
    except (OSError, ValueError, yaml.YAMLError, TypeError, LookupError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise DataError(
        f"{path} is damaged: {why}",
        hint="restore it from a copy (services/config.yaml is that of the last launch), or start over with --fresh",
    )


def _lowered_durability(before: str, buffer: BufferSection) -> list[str]:
    """The protection by Redis that a run gives up when it continues."""
    now = buffer.durability
    if buffer.redis is not None or _DURABILITIES.index(now) <= _DURABILITIES.index(before):
        return []
    if now == "none":
        raise ConfigError(
            f"buffer.durability: none, but the run was kept with {before}: its groups would not be read",
            hint=f"continue with --buffer.durability={before}, or choose another --run.name",
        )
    return [f"buffer.durability {before} -> {now} (Redis may lose its last seconds with the machine)"]
