"""Sharded state on disk: model, optimizer and random state through torch.distributed.checkpoint.

Written by all processes, each its shards; read by any number of them. `state.json` holds the small rest. The bytes that
are written are a copy in host memory, so that training continues meanwhile.

Every process saves the states of torch's default generators, of the CPU and of its device: 5 KB. Our own code draws
from neither while it trains, but a user's algorithm or model may.
"""

from __future__ import annotations

import json
import shutil
import warnings
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from rollmesh.learner.engines.interface import STATE_NAME
from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import DataError

MODEL_KEY = "model"
"""Beginning of the names of the model's tensors, before a dot."""
# One process without a group is what `no_dist` asks for; torch warns about it all the same, in whatever thread writes.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
_RANDOM_KEY = "random"
# Longest wait for a disk before an engine is closed.
_CLOSE_S = 600.0


class _DiskWriter(dcp.FileSystemWriter):
    """Raises the disk's own error where torch raises its echo of it; with the free space, which is soon another one."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            refusal: BaseException | None = error
            while refusal is not None and not (isinstance(refusal, OSError) and refusal.strerror):
                refusal = refusal.__cause__ or refusal.__context__
            if refusal is None:
                raise
            free = shutil.disk_usage(self.checkpoint_id).free
            raise OSError(refusal.errno, f"{refusal.strerror}, {free / 1e9:.1f} GB free on its disk") from error


class StateWriter:
    """Writes the state of one engine, one checkpoint at a time; collective.

    Args:
        world: the processes.

    The writing thread has a process group of its own from the start, with the deadline of all others. Writes may differ
    by as much between processes. The copy's memory is kept from one checkpoint to the next: to get fresh memory takes
    longer than to fill it. It is pinned on CUDA.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = world.lend_group()
        self._stager: DefaultStager | None = None
        self._random: dict[str, Tensor] = {}
        self._written: Future[None] | None = None

    def begin(
        self, folder: Path, model: nn.Module, optimizer: Optimizer, steps: int, extra: dict[str, object]
    ) -> Future[None]:
        """Copies everything, and has it written into an existing, empty folder; collective.

        Args:
            folder: the same for every process.
            model, optimizer: what to save.
            steps: optimizer steps done.
            extra: JSON of the caller.

        Returns:
            Done when this process's part is written; an OSError where the disk refuses it.
        """
        if self._written is not None and not self._written.done():
            raise RuntimeError("the last checkpoint is still being written")
        if self._stager is None:
            pinned = self._world.device.type == "cuda"
            options = StagingOptions(
                pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
            )
            self._stager = DefaultStager(options)
        # Into the same memory each time: its copy is pinned.
        for name, current in _random_states(self._world.device).items():
            self._random.setdefault(name, current).copy_(current)
        random = {"processes": self._world.processes, "generators": list(self._random)}
        text = json.dumps({"steps": steps, "random": random, "extra": extra})
        written: Future[None] = Future()
        saving = dcp.async_save(
            {**_state(model, optimizer), _RANDOM_KEY: {str(self._world.process): self._random}},
            # All is on the host. Copying ahead takes a stream, and the present device of its thread is the first one.
            storage_writer=_DiskWriter(folder, per_thread_copy_ahead=0),
            process_group=self._group,
            async_stager=self._stager,
            no_dist=self._world.processes == 1,
        )
        assert isinstance(saving, Future)
        saving.add_done_callback(lambda done: self._finish(done, folder, text, written))
        self._written = written
        return written

    def _finish(self, saving: Future[object], folder: Path, text: str, written: Future[None]) -> None:
        try:
            if self._saved(saving) and self._world.process == 0:
                (folder / STATE_NAME).write_text(text, encoding="utf-8")
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller waits for it
            written.set_exception(error)
        else:
            written.set_result(None)

    def _saved(self, saving: Future[object]) -> bool:
        """False where the part of another process could not be written, which that one reports."""
        try:
            saving.result()
        except CheckpointException as failed:
            # All processes learn of it here; those that met it raise it.
            if self._world.process in failed.failures:
                error, _ = failed.failures[self._world.process]
                if isinstance(error, OSError):
                    raise error from failed
                raise OSError(f"{type(error).__name__}: {error}") from failed
            return False
        return True

    def close(self) -> None:
        """Waits for a write that is under way, but not for ever, and frees the copy's memory."""
        if self._written is not None:
            wait([self._written], _CLOSE_S)
        if self._group is not None and (self._written is None or self._written.done()):
            self._world.take_back(self._group)
        self._group = None
        if self._stager is not None:
            self._stager.close()


def load_state(folder: Path, world: World, model: nn.Module, optimizer: Optimizer) -> tuple[int, dict[str, object]]:
    """Restores what a `StateWriter` wrote; collective.

    Returns:
        Optimizer steps done, and the caller's `extra`.

    Raises:
        DataError: the folder is no checkpoint, or one of another model.
    """
    try:
        saved = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
        state = _state(model, optimizer)
        if random := _saved_random_states(saved.get("random"), world):
            state[_RANDOM_KEY] = random
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
    for states in random.values():
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], world.device)
    return int(saved["steps"]), saved["extra"]


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    _complete(optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {MODEL_KEY: model_state, "optimizer": optimizer_state}


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """States of the generators from which a process draws where it names none."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda" and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _saved_random_states(written: dict[str, Any] | None, world: World) -> dict[str, dict[str, Tensor]]:
    """Room for the states that a process continues from, under the number of the one that saved them.

    Args:
        written: says what was saved; None: nothing.
        world: another number of processes continues from the first one's, since all begin with the same.
    """
    if written is None:
        return {}
    process = world.process if written["processes"] == world.processes else 0
    states = _random_states(world.device)
    return {str(process): {name: states[name] for name in states if name in written["generators"]}}


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
