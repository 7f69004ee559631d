"""Tokens per second through the generator, compared with the same engine driven directly with the same requests.

    python -m benchmarks.engines.overhead --engine vllm
    python -m benchmarks.engines.overhead --engine sglang --sglang-python .venv-sglang/bin/python

Needs: the engine, installed next to rollmesh (vLLM: run it with the interpreter of its environment), and about 5 GB of
memory. Contenders, in turn, each in processes of its own:

- `delta`, `final`: the engine alone as its users drive it, one task per request, tokens as they come or each response
  as a whole. The faster of both is what the others are held to.
- `engine`: our engine object alone, requests in, results out.
- `service`: the whole generator, with a real buffer and its Redis, admission, rewards scored in the generator, drafts,
  delivery. Trajectories count that were stored and that a fake learner has received.

All get the same prompts, the same response lengths (64 to 256 tokens, SGLang's to 128, even) and log-probs. Their
engines have the same settings and one compute thread; the rest of the cores is for all else. A pass is a fixed set of
requests. Its rate is that of the middle, while all slots have work (`plan.steady_rate`). The ratio of the whole pass,
from the request to the last token stored, has the way in and out in it. Processor time is over the whole pass, of all
processes together. Its ratio is the one to read where the machine was not quiet. Every vLLM contender has a vLLM of its
own, that rests while others run. SGLang's waits in a loop when paused, so there all share one server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import machine, summarize, table, write_json, yardstick
from benchmarks.engines import bare_engine, engine_alone
from benchmarks.engines.plan import MODELS, Arrival, Plan, steady_rate
from benchmarks.engines.server import serve
from benchmarks.engines.service import Service
from benchmarks.engines.worker_process import Contender, Family, MeasurementError, spent
from benchmarks.workloads import prepare

AIMS = {"vllm": 0.95, "sglang": 0.90}
# Groups of a pass: as many as take some ten seconds.
_GROUPS = {("vllm", "small"): 48, ("vllm", "large"): 24, ("sglang", "small"): 24, ("sglang", "large"): 24}
_LONGEST = {"vllm": 256, "sglang": 128}
_WARM_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Runner:
    """A contender that is up.

    Attributes:
        name: of it.
        run: does a pass of the given number of groups.
        cpu: processor seconds so far, by process.
    """

    name: str
    run: Callable[[int], list[Arrival]]
    cpu: Callable[[], dict[str, float]]


def measure(runner: Runner, plan: Plan) -> dict[str, Any]:
    """One pass."""
    before, began = runner.cpu(), time.perf_counter()
    arrivals = runner.run(plan.groups)
    used = spent(before, runner.cpu())
    tokens = sum(arrival.tokens for arrival in arrivals)
    print(f"{runner.name}: {tokens} tokens in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    if tokens != plan.tokens:
        raise MeasurementError(f"{runner.name} gave {tokens} tokens instead of {plan.tokens}")
    return {
        "contender": runner.name,
        "tokens_s": steady_rate(arrivals, plan.slots),
        # Clocks of processes of one machine are the same.
        "whole_tokens_s": tokens / (max(arrival.at for arrival in arrivals) - began),
        "tokens": tokens,
        "cpu_us_per_token": {name: seconds / tokens * 1e6 for name, seconds in used.items()},
        "yardstick": yardstick(0.2),
    }


def contenders(plan: Plan, levels: Sequence[str], folder: Path, stack: ExitStack) -> list[Runner]:
    """Starts them, one after the other."""
    shared: list[Family] = []
    if plan.engine == "sglang":
        server = Contender(serve, plan)
        stack.callback(server.end)
        plan = replace(plan, address=server.ready)
        shared.append(Family(server.process))
    runners: list[Runner] = []

    def add(name: str, contender: Contender) -> None:
        def cpu() -> dict[str, float]:
            found = Family(contender.process).cpu("front")
            for family in shared:
                found |= {key: value for key, value in family.cpu("keeper").items() if key != "keeper"}
            return found

        passes = iter(range(10**6))
        runners.append(Runner(name, lambda groups: contender.ask((f"{name}{next(passes)}", name, groups)), cpu))

    alone = Contender(bare_engine.ROLES[plan.engine], plan)
    stack.callback(alone.end)
    add("delta", alone)
    add("final", alone)
    if "engine" in levels:
        engine = Contender(engine_alone.engine, plan)
        stack.callback(engine.end)
        add("engine", engine)
    if "service" in levels:
        service = stack.enter_context(Service(plan, folder))

        def cpu() -> dict[str, float]:
            found = service.cpu()
            for family in shared:
                found |= {key: value for key, value in family.cpu("keeper").items() if key != "keeper"}
            return found

        runners.append(Runner("service", service.one_pass, cpu))
    return runners


def compare(plan: Plan, levels: Sequence[str], repeats: int) -> dict[str, Any]:
    """A short pass of each that is not counted, then `repeats` of each in turn; the order turns around each time."""
    passes: list[list[dict[str, Any]]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runners = contenders(plan, levels, folder, stack)
        for runner in runners:
            runner.run(_WARM_GROUPS)
        for number in range(repeats):
            order = runners if number % 2 == 0 else runners[::-1]
            passes.append([measure(runner, plan) for runner in order])
    return {"plan": {**asdict(plan), "prompts": len(plan.prompts)}, **summary(passes), "passes": passes}


def summary(passes: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Medians and ranges; ratios are taken within a round, to the faster of the direct ones."""
    names = [name for name in ("delta", "final", "engine", "service") if any(p["contender"] == name for p in passes[0])]
    by_name = {name: [next(p for p in turn if p["contender"] == name) for turn in passes] for name in names}
    direct_name = max(("delta", "final"), key=lambda name: statistics.median(p["tokens_s"] for p in by_name[name]))
    found: dict[str, Any] = {"held_to": direct_name, "contenders": {}}

    def cpu(run: dict[str, Any]) -> float:
        return sum(run["cpu_us_per_token"].values())

    for name, runs in by_name.items():
        processes = sorted({process for run in runs for process in run["cpu_us_per_token"]})
        found["contenders"][name] = {
            "tokens_s": summarize(run["tokens_s"] for run in runs),
            "ratio": summarize(
                run["tokens_s"] / other["tokens_s"] for run, other in zip(runs, by_name[direct_name], strict=True)
            ),
            "whole_ratio": summarize(
                run["whole_tokens_s"] / other["whole_tokens_s"]
                for run, other in zip(runs, by_name[direct_name], strict=True)
            ),
            "cpu_ratio": summarize(
                cpu(other) / cpu(run) for run, other in zip(runs, by_name[direct_name], strict=True)
            ),
            "cpu_us_per_token": {
                process: statistics.median(run["cpu_us_per_token"].get(process, 0.0) for run in runs)
                for process in processes
            },
        }
    return found


