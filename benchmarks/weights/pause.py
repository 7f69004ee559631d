"""The time that decoding stands still for new weights, compared with the ordinary gaps between decode steps.

    OMP_NUM_THREADS=1 python -m benchmarks.weights.pause --model DIR [--kv keep] [--swaps 1000] [--json OUT]

`DIR` is a Hugging Face folder (`examples/demo/prepare.py` makes the demonstration's). A learner process changes every
weight a little and publishes, again and again, each version once the former one is in service. A real receiver in this
process takes them over the transport that fits, while the engine decodes with all slots in use. Before and after, the
same engine decodes without a learner at work: the noise floor. A gap is the time from the end of one decode step to the
end of the next. Each either holds a swap or does not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import machine, table, write_json, yardstick
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf.decoder import Step
from rollmesh.generators.engines.hf.engine import HfEngine
from rollmesh.generators.engines.hf.model.loading import load_model
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.types import (
    EngineSettings,
    GenerationRequest,
    GenerationResult,
    KvPolicy,
    SamplingParams,
    SwapTimings,
    TokenEvent,
)
from rollmesh.generators.weights import WeightReceiver
from rollmesh.generators.weights.learner_connection import LearnerDirectory
from rollmesh.generators.weights.receiver import ReceiverSettings
from rollmesh.learner.weights import PublishRules, WeightPublisher, WeightsService
from rollmesh.learner.weights.model_bundle import read_model_bundle
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import membership_pb2, weights_pb2, weights_pb2_grpc

_SECURITY = SecuritySection()
_DEADLINE_S = 300.0
_QUIET_S = 4.0
# Responses to a prompt, tokens of it, and token ids to choose from: any model has that many.
_GROUP, _PROMPT_TOKENS, _VOCABULARY = 8, 8, 16


@dataclass
class Steps:
    """Times of the engine's steps.

    Attributes:
        plain: seconds from step to step without a swap between.
        swapped: seconds from step to step with one.
        pauses, stages: seconds that decoding stood still for a swap, and that staging took meanwhile.
    """

    plain: list[float] = field(default_factory=list)
    swapped: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    stages: list[float] = field(default_factory=list)


class MeasuredEngine(HfEngine):
    """Notes when steps end; the engine's own thread does it, between two steps."""

    steps = Steps()
    _ended = 0.0
    _seen = 0

    def start(self) -> None:
        """Wraps the decode step, which nothing else can see."""
        step = self._decoder.step

        def measured(starting: Any) -> Step:
            results = step(starting)
            now, swaps = time.perf_counter(), self._loop.swaps
            if self._ended:
                (self.steps.plain if swaps == self._seen else self.steps.swapped).append(now - self._ended)
            self._ended, self._seen = now, swaps
            return results

        self._decoder.step = measured  # type: ignore[method-assign]  # a look inside
        super().start()

    def update_weights(self, *arguments: Any) -> Future[SwapTimings]:
        """See InferenceEngine."""
        done = super().update_weights(*arguments)
        done.add_done_callback(self._note)
        return done

    def _note(self, done: Future[SwapTimings]) -> None:
        if done.exception() is None:
            timings = done.result()
            self.steps.pauses.append(timings.pause_us / 1e6)
            self.steps.stages.append(timings.stage_us / 1e6)


class Load(EngineListener):
    """Keeps all slots of an engine in use, with `_GROUP` responses to a prompt, and looks at what comes out."""

    def __init__(self, slots: int, max_tokens: int) -> None:
        self._slots = slots
        self._sampling = SamplingParams(max_tokens=max_tokens)
        self._ids = itertools.count()
        self._draws = np.random.default_rng(0)
        self._owed = 0
        self._submit: Callable[[list[GenerationRequest]], None] = lambda _: None
        self.responses = self.tokens = self.crossed = self.most_versions = 0
        self.failure: EngineError | None = None

    def begin(self, engine: HfEngine) -> None:
        self._submit = engine.submit
        self._ask_for(2 * self._slots)

    def end(self) -> None:
        """Asks for nothing more."""
        self._submit = lambda _: None

    def _ask_for(self, responses: int) -> None:
        """As soon as they make a group."""
        self._owed += responses
        while self._owed >= _GROUP:
            self._owed -= _GROUP
            prompt = self._draws.integers(3, _VOCABULARY, size=_PROMPT_TOKENS).tolist()
            self._submit([GenerationRequest(str(next(self._ids)), prompt, self._sampling) for _ in range(_GROUP)])

    def on_results(self, results: list[GenerationResult]) -> None:
        for result in results:
            runs = result.sampled.versions.runs
            if sum(length for length, _ in runs) != len(result.sampled.response_ids) or sorted(v for _, v in runs) != [
                v for _, v in runs
            ]:
                self.on_failure(EngineError(f"response {result.request_id} misnames its versions: {runs}"))
            self.responses += 1
            self.tokens += len(result.sampled.response_ids)
            self.crossed += len(runs) > 1
            self.most_versions = max(self.most_versions, len(runs))
        self._ask_for(len(results))

    def on_tokens(self, events: list[TokenEvent]) -> None:
        raise AssertionError(f"{len(events)} events without a request")

    def on_failure(self, error: EngineError) -> None:
        self.failure = error


class _Membership:
    """Says where the learner is."""

    def __init__(self, port: int) -> None:
        self.learner = membership_pb2.Member(member_id="learner", address=f"127.0.0.1:{port}")
        self.policy: PolicyVersion | None = None

    def on_change(self, listener: Callable[[], None]) -> None:
        pass

    async def heartbeat(self) -> None:
        pass


