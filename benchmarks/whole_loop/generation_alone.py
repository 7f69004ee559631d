"""Seconds that one generator's engine needs per response of a workload, with nothing else on the machine.

    OMP_NUM_THREADS=1 python -m benchmarks.whole_loop.generation_alone --workload long-tail --model DIR --data FILE

The yardstick of overlap in `benchmarks.whole_loop.async_vs_sync`: the same engine, slots, prompts and groups, always
with work queued, without mesh, rewards or weight updates. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.workloads import WORKLOADS, Workload
from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.types import (
    EngineSettings,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    TokenEvent,
)
from rollmesh.mesh.trajectory.versions import PolicyVersion


class _Arrivals(EngineListener):
    """When how many responses had come; filled by the engine's thread."""

    def __init__(self, expected: int) -> None:
        self.times: list[float] = []
        self.tokens = 0
        self.failure: EngineError | None = None
        self.complete = threading.Event()
        self._expected = expected

    def on_results(self, results: list[GenerationResult]) -> None:
        now = time.perf_counter()
        self.times += [now] * len(results)
        self.tokens += sum(len(result.sampled.response_ids) for result in results)
        if len(self.times) >= self._expected:
            self.complete.set()

    def on_tokens(self, events: list[TokenEvent]) -> None:
        raise AssertionError(f"{len(events)} events without a request")

    def on_failure(self, error: EngineError) -> None:
        self.failure = error
        self.complete.set()


def measure(workload: Workload, model: Path, data: Path, *, threads: int, batches: int) -> dict[str, float]:
    """Generates `batches` batches; the rate is that of the middle, where all slots have work.

    Returns:
        seconds per response, mean length in tokens, tokens per second.
    """
    torch.set_num_threads(threads)
    arrivals = _Arrivals(workload.samples * batches)
    engine = create_engine("hf", model, EngineSettings(slots=workload.samples, threads=threads), arrivals)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    engine.start()
    try:
        engine.update_weights(PolicyVersion(1, 0), weights.items(), "").result(60)
        engine.submit(_requests(workload, model, data, batches))
        if not arrivals.complete.wait(900):
            raise TimeoutError(f"{len(arrivals.times)} of {workload.samples * batches} responses within 900 s")
        if arrivals.failure is not None:
            raise arrivals.failure
    finally:
        engine.stop()
    first, last = 2 * workload.samples, len(arrivals.times) - workload.samples - 1
    seconds = (arrivals.times[last] - arrivals.times[first]) / (last - first)
    mean_length = arrivals.tokens / len(arrivals.times)
    return {"seconds_per_sample": seconds, "mean_length": mean_length, "tokens_s": mean_length / seconds}


def _requests(workload: Workload, model: Path, data: Path, batches: int) -> list[GenerationRequest]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    with data.open(encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line, _ in zip(lines, range(workload.groups * batches), strict=False)]
    return [
        GenerationRequest(f"{index}-{member}", ids, SamplingParams(max_tokens=workload.max_tokens))
        for index, ids in enumerate(tokenizer(prompts, add_special_tokens=False)["input_ids"])
        for member in range(workload.n)
    ]


def main(argv: list[str] | None = None) -> int:
    """Measures once and prints the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, default=12)
    args = parser.parse_args(argv)
    workload = WORKLOADS[args.workload]
    print(json.dumps(measure(workload, args.model, args.data, threads=args.threads, batches=args.batches)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