def report(found: dict[str, Any], aim: float) -> str:
    """A Markdown table."""
    rows = []
    for name, measured in found["contenders"].items():
        ours_too = name in ("engine", "service")
        rows.append(
            [
                name,
                measured["tokens_s"],
                measured["ratio"],
                measured["whole_ratio"],
                measured["cpu_ratio"],
                aim if ours_too else "",
                ", ".join(f"{process} {value:.0f}" for process, value in measured["cpu_us_per_token"].items()),
            ]
        )
    return table(
        [
            "contender",
            "tokens/s",
            f"ratio to {found['held_to']}",
            "whole pass",
            "same of CPU",
            "aim",
            "CPU us per token",
        ],
        rows,
    )


def main(argv: list[str] | None = None) -> int:
    """Measures and prints a table per model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=AIMS, required=True)
    parser.add_argument("--level", nargs="+", choices=("engine", "service"), default=["engine", "service"])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["small"], help="0.5 M or 3.9 M parameters")
    parser.add_argument("--groups", type=int, help="prompts of a pass, with 8 responses each")
    parser.add_argument("--longest", type=int, help="tokens of the longest response; the shortest has 64")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--sglang-python", type=Path, help="interpreter of the SGLang server")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    document: dict[str, Any] = {"machine": machine(), "engine": args.engine, "aim": AIMS[args.engine], "models": {}}
    for model in args.model:
        with tempfile.TemporaryDirectory() as folder:
            path, prompts = plan_model(model, Path(folder))
            plan = Plan(
                engine=args.engine,
                model=path,
                prompts=prompts,
                groups=args.groups or _GROUPS[args.engine, model],
                longest=args.longest or _LONGEST[args.engine],
                python=args.sglang_python,
            )
            found = compare(plan, args.level, args.repeats)
        document["models"][model] = found
        print(f"{args.engine}, {model} model, {plan.groups * plan.n} responses, {plan.tokens} tokens a pass\n")
        print(report(found, AIMS[args.engine]), flush=True)
    if args.json is not None:
        write_json(args.json, document)
    return 0


def plan_model(name: str, folder: Path) -> tuple[Path, tuple[tuple[int, ...], ...]]:
    """Writes a model of `MODELS`; its folder, and prompts as token ids."""
    from transformers import AutoTokenizer

    model, data = prepare(MODELS[name], folder, rows=64)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = data.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    return model, tuple(tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])


if __name__ == "__main__":
    sys.exit(main())
