"""The run folder as the launcher uses it: one launcher at a time, the mesh address, the configuration of a launch.

Layout:
- `config.yaml` and `inputs.json`: the run's identity (`learner.recovery.run_identity`);
- `run_id`: the id by which trackers know it;
- `mesh.json`: the mesh address, while the run is in progress;
- `logs/`, `services/`: ready files, and the configuration of the last launch;
- `metrics.jsonl` and `samples.jsonl` of the learner, `mesh.jsonl` of the launcher;
- `summary.json`, `report.html`, and the services' data (checkpoints, Redis).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmesh.learner.recovery.run_identity import CONFIG
from rollmesh.mesh.config import save_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, DataError, RunBusyError
from rollmesh.mesh.files import write_atomically
from rollmesh.mesh.private_files import is_open_to_others, private_folder
from rollmesh.run_files import LAUNCH, LOCK, is_in_use, is_run, trained_by

MESH = "mesh.json"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run folder for this process; the kernel frees it whatever way the process ends.

    Raises:
        RunBusyError: another launcher works there.
        ConfigError: the folder cannot be created.
    """
    try:
        private_folder(folder)
        lock = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot use run folder {folder}: {error.strerror}", hint="set run.dir to a folder you may write to"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunBusyError(
                f"run folder {folder} is in use: another command works there",
                hint="stop that one, or choose another --run.name",
            ) from error
        yield


def permission_warnings(folder: Path) -> list[str]:
    """Warnings about a run folder that other users may read."""
    if not is_open_to_others(folder):
        return []
    return [f"other users of this machine may look into {folder}; `chmod 700 {folder}` closes it to them"]


def set_aside(folder: Path, suffix: str) -> Path | None:
    """Renames the folder of a run, so that its name is free; None without a folder.

    Raises:
        RunBusyError: another launcher works there.
        ConfigError: it cannot be renamed.
    """
    if not folder.exists():
        return None
    kept = folder.with_name(f"{folder.name}.{suffix}")
    with locked(folder):
        try:
            return folder.rename(kept)
        except OSError as error:
            raise ConfigError(f"cannot rename {folder} to {kept}: {error.strerror}") from error


def takeover_stamp(folder: Path) -> int:
    """A stamp that changes when a learner takes the run over; 0 before the first takeover."""
    try:
        return (folder / CONFIG).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def write_launch(config: Config) -> Path:
    """Writes the configuration for the services of this launch and returns its path."""
    path = config.run.folder / LAUNCH
    path.parent.mkdir(parents=True, exist_ok=True)
    save_config(config, path)
    return path


def write_mesh(folder: Path, address: str) -> None:
    """Makes the mesh address known to `rollmesh status` and the like."""
    write_atomically(folder / MESH, json.dumps({"address": address, "pid": os.getpid()}))


def remove_mesh(folder: Path) -> None:
    (folder / MESH).unlink(missing_ok=True)


def learner_starts(folder: Path) -> bool:
    """True where a launcher works there now, and no learner has taken the run over since its mesh was announced."""
    try:
        announced = (folder / MESH).stat().st_mtime_ns
    except FileNotFoundError:
        return False
    return is_in_use(folder) and takeover_stamp(folder) < announced


def read_mesh(folder: Path) -> str:
    """The mesh address of a run in progress.

    Raises:
        DataError: the folder is not a run folder, or that of a training on data; or the run is not in progress.
    """
    if (command := trained_by(folder)) is not None:
        raise DataError(
            f"{folder} is the folder of `rollmesh {command}`, which has no mesh that could be asked",
            hint=f"`rollmesh status {folder}` says how it goes; Ctrl-C or SIGTERM ends it with a checkpoint",
        )
    try:
        address = str(json.loads((folder / MESH).read_text(encoding="utf-8"))["address"])
    except FileNotFoundError:
        address = ""
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder / MESH} cannot be read: {error}", hint="give the address with --mesh") from error
    if address and is_in_use(folder):
        return address
    if not is_run(folder):
        raise DataError(f"{folder} is not a run folder", hint="give the folder of a run, or --mesh host:port")
    if address:
        raise DataError(
            f"run {folder} is not in progress: its launcher was killed, and its services have ended with it",
            hint="the same `rollmesh run`, without --fresh and --from-checkpoint, continues it; its log, "
            "logs/launcher.log, has its last messages",
        )
    raise DataError(
        f"run {folder} is not in progress according to its folder",
        hint=f"give its mesh with --mesh; if it has ended, `rollmesh report {folder}` says how it went",
    )
