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

from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import DataError

MODEL_KEY = "model"
"""Beginning of the names of the model's tensors, before a dot."""
_STATE_FILE = "state.json"


def save_state(
    folder: Path, world: World, model: nn.Module, optimizer: Optimizer, steps: int, extra: dict[str, object]
) -> None:
    """Writes everything into an existing, empty folder; collective. A rank returns when its own part is written.

    Args:
        folder: the same on every rank.
        world: the ranks.
        model, optimizer: what to save.
        steps: optimizer steps done.
        extra: JSON of the caller.

    Raises:
        OSError: the disk refuses, on this rank.
    """
    try:
        with quiet():
            dcp.save(_state(model, optimizer), checkpoint_id=str(folder), no_dist=world.processes == 1)
    except CheckpointException as failed:
        # All ranks learn of it here; those that met it raise it.
        if world.process in failed.failures:
            error, _ = failed.failures[world.process]
            raise OSError(f"{type(error).__name__}: {error}") from failed
        return
    if world.process == 0:
        (folder / _STATE_FILE).write_text(json.dumps({"steps": steps, "extra": extra}), encoding="utf-8")


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
        with quiet():
            dcp.load(state, checkpoint_id=str(folder), no_dist=world.processes == 1)
    except (OSError, CheckpointException, RuntimeError, ValueError) as error:
        # torch's message names the tensor at its end, after a trace.
        lines = str(error).strip().splitlines()
        raise DataError(
            f"cannot load checkpoint {folder}: {type(error).__name__}: {lines[-1] if lines else ''}",
            hint="is it of this model? continue with the model that it was written with, or start a run under another "
            "name",
        ) from error
    set_state_dict(model, optimizer, model_state_dict=state[MODEL_KEY], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state["rng"])
    return int(saved["steps"]), saved["extra"]


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    _complete(optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {MODEL_KEY: model_state, "optimizer": optimizer_state, "rng": torch.get_rng_state()}


def _complete(optimizer: Optimizer) -> None:
    """Gives moments of no step to parameters that have none: optimizers make them with a parameter's first gradient.

    `get_state_dict` would do it for all parameters or for none, and for none where a step has left gradients without
    being taken. Such a checkpoint could not be loaded.
    """
    optimizer.zero_grad()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fresh = [parameter for parameter in parameters if parameter not in optimizer.state]
    if not fresh:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in fresh:
        optimizer.state[parameter]["step"].zero_()


@contextmanager
def quiet() -> Iterator[None]:
    """Silences torch's warning that a single process reads and writes."""
    # One process without a group is what `no_dist` asks for; torch warns about it all the same.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
