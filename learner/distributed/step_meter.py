"""Time, arithmetic and memory of a batch's training, by role.

Seconds are those of this process. Phases are collective, so that every process takes as long as the slowest. On CUDA
they are those of the device, between two events of its stream. They are read once the batch is done, so that no phase
waits for the device.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.interface import Engine

_GIB = float(1 << 30)
_TERA = 1e12
# A backward pass takes twice the operations of a forward pass.
_FORWARD_AND_BACKWARD = 3.0


class StepMeter:
    """Sums over the phases of one batch.

    Args:
        engines: by role, in the same order in every process. Roles that other processes compute have times alone.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._events: list[tuple[tuple[str, str], torch.cuda.Event, torch.cuda.Event]] = []
        self._flops: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timing(self, phase: str, role: str) -> Iterator[None]:
        """Adds the block's seconds to those of a role's phase (`infer`, `update`), which a trace shows by name."""
        with torch.profiler.record_function(f"{phase}/{role}"), self._timing(phase, role):
            yield

    @contextmanager
    def _timing(self, phase: str, role: str) -> Iterator[None]:
        if role in self._engines and self._engines[role].device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append(((phase, role), begin, end))
            return
        began = time.perf_counter()
        yield
        self._seconds[phase, role] += time.perf_counter() - began

    def count_update(self, role: str, batches: Sequence[PackedBatch]) -> None:
        """Adds the operations of a role's forward and backward pass over micro-batches of this rank."""
        engine = self._engines.get(role)
        if engine is not None and engine.layout.has_results:
            forward = sum(engine.cost.forward_flops(batch.row) for batch in batches if batch.tokens.num_tokens)
            self._flops[role] += _FORWARD_AND_BACKWARD * forward

    def metrics(self) -> dict[str, float]:
        """The metrics of the batch; collective. Waits until the device has done the timed work."""
        events, self._events = self._events, []
        for phase, begin, end in events:
            end.synchronize()
            self._seconds[phase] += begin.elapsed_time(end) / 1000.0
        found = {f"timing_s/{phase}/{role}": seconds for (phase, role), seconds in self._seconds.items()}
        world = next(iter(self._engines.values())).world
        own = torch.tensor([self._flops[role] for role in self._engines], dtype=torch.float64)
        for (role, engine), flops in zip(self._engines.items(), world.sum(own).tolist(), strict=True):
            seconds = self._seconds["update", role]
            if not flops or not seconds:
                continue
            found[f"perf/tflops/{role}"] = rate = flops / _TERA / seconds / world.processes
            if engine.peak_tflops is not None:
                found[f"perf/mfu/{role}"] = rate / engine.peak_tflops
        memory = _memory(world.device)
        largest = world.max(torch.tensor(list(memory.values()), dtype=torch.float64)).tolist()
        return found | dict(zip(memory, largest, strict=True))


def _memory(device: torch.device) -> dict[str, float]:
    """Largest memory of this process, GiB: of its device since the last call, and of the host so far."""
    found = {"perf/max_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB}
    if device.type == "cuda":
        found |= {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / _GIB,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / _GIB,
        }
        torch.cuda.reset_peak_memory_stats(device)
    return found
