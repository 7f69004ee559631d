"""The Hugging Face folders that a complete training leaves.

Invariant: each is a whole model, or is not there. Next to it stands the checkpoint that it was made of, so that a
training that is begun again writes no folder twice.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from rollmesh.learner.checkpoint.hf_folders import FOLDER
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.checkpoint.store import load_checkpoint
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.engines.tensors.hf_folder import write_adapter
from rollmesh.learner.trainers.checkpoints import Checkpoints
from rollmesh.learner.trainers.objectives.interface import Objective
from rollmesh.learner.written.adapter import check_written_adapter
from rollmesh.learner.written.folder import Expected, finish_folder
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically

log = logging.getLogger(__name__)
BEST = "best"
ADAPTER = "-adapter"
"""End of the name of a folder with the adapter alone, next to that of the model into which it is merged."""


def leave_folders(engine: Engine, objective: Objective, config: TrainerConfig, checkpoints: Checkpoints) -> None:
    """Writes the folders of `checkpoint.hf` that are not there yet; collective.

    Args:
        engine: with the weights of the last checkpoint; those of the best one may take their place.
        objective: writes a folder.
        config: of the run.
        checkpoints: of the training.

    Raises:
        DataError: a disk refuses.
    """
    due = _due(config, checkpoints) if engine.layout.leads else {}
    (said,) = filter(None, engine.world.gather_bytes(json.dumps(due).encode() if engine.layout.leads else b""))
    loaded, lora = checkpoints.last_name, config.learner.lora
    for which, name in json.loads(said).items():
        if name != loaded:
            load_checkpoint({ACTOR: engine}, config.run.folder / CHECKPOINTS_NAME / name)
            loaded = name
        if lora is not None:
            # First, for the folder of the model says that both are there.
            _leave(engine, lambda of, out: write_adapter(of, config.model, lora, out), config, which + ADAPTER, name)
        _leave(engine, objective.export, config, which, name)


def _due(config: TrainerConfig, checkpoints: Checkpoints) -> dict[str, str]:
    """The checkpoint of each folder that is to be written; the last one's weights are there first."""
    due: dict[str, str] = {}
    for which in sorted(config.checkpoint.hf, reverse=True):
        name = checkpoints.best_name() if which == BEST else checkpoints.last_name
        if not name:
            log.warning("no checkpoint is the best, so hf/%s is not written: see eval.metric", which)
        elif not _is_there(config, which, name):
            due[which] = name
    return due


def _is_there(config: TrainerConfig, which: str, name: str) -> bool:
    out = config.run.folder / FOLDER / which
    made_of = out.with_name(f".{which}")
    return out.is_dir() and made_of.is_file() and made_of.read_text(encoding="utf-8") == _source(config, name)


def _source(config: TrainerConfig, name: str) -> str:
    return f"{name} {config.model.dtype}\n"


def _leave(
    engine: Engine, export: Callable[[Engine, Path], None], config: TrainerConfig, which: str, name: str
) -> None:
    """Writes the present weights as a folder; collective."""
    out = config.run.folder / FOLDER / which
    unfinished = out.with_name(f".partial-{which}")
    if engine.layout.leads:
        shutil.rmtree(unfinished, ignore_errors=True)
    export(engine, unfinished)
    failed: DataError | None = None
    if engine.layout.leads:
        try:
            if which.endswith(ADAPTER):
                check_written_adapter(unfinished, Path(config.model.path))
            else:
                finish_folder(unfinished, Expected.of(config))
            shutil.rmtree(out, ignore_errors=True)
            unfinished.rename(out)
            write_atomically(out.with_name(f".{which}"), _source(config, name))
        except OSError as error:
            failed = DataError(f"cannot write {out}: {error.strerror or error}", hint="free space there")
        except DataError as error:
            failed = error
    reasons = engine.world.gather_failures(failed, "" if failed is None else str(failed))
    if failed is not None:
        raise failed
    if reason := next(filter(None, reasons), ""):
        raise DataError(reason)
    if engine.layout.leads:
        log.info("%s has the trained %s", out, "adapter" if which.endswith(ADAPTER) else "model")
