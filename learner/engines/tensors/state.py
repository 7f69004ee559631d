"""Divided state on disk: model, optimizer and random state through torch.distributed.checkpoint.

Written by all processes, each its parts; read by any number of them, of any engine. `state.json` holds the small rest.
The bytes that are written are a copy in host memory, so that training continues meanwhile.

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
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult

from rollmesh.learner.engines.interface import STATE_NAME
from rollmesh.learner.engines.tensors.box_state import BoxCopies, BoxLoadPlanner, BoxSavePlanner
from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import DataError

MODEL_KEY = "model"
"""Beginning of the names of the model's tensors, before a dot."""
OPTIMIZER_KEY = "optimizer"
"""Beginning of the names of the optimizer's; `optimizer.state.NAME.exp_avg` is a moment of a tensor of the model."""
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


class _KeepingStager(AsyncStager):
    """Copies a state into host memory, which stays for the next copy: torch's own stager gives it up in torch 2.11.

    Args:
        pinned: tensors are on CUDA; the copy waits once for all of them.
    """

    # A copy is complete when `stage` returns.
    _synchronize_after_execute = False

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._stager = StateDictStager(pin_memory=pinned, share_memory=False)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state on the host."""
        copied: dict[str, Any] = self._stager.stage(state_dict, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()
        return copied

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Frees the memory."""
        self._stager.close()


class StateWriter:
    """Writes the state of one engine, one checkpoint at a time; collective.

    Args:
        world: the processes.
        keep_copy: the copy's memory is kept from one checkpoint to the next: to get fresh memory takes longer than to
            fill it. Else it is freed once a checkpoint is written. It is pinned on CUDA.

    The writing thread has a process group of its own from the start, with the deadline of all others. Writes may differ
    by as much between processes.
    """

    def __init__(self, world: World, *, keep_copy: bool = True) -> None:
        self._world = world
        self._keep_copy = keep_copy
        self._group = world.lend_group()
        self._stager: _KeepingStager | None = None
        self._copies = BoxCopies(pinned=world.device.type == "cuda")
        self._random: dict[str, Tensor] = {}
        self._written: Future[None] | None = None

    def begin(self, folder: Path, state: dict[str, Any], steps: int, extra: dict[str, object]) -> Future[None]:
        """Copies everything, and has it written into an existing, empty folder; collective.

        Args:
            folder: the same for every process.
            state: nested dicts of tensors, DTensors and `BoxedTensor`: the engine's, under the keys of this module. The
                same tensors each time.
            steps: optimizer steps done.
            extra: JSON of the caller.

        Returns:
            Done when this process's part is written; an OSError where the disk refuses it.
        """
        if self._written is not None and not self._written.done():
            raise RuntimeError("the last checkpoint is still being written")
        if self._stager is None:
            self._stager = _KeepingStager(pinned=self._world.device.type == "cuda")
        # Into the same memory each time: its copy is pinned.
        for name, current in _random_states(self._world.device).items():
            self._random.setdefault(name, current).copy_(current)
        random = {"processes": self._world.processes, "generators": list(self._random)}
        text = json.dumps({"steps": steps, "random": random, "extra": extra})
        written: Future[None] = Future()
        saving = dcp.async_save(
            # The stager waits for all copies, also for those of boxes.
            {**self._copies.copied(state), _RANDOM_KEY: {str(self._world.process): self._random}},
            # All is on the host. Copying ahead takes a stream, and the present device of its thread is the first one.
            storage_writer=_DiskWriter(folder, per_thread_copy_ahead=0),
            planner=BoxSavePlanner(),
            process_group=self._group,
            async_stager=self._stager,
            no_dist=self._world.processes == 1,
        )
        assert isinstance(saving, Future)
        saving.add_done_callback(lambda done: self._finish(done, folder, text, written))
        self._written = written
        return written

    def _finish(self, saving: Future[object], folder: Path, text: str, written: Future[None]) -> None:
        if not self._keep_copy:
            # Before anybody may begin the next one.
            self._free_copy()
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
        self._free_copy()

    def _free_copy(self) -> None:
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.close()
        self._copies.close()


def load_state(folder: Path, world: World, state: dict[str, Any]) -> tuple[int, dict[str, object]]:
    """Reads what a `StateWriter` wrote, and restores the random state; collective.

    Args:
        folder: the same for every process.
        world: the processes.
        state: as for `StateWriter.begin`, perhaps divided in another way; its tensors are overwritten.

    Returns:
        Optimizer steps done, and the caller's `extra`.

    Raises:
        DataError: the folder is no checkpoint, or one of another model.
    """
    try:
        saved = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
        steps, extra = int(saved["steps"]), dict(saved["extra"])
        random = _saved_random_states(saved.get("random"), world)
        wanted = {**state, _RANDOM_KEY: random} if random else dict(state)
        dcp.load(wanted, checkpoint_id=str(folder), planner=BoxLoadPlanner(), no_dist=world.processes == 1)
    except (OSError, CheckpointException, RuntimeError, ValueError, KeyError, TypeError) as error:
        # torch's message names the tensor at its end, after a trace.
        lines = str(error).strip().splitlines()
        raise DataError(
            f"cannot load checkpoint {folder}: {type(error).__name__}: {lines[-1] if lines else ''}",
            hint="is it of this model? continue with the model that it was written with, or start a run under another "
            "name",
        ) from error
    for states in random.values():
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], world.device)
    return steps, extra


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
