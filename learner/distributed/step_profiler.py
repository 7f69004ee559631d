"""Traces of chosen steps: torch's profiler and, on CUDA, a snapshot of the device's memory; one file per rank.

Invariants: steps that were not chosen cost nothing. Trace and snapshot begin before the batch stage and end after the
last optimizer step. A disk that refuses them is warned of, and ends no run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rollmesh.mesh.config.learner import ProfileSection
from rollmesh.mesh.errors import ConfigError

log = logging.getLogger(__name__)
FOLDER = "profile"
# Allocations and frees of one step that a snapshot holds.
_MEMORY_EVENTS = 1_000_000


def check_snapshots(settings: ProfileSection, device: str) -> None:
    """Checks that a device has the snapshots that are asked for.

    Args:
        settings: of the profiler.
        device: kind of the device.

    Raises:
        ConfigError: a snapshot of memory is asked for, and the device is no CUDA device.
    """
    if settings.memory and device != "cuda":
        raise ConfigError(
            f"learner.profile.memory records allocations on CUDA devices, and the learner runs on {device}",
            hint="leave it out: traces of a CPU have memory too (learner.profile.steps)",
        )


class StepProfiler:
    """Profiles steps of this rank.

    Args:
        settings: which steps and ranks.
        device: where this rank computes.
        folder: for the files; made when the first one is written.

    Raises:
        ConfigError: a snapshot of memory is asked for, and the device is no CUDA device.
    """

    def __init__(self, settings: ProfileSection, device: torch.device, folder: Path) -> None:
        check_snapshots(settings, device.type)
        self._rank = int(os.environ.get("RANK", "0"))
        self._steps = frozenset(settings.steps if self._rank in settings.ranks else ())
        self._settings = settings
        self._device = device
        self._folder = folder

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profiles the block where its step was chosen.

        Args:
            number: of the step, as in the metrics: the first one is 1.
        """
        if number not in self._steps:
            yield
            return
        name = f"step-{number}-rank-{self._rank}"
        with ExitStack() as recordings:
            if self._settings.memory:
                recordings.enter_context(self._memory(self._folder / f"{name}-memory.pickle"))
            recordings.enter_context(self._trace(self._folder / f"{name}.json.gz"))
            yield

    @contextmanager
    def _trace(self, path: Path) -> Iterator[None]:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        settings = self._settings
        with profile(
            activities=activities,
            record_shapes=settings.shapes,
            profile_memory=True,
            with_stack=settings.stack,
            acc_events=True,
        ) as recorded:
            yield
        _write(path, recorded.export_chrome_trace)

    @contextmanager
    def _memory(self, path: Path) -> Iterator[None]:
        torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        try:
            yield
            _write(path, torch.cuda.memory._dump_snapshot)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


def _write(path: Path, write: Callable[[str], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(path))
        log.info("wrote %s", path)
    except (OSError, RuntimeError) as error:
        # torch says by a RuntimeError that a file cannot be written.
        log.warning("cannot write %s: %s", path, error)