def learn(pipe: Connection, folder: Path, transport: str, swaps: int, interval_s: float) -> None:
    """The learner's process: `swaps` versions, one after the other is in service."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reported = threading.Semaphore(0)

    class Service(WeightsService):
        async def Report(self, request: weights_pb2.SwapReport, context: Any) -> weights_pb2.ReportResponse:
            answer = await super().Report(request, context)
            reported.release()
            return answer

    publisher = WeightPublisher("run", read_model_bundle(folder), PublishRules(transport=transport))  # type: ignore[arg-type]  # a name

    async def serve() -> None:
        server = new_server(_SECURITY)
        weights_pb2_grpc.add_WeightsServicer_to_server(Service(publisher), server)
        port = bind(server, "127.0.0.1", 0, _SECURITY)
        await server.start()
        pipe.send(port)
        await asyncio.to_thread(train)
        await server.stop(1.0)

    def train() -> None:
        for version in range(swaps + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-5 * torch.randn_like(parameter))
            publisher.publish(PolicyVersion(1, version), model.named_parameters(), "float32")
            if not reported.acquire(timeout=_DEADLINE_S):
                raise TimeoutError(f"version {version} was not reported")
            if version == 0:
                pipe.send("served")
                pipe.recv()
            time.sleep(interval_s)
        pushes = publisher.pushes.summary()
        pipe.send({"count": pushes.count, "errors": pushes.errors, **pushes.metrics()})
        pipe.recv()

    try:
        asyncio.run(serve())
    finally:
        publisher.close()


async def measure(
    folder: Path, *, kv: KvPolicy, transport: str, swaps: int, slots: int, max_tokens: int, interval_s: float
) -> dict[str, Any]:
    """One run: quiet, `swaps` swaps, quiet again."""
    pipe, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    learner = context.Process(target=learn, args=(theirs, folder, transport, swaps, interval_s), daemon=True)
    learner.start()
    load = Load(slots, max_tokens)
    engine = MeasuredEngine(load_model(folder, dtype="float32", device="cpu"), EngineSettings(slots=slots, kv=kv), load)
    engine.start()
    port = await asyncio.to_thread(pipe.recv)
    link = LearnerDirectory(_Membership(port), _SECURITY)  # type: ignore[arg-type]  # the part of an agent that it uses
    settings = ReceiverSettings(
        member_id="generator",
        run="run",
        host_id=host_id(),
        transport=transport,  # type: ignore[arg-type]  # a name
    )
    receiver = WeightReceiver(link, engine, settings)
    receiving = asyncio.create_task(receiver.run())
    try:
        assert await asyncio.to_thread(pipe.recv) == "served"
        load.begin(engine)
        began = time.perf_counter()
        before = await _quiet(engine, _QUIET_S)
        engine.steps = Steps()
        crossed = load.crossed
        pipe.send("go")
        pushes = await asyncio.to_thread(pipe.recv)
        during, engine.steps = engine.steps, Steps()
        crossed = load.crossed - crossed
        after = await _quiet(engine, _QUIET_S)
        elapsed = time.perf_counter() - began
        pipe.send("end")
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        await link.close()
        load.end()
        await asyncio.to_thread(engine.stop)
        learner.join(10.0)
    if load.failure is not None:
        raise load.failure
    return {
        "kv": kv,
        "swaps": len(during.pauses),
        "responses": load.responses,
        "responses_across_swaps": crossed,
        "most_versions_in_a_response": load.most_versions,
        "tokens_s": load.tokens / elapsed,
        "pause_ms": _summary(during.pauses),
        "stage_ms": _summary(during.stages),
        "gap_with_swap_ms": _summary(during.swapped),
        "gap_without_swap_ms": _summary(during.plain),
        "quiet_gap_ms": _summary(before.plain + after.plain),
        "pushes": pushes,
    }


async def _quiet(engine: MeasuredEngine, seconds: float) -> Steps:
    """Lets the engine decode alone for a while."""
    engine.steps = Steps()
    await asyncio.sleep(seconds)
    return engine.steps


def _summary(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        raise ValueError("nothing was measured")
    p50, p99 = np.percentile(np.array(seconds) * 1e3, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "max": max(seconds) * 1e3, "count": len(seconds)}


def main(argv: list[str] | None = None) -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kv", nargs="+", choices=("keep", "recompute", "interrupt"), default=["keep"])
    parser.add_argument("--transport", choices=("shm", "grpc"), default="shm")
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--interval", type=float, default=0.03, help="Seconds between a version and the next.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    document: dict[str, Any] = {"machine": machine(), "runs": []}
    for kv in args.kv:
        before = yardstick()
        found = asyncio.run(
            measure(
                args.model,
                kv=kv,
                transport=args.transport,
                swaps=args.swaps,
                slots=args.slots,
                max_tokens=args.max_tokens,
                interval_s=args.interval,
            )
        )
        document["runs"].append({**found, "transport": args.transport, "yardstick": [before, yardstick()]})
    if args.json is not None:
        write_json(args.json, document)
    print(_table(document["runs"]))
    return 0


def _table(runs: list[dict[str, Any]]) -> str:
    columns = ("pause_ms", "gap_with_swap_ms", "gap_without_swap_ms", "quiet_gap_ms", "stage_ms")

    def cell(percentiles: dict[str, float]) -> str:
        return f"{percentiles['p50']:.3g} / {percentiles['p99']:.3g}"

    rows = [[run["kv"], run["swaps"], *(cell(run[column]) for column in columns)] for run in runs]
    return table(["kv", "swaps", "pause", "gap with swap", "gap without", "quiet gap", "staging"], rows)


if __name__ == "__main__":
    sys.exit(main())
