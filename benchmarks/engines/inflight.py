"""New weights while vLLM decodes: how long it stands still, what becomes of the responses, and what peers lose.

    python -m benchmarks.engines.inflight --engine vllm

Needs: vLLM, installed next to rollmesh (run it with the interpreter of that environment), about 2 GB of memory. One
engine decodes 64 responses at a time, 64 to 256 tokens each, and gets new weights (every tensor changed) again and
again.

1. Pauses, for each KV policy: `--swaps` swaps, one every `--every` seconds, under a load that never ends. A *gap* is
   the time from one token of a response to its next, as a stream of it sees them. It either holds a swap or does not.
2. Against *abort and retry*, the way of others. At each update all requests are aborted and their tokens thrown away.
   The weights are exchanged while nothing runs, and the requests submitted again from their prompts. All ways finish
   the same set of responses. The time between updates is 1.5 times that of the longest response undisturbed: with
   faster updates the longest never ends this way. `interrupt` is the same with the tokens kept: they are aborted too,
   and continue after what they have. Tokens are *wasted* that were sampled and thrown away. Those in flight, prompts
   included, are *prefilled again* where their keys and values were made again.

Each response is checked: its length, its streamed tokens against its result, its versions in order; none may be lost.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.common import machine, table, write_json, yardstick
from benchmarks.engines.instrumented_engine import MeasuredEngine
from benchmarks.engines.overhead import plan_model
from benchmarks.engines.plan import MODELS, Plan
from benchmarks.engines.swap_observer import Observations, Watcher
from benchmarks.engines.worker_process import MeasurementError
from rollmesh.generators.engines.types import GenerationRequest, KvPolicy, SamplingParams, SwapTimings
from rollmesh.mesh.trajectory.versions import PolicyVersion

Way = Literal["quiet", "keep", "recompute", "interrupt", "abort_retry"]
_POLICIES: tuple[KvPolicy, ...] = ("keep", "recompute", "interrupt")
_START_S = 600.0
_SWAP_S = 120.0
# A way that takes this many times as long as undisturbed decoding is given up.
_PATIENCE = 8.0


class Bench:
    """One engine and its load.

    Args:
        plan: what is asked for.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._watcher = Watcher()
        self._engine = MeasuredEngine.from_folder(plan.model, plan.settings(), self._watcher)
        self._weights = load_file(plan.model / "model.safetensors")
        self._numbers = itertools.count()
        self._versions = itertools.count()
        self._engine.start()
        self._update(_START_S)
        self._engine.instrument()

    def close(self) -> None:
        """Ends the engine."""
        self._engine.stop()

    def pauses(self, kv: KvPolicy, swaps: int, every_s: float) -> dict[str, Any]:
        """Swaps under a load that never ends."""
        feed = self._feed()
        self._begin(kv)
        slots = self._plan.slots
        self._submit(feed, slots + slots // 2)
        # Mixed lengths: not all begin or end together.
        while self._watcher.seen.finished < slots:
            self._refill(feed, 1.0)
        timings: list[SwapTimings] = []
        self._begin(kv)
        sampled, began = self._engine.status().tokens_generated, time.perf_counter()
        due = began
        while len(timings) < swaps:
            due = max(due + every_s, time.perf_counter())
            while (left := due - time.perf_counter()) > 0:
                self._refill(feed, left)
            timings.append(self._update(_SWAP_S))
            self._watcher.swapped()
        elapsed = time.perf_counter() - began
        rate = (self._engine.status().tokens_generated - sampled) / elapsed
        if not self._watcher.wait_below(1, _SWAP_S):
            raise MeasurementError(f"{len(self._watcher.open)} responses were lost")
        return {"kv": kv, "tokens_s": rate, **self._summary(timings)}

    def finish_all(self, way: Way, every_s: float, at_most_s: float) -> dict[str, Any]:
        """The plan's set of responses, with updates until all are there.

        Args:
            way: what an update does; `quiet`: there is none.
            every_s: between updates.
            at_most_s: then it is given up.
        """
        feed = self._feed()
        self._begin(way if way in _POLICIES else "keep")
        sampled, began = self._engine.status().tokens_generated, time.perf_counter()
        self._submit(feed, self._plan.groups * self._plan.n)
        timings: list[SwapTimings] = []
        due = began
        while True:
            due = began + at_most_s if way == "quiet" else max(due + every_s, time.perf_counter())
            if self._watcher.wait_below(1, due - time.perf_counter()) or due >= began + at_most_s:
                break
            timings.append(self._abort_and_retry() if way == "abort_retry" else self._update(_SWAP_S))
            self._watcher.swapped()
        elapsed = time.perf_counter() - began
        unfinished = self._drop_rest()
        status = self._engine.status()
        return {
            "way": way,
            "seconds": elapsed,
            "unfinished": unfinished,
            "sampled": status.tokens_generated - sampled,
            "every_s": every_s,
            **self._summary(timings),
        }

    def longest_s(self) -> float:
        """Seconds that the longest response of the last pass took."""
        return max(self._watcher.seen.durations)

    def _feed(self) -> Iterator[GenerationRequest]:
        """Requests without end, the groups of the plan in turn."""
        for index in itertools.count():
            prompt, length = self._plan.group(index % self._plan.groups)
            for _ in range(self._plan.n):
                sampling = SamplingParams(max_tokens=length)
                yield GenerationRequest(str(next(self._numbers)), prompt, sampling, stream=True)

    def _begin(self, kv: KvPolicy) -> None:
        self._engine.use(kv)
        self._engine.parts.clear()
        self._watcher.seen = Observations()

    def _submit(self, feed: Iterator[GenerationRequest], count: int) -> None:
        requests = list(itertools.islice(feed, count))
        self._watcher.begin(requests)
        self._engine.submit([replace(request, request_id=f"{request.request_id}.0") for request in requests])

    def _refill(self, feed: Iterator[GenerationRequest], timeout_s: float) -> None:
        """Keeps more requests in flight than there are slots, once there is room for a group."""
        most = self._plan.slots + self._plan.slots // 2
        if self._watcher.wait_below(most - self._plan.n + 1, timeout_s):
            self._submit(feed, most - len(self._watcher.open))

    def _update(self, timeout_s: float) -> SwapTimings:
        """Every tensor is another one, by so little that responses stay what they are."""
        weights = {name: tensor + 1e-5 * torch.randn_like(tensor) for name, tensor in self._weights.items()}
        version = PolicyVersion(1, next(self._versions))
        return self._engine.update_weights(version, weights.items(), str(version)).result(timeout_s)

    def _abort_and_retry(self) -> SwapTimings:
        """All requests are aborted, and submitted again from their prompts under the new weights."""
        stopped = self._watcher.in_flight()
        self._engine.abort([watched.name for watched in stopped])
        if not self._engine.drain(_SWAP_S):
            raise MeasurementError("aborted requests did not end")
        timings = self._update(_SWAP_S)
        self._engine.submit([replace(w.request, request_id=w.name) for w in self._watcher.in_flight()])
        return timings

    def _drop_rest(self) -> int:
        """Aborts what is left; how much it was."""
        rest = self._watcher.in_flight()
        self._engine.abort([watched.name for watched in rest])
        if not self._engine.drain(_SWAP_S):
            raise MeasurementError("aborted requests did not end")
        self._watcher.open.clear()
        return len(rest)

    def _summary(self, timings: list[SwapTimings]) -> dict[str, Any]:
        seen = self._watcher.seen
        found: dict[str, Any] = {
            "swaps": len(timings),
            "in_flight": float(np.mean([timing.in_flight for timing in timings])) if timings else 0.0,
            "pause_ms": _quantiles([timing.pause_us / 1e6 for timing in timings]),
            "stage_ms": _quantiles([timing.stage_us / 1e6 for timing in timings]),
            "wait_ms": _quantiles([timing.wait_us / 1e6 for timing in timings]),
            "parts_ms": {part: _quantiles(seconds) for part, seconds in self._engine.parts.items()},
            "gap_with_swap_ms": _quantiles(seen.swap_gaps),
            "gap_without_ms": _quantiles(seen.gaps),
        }
        names = ("finished", "tokens", "crossed", "before", "after", "most_versions", "discarded", "repeated")
        return found | {name: getattr(seen, name) for name in names}


def _quantiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds; zeros where there is nothing."""
    if not seconds:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0, "count": 0}
    p50, p99 = np.percentile(np.array(seconds) * 1e3, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "max": max(seconds) * 1e3, "count": len(seconds)}


def measure(plan: Plan, *, swaps: int, every_s: float) -> dict[str, Any]:
    """Both parts of the benchmark, on one engine."""
    bench = Bench(plan)
    try:
        before = yardstick()
        undisturbed = bench.finish_all("quiet", 0.0, _START_S)
        pauses = [bench.pauses(kv, swaps, every_s) for kv in _POLICIES]
        quiet = bench.finish_all("quiet", 0.0, _START_S)
        between_s = 1.5 * bench.longest_s()
        most_s = _PATIENCE * quiet["seconds"]
        ways: tuple[Way, ...] = ("keep", "interrupt", "recompute", "abort_retry")
        disturbed = [bench.finish_all(way, between_s, most_s) for way in ways]
        document = {"warm_up": undisturbed, "pauses": pauses, "ways": [quiet, *disturbed]}
        return {**document, "yardstick": [before, yardstick()]}
    finally:
        bench.close()


def pause_table(pauses: list[dict[str, Any]]) -> str:
    """The cost of a swap, milliseconds p50 / p99."""

    def cell(percentiles: dict[str, float]) -> str:
        return f"{percentiles['p50']:.3g} / {percentiles['p99']:.3g}"

    rows = [
        [
            run["kv"],
            run["swaps"],
            cell(run["pause_ms"]),
            ", ".join(f"{part} {percentiles['p50']:.3g}" for part, percentiles in run["parts_ms"].items()),
            cell(run["gap_with_swap_ms"]),
            cell(run["gap_without_ms"]),
            f"{run['finished']} / {run['crossed']} / {run['most_versions']}",
            f"{run['tokens_s']:.0f}",
        ]
        for run in pauses
    ]
    header = ["kv", "swaps", "pause", "parts", "gap with swap", "gap without", "responses / across / versions"]
    return table([*header, "tokens/s"], rows)


def comparison_table(ways: list[dict[str, Any]]) -> str:
    """The cost of the same responses, by the way of updating."""
    prefilling = ("recompute", "interrupt")
    rows = [
        [
            run["way"],
            run["swaps"],
            f"{run['seconds']:.1f} ({run['seconds'] / ways[0]['seconds']:.2f})",
            run["finished"],
            run["unfinished"],
            run["tokens"],
            f"{run['discarded']} ({run['discarded'] / max(1, run['sampled']):.0%})",
            run["repeated"] if run["way"] in prefilling else 0,
            f"{run['gap_with_swap_ms']['p50']:.3g} / {run['gap_with_swap_ms']['p99']:.3g}",
        ]
        for run in ways
    ]
    header = ["way", "updates", "seconds (to quiet)", "finished", "not finished", "their tokens", "wasted tokens"]
    return table([*header, "prefilled again", "gap with swap ms"], rows)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=["vllm"], required=True)
    parser.add_argument("--model", choices=MODELS, default="small", help="0.5 M or 3.9 M parameters")
    parser.add_argument("--swaps", type=int, default=60)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two swaps of the first part")
    parser.add_argument("--groups", type=int, default=40, help="prompts of the second part, with 8 responses each")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path, prompts = plan_model(args.model, Path(folder))
        plan = Plan(engine=args.engine, model=path, prompts=prompts, groups=args.groups)
        found = measure(plan, swaps=args.swaps, every_s=args.every)
    if args.json is not None:
        write_json(args.json, {"machine": machine(), "model": args.model, **found})
    print(pause_table(found["pauses"]))
    every = found["ways"][1]["every_s"]
    print(f"\nThe same {plan.groups * plan.n} responses, an update every {every:.2f} s:\n")
    print(comparison_table(found["ways"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
