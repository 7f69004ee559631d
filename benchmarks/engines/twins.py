"""Counts equal responses to one prompt from several generators, and how many chance gives.

One run trains at a rate that changes nothing, so that all responses have one distribution. It has a single prompt;
generators are killed while it runs, and once the run is stopped and continued. Two draws x and y are equal with the
probability sum of p(x)^2, whose estimate is the mean of p(x) over the draws. Generators or starts that share random
numbers give many more.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.common import REPOSITORY, HelpFormatter, machine
from examples.demo.model import write_model

_BATCH = 20
_N = 4
# Short enough that chance gives some twins, long enough that it gives few.
_TOKENS = 4


def settings(folder: Path, engine: str, groups: int, generators: int) -> dict[str, Any]:
    """The configuration of the run."""
    rollout: dict[str, Any] = {"engine": engine, "replicas": generators, "n": _N, "max_prompt_tokens": 16, "slots": 8}
    if engine != "hf":
        # Their environments, as `make vllm sglang` makes them.
        python = {"python": str(REPOSITORY / f".venv-{engine}" / "bin" / "python")}
        rollout |= python if engine == "vllm" else {"sglang": python}
    return {
        "run": {"dir": str(folder), "name": "twins"},
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "one.jsonl")},
        "algorithm": {"name": "grpo"},
        "rollout": {**rollout, "max_response_tokens": _TOKENS},
        "reward": {"functions": [f"{__file__}:length"]},
        "learner": {
            "steps": math.ceil(groups / _BATCH),
            "batch": {"groups": _BATCH},
            "optimizer": {"lr": 1e-12},
        },
        "buffer": {"max_staleness": 2},
        "checkpoint": {"every_steps": 5},
        "logging": {"samples_per_step": _BATCH * _N},
    }


def length(items: Sequence[Any]) -> list[float]:
    """A reward that differs between responses."""
    return [float(len(item.response)) for item in items]


def train(folder: Path, config: dict[str, Any], kills: int) -> int:
    """Runs it to its end; returns the number of generators that were killed."""
    path = folder / "twins.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "rollmesh.cli", "run", str(path)]
    metrics, steps, killed = folder / "twins" / "metrics.jsonl", config["learner"]["steps"], 0
    # One stop between the kills, and what comes of it is one run.
    marks = [steps * (at + 1) // (kills + 2) for at in range(kills + 1)]
    with (folder / "twins.log").open("w", encoding="utf-8") as log:
        launcher = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)
        try:
            for at, mark in enumerate(marks):
                while launcher.poll() is None and trained(metrics) < mark:
                    time.sleep(0.1)
                if launcher.poll() is not None:
                    break
                if at == len(marks) // 2:
                    launcher.send_signal(signal.SIGTERM)
                    launcher.wait(120)
                    launcher = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)
                elif (victim := next(generators_of(launcher.pid), None)) is not None:
                    victim.kill()
                    killed += 1
            if launcher.wait(900):
                raise SystemExit(f"the run has failed: {Path(log.name).read_text(encoding='utf-8')[-2000:]}")
        finally:
            if launcher.poll() is None:
                launcher.terminate()
                launcher.wait(120)
    return killed


def trained(metrics: Path) -> int:
    """Steps that are recorded."""
    return metrics.read_text(encoding="utf-8").count('"timing_s/step"') if metrics.exists() else 0


def generators_of(launcher: int) -> Iterator[psutil.Process]:
    """Generator processes of a launcher."""
    for child in psutil.Process(launcher).children(recursive=True):
        try:
            if "generator" in child.cmdline()[:6]:
                yield child
        except psutil.Error:
            continue


def count(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The equal pairs among responses, those that chance gives, and groups that are equal in all members."""
    responses = Counter(f"{sample['tokens']['count']} {sample['response']}" for sample in samples)
    found = sum(math.comb(times, 2) for times in responses.values())
    chances = [math.exp(sum(values(sample["tokens"]["log_probs"]))) for sample in samples]
    expected = math.comb(len(samples), 2) * sum(chances) / len(chances)
    # Counts of a response are Poisson with the mean N p: what one adds to the difference has the variance below.
    means = [len(samples) * chance for chance in chances]
    deviation = math.sqrt(sum(mean**2 / 4 + mean / 2 for mean in means))
    groups: dict[tuple[int, str], list[str]] = {}
    for sample in sorted(samples, key=lambda sample: int(sample["member"])):
        groups.setdefault((sample["step"], sample["group"]), []).append(sample["response"])
    twins = sum(times for times in Counter(map(tuple, groups.values())).values() if times > 1)
    return {
        "responses": len(samples),
        "groups": len(groups),
        "generators": len({sample["generator"] for sample in samples}),
        "equal_pairs": found,
        "by_chance": expected,
        "standard_deviation": deviation,
        "equal_groups": twins,
    }


def values(entries: Sequence[Any]) -> Iterator[float]:
    """Values by token; an entry [n, x] means n times x."""
    for entry in entries:
        if isinstance(entry, list):
            yield from [entry[1]] * entry[0]
        else:
            yield entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--engine", choices=("hf", "vllm", "sglang"), default="hf")
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--generators", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model", 0)
        (folder / "one.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n', encoding="utf-8")
        config = settings(folder, chosen.engine, chosen.groups, chosen.generators)
        killed = train(folder, config, chosen.kills)
        with (folder / "twins" / "samples.jsonl").open(encoding="utf-8") as lines:
            result = {"engine": chosen.engine, "killed": killed, **count([json.loads(line) for line in lines])}
    print(
        f"{result['engine']}: {result['responses']} responses of {result['groups']} groups, {result['generators']} "
        f"generators, {killed} killed, one stop; equal pairs {result['equal_pairs']}, by chance "
        f"{result['by_chance']:.1f} (+- {result['standard_deviation']:.1f}); groups that are equal in all members "
        f"{result['equal_groups']}"
    )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"machine": machine(), **result}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
