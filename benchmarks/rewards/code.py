"""Answers that are scored per core and second: the scorer `code`, verl's prime_code, and a process for each case.

Rates are of CPU time, of this process and of all that it has started, so that they hold on a machine with other work.
Every round measures all ways one after the other: ratios are of the same minute. All answers are right, so that every
case is run. `--verl FOLDER`: the folder that holds verl's `prime_code`, `verl/utils/reward_score` of an unpacked wheel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import HelpFormatter, cpu_s, machine, summarize, table, write_json, yardstick
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.reward_service.code.scorer import Code
from rollmesh.reward_service.outcomes import RewardItem, Scored

_PROGRAM = "values = list(map(int, input().split()))\nprint(sum(values), max(values))\n"
_FUNCTION = "def total(values):\n    return [sum(values), max(values)]\n"
_PEER = Path(__file__).with_name("verl_prime_code.py")
_OURS = "code"


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all ways")
    parser.add_argument("--answers", type=int, default=20, help="answers of a way in a round")
    parser.add_argument("--cases", type=int, default=20, help="of each answer")
    parser.add_argument("--verl", type=Path, help="folder that holds prime_code")
    parser.add_argument("--verl-python", default=sys.executable, help="interpreter with numpy")
    parser.add_argument("--json", type=Path, help="JSON file")
    asyncio.run(_measure(parser.parse_args()))


async def _measure(options: argparse.Namespace) -> None:
    ways = _ways(options)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    moods = []
    for _ in range(options.rounds):
        moods.append(yardstick())
        for name, run in ways.items():
            rates[name].append(options.answers / await run(options.answers))
    found = {name: summarize(values) for name, values in rates.items()}
    ours = rates[_OURS]
    ratios = {
        name: summarize(mine / theirs for mine, theirs in zip(ours, values, strict=True))
        for name, values in rates.items()
        if name != _OURS
    }
    rows = [(name, rate, f"{1000 / rate.median:.1f}", ratios.get(name, "")) for name, rate in found.items()]
    print(table(["way", "answers per core and second", "CPU ms each", f"`{_OURS}` is faster by"], rows))
    if options.json:
        document = {"machine": machine(), "yardstick": moods, "cases": options.cases, "rates": found, "ratios": ratios}
        write_json(options.json, document)


Run = Callable[[int], Awaitable[float]]


def _ways(options: argparse.Namespace) -> dict[str, Run]:
    """By name: from a number of answers to the CPU seconds that they took."""
    given = [list(range(case, case + 10)) for case in range(options.cases)]
    texts = {
        "inputs": [" ".join(map(str, values)) for values in given],
        "outputs": [f"{sum(values)} {max(values)}" for values in given],
    }
    calls = {
        "inputs": [json.dumps(values) for values in given],
        "outputs": [json.dumps([sum(values), max(values)]) for values in given],
        "fn_name": "total",
    }
    script = [f"assert total({values}) == {[sum(values), max(values)]}" for values in given]
    ways: dict[str, Run] = {
        _OURS: partial(_ours, _PROGRAM, lambda _: texts),
        "code, functions": partial(_ours, _FUNCTION, lambda _: calls),
        "code, assertions": partial(_ours, _FUNCTION, lambda _: script),
        "code, assertions, each answer to another row": partial(
            _ours, _FUNCTION, lambda row: [*script, f"assert {row} + 1"]
        ),
        "a process for each case, not confined": partial(_plain, texts["inputs"]),
    }
    if options.verl is not None:
        peer = partial(_verl, options.verl_python, options.verl)
        ways["verl prime_code, not confined"] = partial(peer, _PROGRAM, texts)
        ways["verl prime_code, functions"] = partial(peer, _FUNCTION, calls)
    return ways


async def _ours(answer: str, tests: Callable[[int], Any], answers: int) -> float:
    """In a thread of its own, whose event loop closes the sandbox at its end.

    Args:
        tests: by the number of an answer. Opening the sandbox, for number 0, is paid once for all answers of a service.
    """

    async def score() -> float:
        section = RewardSection(scorer_timeout_s=600.0, code={"time_s": 60.0, "case_s": 60.0})  # type: ignore[arg-type]  # as of a file
        code = Code(section, "code", fraction=False)
        began = 0.0
        for number in range(answers + 1):
            outcome = await code(RewardItem("i", "g", "", "", answer, tests(number)))
            assert isinstance(outcome, Scored), outcome
            assert outcome.total == 1.0, outcome
            began = began or cpu_s()
        return cpu_s() - began

    return await asyncio.to_thread(asyncio.run, score())


async def _plain(inputs: list[str], answers: int) -> float:
    def run() -> None:
        for _ in range(answers):
            for text in inputs:
                argv = [sys.executable, "-I", "-S", "-c", _PROGRAM]
                subprocess.run(argv, input=text.encode(), capture_output=True, check=True)

    began = cpu_s()
    await asyncio.to_thread(run)
    return cpu_s() - began


async def _verl(python: str, folder: Path, answer: str, tests: Any, answers: int) -> float:
    text = json.dumps({"answer": answer, "tests": tests})
    argv = [python, str(_PEER), str(folder), str(answers)]
    done = await asyncio.to_thread(subprocess.run, argv, input=text, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["score"] == 1.0, found
    return float(found["cpu_s"])


if __name__ == "__main__":
    main()
