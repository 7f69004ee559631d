"""Megatron's process groups, for several layouts in one process.

Megatron-Core keeps its groups in global names of one module, one layout per process. Roles have layouts of their own:
so the names are put back for each call. Groups are made once for each layout, and live as long as the learner's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state as state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.learner.engines.world import World


class MegatronGroups:
    """The groups of one layout; making it is collective.

    Args:
        sizes: of the layout.
        world: all processes; it has a process group.
    """

    def __init__(self, sizes: ParallelSizes, world: World) -> None:
        self._on_cpu = world.device.type == "cpu"
        # Number and kind of layers change no group.
        key = replace(sizes, layers=(), sequence_parallel=False)
        minutes = world.timeout.total_seconds() / 60
        with self._device():
            self._names: dict[str, Any] = world.keep(key, lambda: _make(sizes, minutes, world))

    @contextmanager
    def active(self, *, optimizer: bool = False) -> Iterator[None]:
        """Lets Megatron's code use these groups.

        Args:
            optimizer: the code is the optimizer's.
        """
        present = vars(state)
        before = {name: present[name] for name in self._names}
        present.update(self._names)
        try:
            with self._device(optimizer=optimizer):
                yield
        finally:
            self._names.update({name: present[name] for name in self._names})
            present.update(before)

    @contextmanager
    def _device(self, *, optimizer: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            if self._on_cpu:
                from rollmesh.learner.engines.megatron.local.cpu import on_cpu

                stack.enter_context(on_cpu(types=optimizer))
            yield


def _make(sizes: ParallelSizes, minutes: float, world: World) -> dict[str, Any]:
    before = _names(state)
    vars(state).update(dict.fromkeys((name for name, value in before.items() if not isinstance(value, dict))))
    with patch.object(state, "create_group", _sharing(world, state.create_group)):
        _initialize(sizes, minutes)
    if world.device.type == "cuda":
        with torch.random.fork_rng():
            model_parallel_cuda_manual_seed(0)
    made = _names(state)
    vars(state).update(before)
    return made


def _initialize(sizes: ParallelSizes, minutes: float) -> None:
    state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        distributed_timeout_minutes=minutes,
        create_gloo_process_groups=False,
    )


def _sharing(world: World, create: Callable[..., Any]) -> Callable[..., Any]:
    """Creates groups, but those of one process once: a layout has dozens, and each would have threads of its own."""

    def create_group(ranks: Sequence[int], *rest: Any, **settings: Any) -> Any:
        if len(ranks) > 1:
            return create(ranks, *rest, **settings)
        return world.keep(("alone", ranks[0]), lambda: create(ranks, *rest, **settings))

    return create_group


def _names(state: Any) -> dict[str, Any]:
    """The module's global names that a layout sets."""
    return {
        name: value
        for name, value in vars(state).items()
        if name.startswith("_") and name[1:2].isupper() and not callable(value)
    }
