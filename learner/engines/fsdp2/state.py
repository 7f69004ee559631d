"""Sharded state on disk: model, optimizer and random state through torch.distributed.checkpoint.

Written by all ranks, each its shards; read at any number of ranks. `state.json` holds the small rest.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from learner.engines.fsdp2.world import World
from mesh.errors import DataError

_STATE_FILE = "state.json"


def save_state(
    folder: Path, world: World, model: nn.Module, optimizer: Optimizer, steps: int, extra: dict[str, object]
) -> None:
    """Writes everything into an existing, empty folder; collective.

    Args:
        folder: the same on every rank.
        world: the ranks.
        model, optimizer: what to save.
        steps: optimizer steps done.
        extra: JSON of the caller.

    Raises:
        OSError: the disk refuses.
    """
    try:
        with _quiet():
            dcp.save(_state(model, optimizer), checkpoint_id=str(folder), no_dist=world.size == 1)
    except CheckpointException as failed:
        causes = {f"{type(error).__name__}: {error}" for error, _ in failed.failures.values()}
        raise OSError("; ".join(sorted(causes))) from failed
    if world.rank == 0:
        (folder / _STATE_FILE).write_text(json.dumps({"steps": steps, "extra": extra}), encoding="utf-8")
    world.barrier()


def load_state(folder: Path, world: World, model: nn.Module, optimizer: Optimizer) -> tuple[int, dict[str, object]]:
    """Restores what `save_state` wrote; collective.

    Returns:
        Optimizer steps done, and the caller's `extra`.

    Raises:
        DataError: the folder is no checkpoint, or one of another model.
    """
    try:
        saved = json.loads((folder / _STATE_FILE).read_text(encoding="utf-8"))
        state = _state(model, optimizer)
        with _quiet():
            dcp.load(state, checkpoint_id=str(folder), no_dist=world.size == 1)
    except (OSError, json.JSONDecodeError, CheckpointException, RuntimeError, ValueError) as error:
        raise DataError(
            f"cannot load checkpoint {folder}: {type(error).__name__}: {error}",
            hint="remove it, or start a run under another name",
        ) from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state["rng"])
    return int(saved["steps"]), saved["extra"]


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    fresh = not optimizer.state
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if fresh:
        # AdamW has its moments only from a step on. `get_state_dict` has taken one, of nothing, and counted it.
        for values in optimizer.state.values():
            values["step"].zero_()
        model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "rng": torch.get_rng_state()}


@contextmanager
def _quiet() -> Iterator[None]:
    # One process without a group is what `no_dist` asks for; torch warns about it all the same.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
