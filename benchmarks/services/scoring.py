"""Items per second through the scoring engine of a reward service, by scorer.

Calls of 64 items, two at a time, as one client makes them. Responses differ, so that no cache of a library answers. But
where 32 answers are named, there are as many different ones: the responses of a group often have the same answer. CPU
is that of the service and of its workers, per item. Every value is the median of `--repeats` runs.

    python -m benchmarks.services.scoring --seconds 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import count

import psutil

from benchmarks.common import REPOSITORY, HelpFormatter
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.scoring.engine import ScoringEngine

_ITEMS = 64
_CALLS = 2
_RESPONSES = {
    "arithmetic": "{0}",
    "gsm8k": "First 3 and {0} make a few more, so there are some.\n#### {0}",
    "math": r"Thus $x = \frac{{{0}}}{{7}}$ and the answer is \boxed{{\frac{{{0}}}{{7}}}}.",
    "math, 32 answers": r"Attempt {1}: the answer is \boxed{{\frac{{{0}}}{{7}}}}.",
}
USER = f"{REPOSITORY / 'benchmarks' / 'reward_functions.py'}:letter_order"


def _calls(scorer: str) -> Iterator[list[reward_pb2.ScoreItem]]:
    template = _RESPONSES.get(scorer, "{0} letters and more")
    answers = 32 if "32" in scorer else sys.maxsize
    for call in count():
        yield [
            reward_pb2.ScoreItem(
                item_id=str(place),
                group_id=str(place // 8),
                data_source="benchmark",
                prompt="40+2=",
                response=template.format((call * _ITEMS + place) % answers, call * _ITEMS + place),
                ground_truth_json=json.dumps("42"),
                extra_info_json="{}",
                response_ids=range(32),
            )
            for place in range(_ITEMS)
        ]


def _cpu_s() -> float:
    me = psutil.Process()
    return sum(times.user + times.system for times in (each.cpu_times() for each in (me, *me.children())))


async def _measure(scorer: str, seconds: float, workers: int) -> tuple[float, float]:
    """(items per second, CPU microseconds per item), without the start of workers."""
    engine = ScoringEngine([scorer.partition(",")[0]], workers=workers)
    calls = _calls(scorer)
    await engine.score(next(calls), 60.0)
    began_cpu = _cpu_s()
    items, until, began = 0, time.monotonic() + seconds, time.monotonic()

    async def client() -> None:
        nonlocal items
        while time.monotonic() < until:
            results = await engine.score(next(calls), 60.0)
            assert all(result.HasField("scored") for result in results), results[0]
            items += len(results)

    await asyncio.gather(*(client() for _ in range(_CALLS)))
    wall = time.monotonic() - began
    spent = _cpu_s() - began_cpu
    await engine.close()
    return items / wall, spent / items * 1e6


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each scorer")
    parser.add_argument("--workers", type=int, default=1, help="most worker processes: reward.workers")
    options = parser.parse_args()
    print("| scorer | items/s | CPU us/item |\n|---|---|---|")
    for scorer in ("arithmetic", "gsm8k", "math", "math, 32 answers", USER):
        runs = [asyncio.run(_measure(scorer, options.seconds, options.workers)) for _ in range(options.repeats)]
        rate, cpu = (statistics.median(run[index] for run in runs) for index in (0, 1))
        print(f"| {scorer.rpartition(':')[2]} | {rate:,.0f} | {cpu:.1f} |")


if __name__ == "__main__":
    main()
