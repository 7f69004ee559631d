"""Our engine object alone: requests in, results out, nothing of the mesh around it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from safetensors.torch import load_file

from benchmarks.engines.plan import Arrival, Plan
from benchmarks.engines.worker_process import requests
from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.types import GenerationRequest, GenerationResult, SamplingParams, TokenEvent
from rollmesh.mesh.trajectory.versions import PolicyVersion

_PASS_S = 500.0


class Results(EngineListener):
    """Collects the results of one pass."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.missing = 0
        self.failure: EngineError | None = None
        self.over = threading.Event()

    def begin(self, responses: int) -> None:
        """So many are to come."""
        self.arrivals, self.missing = [], responses
        self.over.clear()

    def on_results(self, results: list[GenerationResult]) -> None:
        tokens = sum(len(result.sampled.response_ids) for result in results)
        self.arrivals.append(Arrival(time.perf_counter(), len(results), tokens))
        self.missing -= len(results)
        if not self.missing:
            self.over.set()

    def on_tokens(self, events: list[TokenEvent]) -> None:
        raise AssertionError(f"{len(events)} events without a request")

    def on_failure(self, error: EngineError) -> None:
        self.failure = error
        self.over.set()


def group_requests(plan: Plan, name: str) -> list[GenerationRequest]:
    """All requests of a pass."""
    found = []
    for index in range(plan.groups):
        prompt, length = plan.group(index)
        sampling = SamplingParams(max_tokens=length)
        found += [GenerationRequest(f"{name}-{index}-{member}", prompt, sampling) for member in range(plan.n)]
    return found


def engine(pipe: Connection, plan: Plan) -> None:
    """Answers passes."""
    results = Results()
    driven = create_engine(plan.engine, plan.model, plan.settings(), results)
    driven.start()
    try:
        weights = load_file(plan.model / "model.safetensors")
        # The version that the whole service begins with: the SGLang server is shared with it.
        driven.update_weights(PolicyVersion(1, 0), weights.items(), "benchmark").result(_PASS_S)
        pipe.send("ready")
        for name, _, groups in requests(pipe):
            results.begin(groups * plan.n)
            driven.submit(group_requests(replace(plan, groups=groups), name))
            if not results.over.wait(_PASS_S):
                raise TimeoutError(f"{results.missing} responses are missing after {_PASS_S:.0f} s")
            if results.failure is not None:
                raise results.failure
            pipe.send(results.arrivals)
    finally:
        driven.stop()
