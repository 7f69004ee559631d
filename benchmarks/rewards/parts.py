"""Items per second of processor time: parts against one function, and the cache against none, in turns.

`one` is one scorer in the service's own process, `parts` the same one in three parts with weights, a gate and a scale.
`math` grades in worker processes without a cache, and `cached` with one that has seen nothing yet. A share of a group's
answers are equal there. In `again`, all items have been scored before. Redis takes part with --redis.

    python -m benchmarks.rewards.parts --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.common import HelpFormatter, Summary, machine, summarize, table, write_json, yardstick
from rollmesh.mesh.config.scorers.cache import CacheSection
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.cache.cache import ScoreCache
from rollmesh.reward_service.composition.part import Entry, Part
from rollmesh.reward_service.scoring.engine import ScoringEngine

_PARTS: tuple[Entry, ...] = (
    "arithmetic",
    Part("exact_match", weight=0.1, clip=(0.0, 1.0)),
    Part("strings", weight=0.5, range=(-1.0, 1.0), gate="arithmetic", on_error="skip"),
)


def items_of(groups: int, size: int, equal: float, data_source: str, first: int) -> list[reward_pb2.ScoreItem]:
    """Groups of answers to sums, of which a share is equal to another one of its group."""
    numbers = random.Random(first)
    items = []
    for group in range(first, first + groups):
        truth = json.dumps(str(2 * group))
        for member in range(size):
            answer = 2 * group if numbers.random() < equal else numbers.randrange(10_000_000)
            response = rf"So it is \boxed{{{answer}}}." if data_source == "math" else str(answer)
            items.append(
                reward_pb2.ScoreItem(
                    item_id=f"{group}/{member}",
                    group_id=str(group),
                    data_source=data_source,
                    prompt=f"{group}+{group}=",
                    response=response,
                    ground_truth_json=truth,
                )
            )
    return items


async def rate(engine: ScoringEngine, items: Sequence[reward_pb2.ScoreItem]) -> float:
    """Items per second of processor time, of this process and its workers."""
    began = _cpu_s()
    for result in await engine.score(items, 600.0):
        if not result.HasField("scored"):
            raise SystemExit(f"no score: {result}")
    return len(items) / (_cpu_s() - began)


def _cpu_s() -> float:
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def measure(options: argparse.Namespace) -> dict[str, Summary]:
    """Rates of all sides."""

    def cache() -> ScoreCache:
        return ScoreCache(CacheSection(redis=options.redis, redis_timeout_s=1.0))

    rates: dict[str, list[float]] = {name: [] for name in ("one", "parts", "math", "cached", "again")}
    for repeat in range(options.repeats + 1):
        engines = {
            "one": ScoringEngine(["arithmetic"], cache=cache()),
            "parts": ScoringEngine(_PARTS, cache=cache()),
            "math": ScoringEngine(["math"], workers=options.workers),
            "cached": ScoringEngine(["math"], workers=options.workers, cache=cache()),
        }
        first = repeat * options.groups
        sums = items_of(8 * options.groups, options.size, options.equal, "arithmetic", first)
        hard = items_of(options.groups, options.size, options.equal, "math", first)
        warm = items_of(4 * options.workers, 1, 0.0, "math", 10_000_000)
        found = {}
        for name, engine in engines.items():
            await engine.start()
            await engine.score(warm if "math" in name or name == "cached" else sums[:1], 600.0)
            found[name] = await rate(engine, sums if name in ("one", "parts") else hard)
        found["again"] = await rate(engines["cached"], hard)
        for engine in engines.values():
            await engine.close()
        # The first turn loads and warms what the others use.
        if repeat:
            for name, value in found.items():
                rates[name].append(value)
    return {name: summarize(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--groups", type=int, default=128, help="groups of responses")
    parser.add_argument("--size", type=int, default=8, help="responses in a group")
    parser.add_argument("--equal", type=float, default=0.5, help="share of responses with the same answer")
    parser.add_argument("--workers", type=int, default=1, help="processes that grade")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side, in turns")
    parser.add_argument("--redis", help="URL of a Redis that keeps scores too, without a password; best an empty one")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    before = yardstick()
    found = asyncio.run(measure(options))
    ratios = {
        "parts over one": found["parts"].median / found["one"].median,
        "cached over math": found["cached"].median / found["math"].median,
        "again over math": found["again"].median / found["math"].median,
    }
    print(table(("side", "items per second of processor time"), [(name, value) for name, value in found.items()]))
    print(", ".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items()))
    if options.json:
        document = {
            "machine": machine(),
            "yardstick": [before, yardstick()],
            "options": {name: value for name, value in vars(options).items() if name not in ("json", "redis")},
            "with_redis": options.redis is not None,
            "items_per_cpu_s": found,
            "ratios": ratios,
        }
        write_json(options.json, document)


if __name__ == "__main__":
    main()
