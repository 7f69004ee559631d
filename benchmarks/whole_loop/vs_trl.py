"""Whole-loop samples per second and TRL's GRPOTrainer's: same model folder, prompts, reward, batch, loss, threads.

    python -m benchmarks.whole_loop.vs_trl --trl-python /path/to/trl-venv/bin/python --json vs_trl.json

TRL lives in an environment of its own (its requirements stand in `benchmarks/peers/trl_grpo.py`). The mesh is the real
one, `rollmesh run` with one generator. TRL's threads are its choice: one and two are tried in the first round and the
better one is kept. The two alternate, and the order turns with every round, so that a slow spell of the machine
meets both. Fixed lengths show what the arithmetic allows; the long tail is where continuous batching, packing and
overlap pay. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, Summary, machine, summarize, table, write_json, yardstick
from benchmarks.mesh_run import run_mesh, window
from benchmarks.whole_loop.gemm import measure_floor
from benchmarks.workloads import LEARNING_RATE, WORKLOADS, Workload, mesh_config, prepare
from rollmesh.mesh.runtime.threads import available_cores, thread_environment

PEER = REPOSITORY / "benchmarks" / "peers" / "trl_grpo.py"
REWARD = f"{REPOSITORY / 'benchmarks' / 'reward_functions.py'}:letter_order"


@dataclass(frozen=True, slots=True)
class Length:
    """Batches of a measured run. The mesh's warm-up exceeds the batches it may hold ahead, so none is counted free."""

    warmup: int
    batches: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: samples/s after the warm-up, mean response length, and the machine's yardstick just before it."""

    system: str
    samples_s: float
    mean_length: float
    yardstick: dict[str, float]
    details: dict[str, Any]


_TRL = {
    "fixed-0.13m": Length(10, 120),
    "fixed-0.5m": Length(5, 40),
    "fixed-3.9m": Length(1, 6),
    "geometric": Length(3, 25),
    "long-tail": Length(2, 16),
}
_MESH = {
    "fixed-0.13m": Length(20, 240),
    "fixed-0.5m": Length(10, 60),
    "fixed-3.9m": Length(6, 10),
    "geometric": Length(10, 60),
    "long-tail": Length(10, 70),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; prints a table and writes every run to --json."""
    args = _parse(argv)
    results: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-vs-trl-") as scratch:
        for name in args.workloads:
            result = _compare(WORKLOADS[name], Path(scratch) / name, args)
            results[name] = result
            rows.append(_row(name, result))
            print(table(_HEADER, rows[-1:]), flush=True)
            if args.json:
                write_json(args.json, {"benchmark": "vs_trl", "machine": machine(), "results": results})
    print("\n" + table(_HEADER, rows))
    return 0


def _compare(workload: Workload, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    model, data = prepare(workload, folder)
    cores = available_cores()
    trl_threads = [1, cores] if cores > 1 else [1]
    runs: list[Measured] = []
    for round_number in range(args.rounds):
        contenders = [f"trl-{threads}" for threads in trl_threads] + ["mesh"]
        for contender in contenders if round_number % 2 == 0 else reversed(contenders):
            print(f"{workload.name} round {round_number + 1}: {contender}", file=sys.stderr, flush=True)
            if contender == "mesh":
                runs.append(_run_mesh(workload, model, data, folder / f"mesh-{round_number}"))
            else:
                threads = int(contender.removeprefix("trl-"))
                runs.append(_run_trl(workload, model, data, folder, threads, args.trl_python))
        if round_number == 0 and len(trl_threads) > 1:
            trl_threads = [max(trl_threads, key=lambda threads: _rate(runs, f"trl-{threads}").median)]
    trl, mesh = f"trl-{trl_threads[0]}", "mesh"
    floor = measure_floor(workload, sum(run.mean_length for run in runs) / len(runs))
    floor_rate = workload.samples / floor.step_s(cores)
    return {
        "trl": _rate(runs, trl),
        "trl_threads": trl_threads[0],
        "mesh": _rate(runs, mesh),
        "ratio": round(_rate(runs, mesh).median / _rate(runs, trl).median, 3),
        "floor_samples_s": round(floor_rate, 1),
        "floor_gflops_per_thread": round(floor.gflops, 1),
        "mesh_share_of_floor": round(_rate(runs, mesh).median / floor_rate, 4),
        "trl_share_of_floor": round(_rate(runs, trl).median / floor_rate, 4),
        "workload": asdict(workload),
        "runs": [asdict(run) for run in runs],
    }


def _run_mesh(workload: Workload, model: Path, data: Path, folder: Path) -> Measured:
    before = yardstick()
    length = _MESH[workload.name]
    run = run_mesh(mesh_config(workload, model, data, folder, steps=length.warmup + length.batches))
    measured = window(run, length.warmup)
    return Measured(
        "mesh",
        measured.batches * workload.samples / measured.seconds,
        measured.mean_length,
        before,
        {"wait_s": measured.wait_s, "train_s": measured.train_s, "seconds": measured.seconds},
    )


def _run_trl(workload: Workload, model: Path, data: Path, folder: Path, threads: int, python: Path) -> Measured:
    before = yardstick()
    length = _TRL[workload.name]
    command = [
        *(str(python), str(PEER), "--model", str(model), "--data", str(data), "--reward", REWARD),
        *("--groups", str(workload.groups), "--n", str(workload.n), "--max-tokens", str(workload.max_tokens)),
        *("--steps", str(length.warmup + length.batches), "--lr", str(LEARNING_RATE), "--threads", str(threads)),
        *("--output", str(folder / "trl-output")),
    ]
    environment = {**os.environ, **thread_environment(threads)}
    # TRL computes alone: active waiting costs no other process, and is what it would do by itself.
    for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        environment.pop(name)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"TRL failed on {workload.name}: {done.stderr[-2000:]}")
    result = json.loads(done.stdout.rstrip().splitlines()[-1])
    steps = result.pop("steps")
    seconds = steps[-1]["ended_s"] - steps[length.warmup - 1]["ended_s"]
    rest = steps[length.warmup :]
    generation_s = sum(step["generation_s"] for step in rest)
    mean_length = sum(step["mean_length"] for step in rest) / len(rest)
    result |= {"generation_s": generation_s, "seconds": seconds}
    return Measured(f"trl-{threads}", len(rest) * workload.samples / seconds, mean_length, before, result)


def _rate(runs: list[Measured], system: str) -> Summary:
    return summarize(run.samples_s for run in runs if run.system == system)


_HEADER = ("workload", "TRL samples/s", "threads", "mesh samples/s", "ratio", "TRL of floor", "mesh of floor")


def _row(name: str, result: dict[str, Any]) -> tuple[object, ...]:
    shares = f"{result['trl_share_of_floor']:.0%}", f"{result['mesh_share_of_floor']:.0%}"
    return (name, result["trl"], result["trl_threads"], result["mesh"], f"{result['ratio']:.2f}", *shares)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter of an environment with TRL")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
