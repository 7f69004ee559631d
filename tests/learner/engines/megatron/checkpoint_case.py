"""Checkpoints of several layouts, each continued in the others; tests run this in their own process and in two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rollmesh.learner.engines.interface import Engine
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.contract_state import save
from rollmesh.testing.engine_cases import make_sequences, make_spec, train
from rollmesh.testing.worlds import Harness

Numbers = list[float]
"""Losses and norms of the gradient of two steps: the second ones depend on the moments that the first one has used."""
FRESH = " before its first step"
"""End of the name of a checkpoint without moments; else it is the name of the layout that has written it."""
# Its rate differs from step to step.
_OPTIMIZER = OptimizerSection(lr=1e-2, eps=1e-2, schedule="cosine", warmup_steps=2)


def write(
    harness: Harness, model: Path, layouts: Mapping[str, ParallelSection], folder: Path, others: Sequence[str] = ()
) -> tuple[dict[str, Numbers], dict[tuple[str, str], Numbers]]:
    """Writes a checkpoint of each layout, of the first one also a fresh one; continues all in each layout.

    Args:
        harness: of these processes.
        model: folder.
        layouts: by name.
        folder: of all checkpoints.
        others: names of checkpoints that are there.

    Returns:
        The numbers that follow a checkpoint in the engine that has written it. The same in other engines, by the
        checkpoint's name and the layout's.
    """
    engines = _make(harness, model, layouts)
    written: dict[str, Numbers] = {}
    for name, engine in engines.items():
        fresh = name + FRESH
        if not written:
            save(engine, folder / fresh)
        first = _two_steps(engine, fresh)
        if not written:
            written[fresh] = first
        save(engine, folder / name)
        written[name] = _two_steps(engine, name)
    return written, _continue(engines, folder, [*written, *others])


def read(
    harness: Harness, model: Path, layouts: Mapping[str, ParallelSection], folder: Path, names: Sequence[str]
) -> dict[tuple[str, str], Numbers]:
    """Continues checkpoints in each layout: see `write`."""
    return _continue(_make(harness, model, layouts), folder, names)


def _make(harness: Harness, model: Path, layouts: Mapping[str, ParallelSection]) -> dict[str, Engine]:
    return {
        name: harness.make(make_spec(model, optimizer=_OPTIMIZER, parallel=parallel))
        for name, parallel in layouts.items()
    }


def _continue(engines: Mapping[str, Engine], folder: Path, names: Sequence[str]) -> dict[tuple[str, str], Numbers]:
    found = {}
    for layout, engine in engines.items():
        for name in names:
            if name.removesuffix(FRESH) != layout:
                engine.load_checkpoint(folder / name)
                found[name, layout] = _two_steps(engine, name)
    return found


def _two_steps(engine: Engine, checkpoint: str) -> Numbers:
    """The steps after a checkpoint, of which those with moments have two before them."""
    seeds = (4, 5) if checkpoint.endswith(FRESH) else (2, 3)
    steps = [train(engine, make_sequences(seed, 2)).metrics for seed in seeds]
    return [metrics[name] for metrics in steps for name in ("loss", "grad_norm")]
