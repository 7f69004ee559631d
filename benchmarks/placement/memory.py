"""Memory of a collocated run of a model of 1 GB, by phase and service, and the bounds that it keeps.

    python -m benchmarks.placement.memory --plot docs/placement-memory.svg --json memory.json
    python -m benchmarks.placement.memory --engines vllm --vllm-python .venv-vllm/bin/python

A run with random weights in float32 takes a turn in every step. Memory is what `rollmesh run` records of each service
twice a second (`RUN/memory.jsonl`), its processes together: anonymous pages, which no other process shares. The
published weights are in shared memory, once, and stand apart. Bounds, in anonymous memory:

- peak of both sides together <= the larger side in its own turn + what the other keeps meanwhile + one bucket +
  `--overhead`;
- a sleeping generator, and a resting learner, <= 400 MiB: their libraries, whatever the model;
- vLLM's generator has another 500 for its fork server, from which its processes start in a third of the time.

Exits with 1 where a bound is broken. Needs 8 GB of memory, 5 GB of disk and some minutes; less with `--layers`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, HelpFormatter, machine, table, write_json
from benchmarks.mesh_run import MeshRun, run_mesh
from benchmarks.placement.memory_plot import memory_over_time
from benchmarks.workloads import Mode, Workload, mesh_config, prepare
from rollmesh.report.memory import MemorySample, memory_grid, peaks_from_samples, read_memory
from rollmesh.report.turns import phase_at, read_phases

_MIB = 1 << 20
_BUCKET_MIB = 16
_PROCESS_MIB, _FORK_SERVER_MIB = 400, 500
_LEARNER, _GENERATOR = "learner", "generator-0"


def workload_of(layers: int) -> Workload:
    """About 63 MB of float32 per layer."""
    return Workload("memory", 1024, layers, 16, (Mode(1.0, None),), groups=2, n=4)


def measure(engine: str, folder: Path, args: argparse.Namespace) -> MeshRun:
    """One run; every step is a turn of its own."""
    workload = workload_of(args.layers)
    model, data = prepare(workload, folder.parent / "workload")
    config: dict[str, Any] = mesh_config(workload, model, data, folder, steps=args.steps)
    config["placement"] = "collocated"
    config["buffer"] = {"max_staleness": 0}
    config["weights"] = {"bucket_bytes": _BUCKET_MIB * _MIB}
    if engine == "vllm":
        config["rollout"] |= {"engine": "vllm", "python": str(args.vllm_python), "vllm": {"kv_cache_gib": 0.25}}
    elif engine == "sglang":
        config["rollout"] |= {"engine": "sglang", "sglang": {"python": str(args.sglang_python)}}
    return run_mesh(config, timeout_s=3600.0)


def bounds(engine: str, run: MeshRun, overhead: float) -> list[tuple[str, float, float]]:
    """(bound, found, allowed) in MiB."""
    samples, phases = read_memory(run.folder), read_phases(run.folder)
    in_phase: dict[str, list[MemorySample]] = {}
    for sample in samples:
        in_phase.setdefault(phase_at(phases, sample.unix_s), []).append(sample)
    generating, training = in_phase["generating"], in_phase["training"]
    awake, asleep = max(_anon(s, _GENERATOR) for s in generating), max(_anon(s, _GENERATOR) for s in training[1:])
    trains, rests = max(_anon(s, _LEARNER) for s in training), min(_anon(s, _LEARNER) for s in generating)
    together = max(_anon(s, _GENERATOR) + _anon(s, _LEARNER) for s in samples)
    largest = max(awake + rests, trains + asleep)
    return [
        ("both sides together", together, largest + _BUCKET_MIB + overhead),
        ("the generator asleep", asleep, _PROCESS_MIB + (_FORK_SERVER_MIB if engine == "vllm" else 0)),
        ("the learner at rest", rests, _PROCESS_MIB),
    ]


def _anon(sample: MemorySample, service: str) -> float:
    return sample.uses[service].anon / _MIB if service in sample.uses else 0.0


def swaps(run: MeshRun) -> Mapping[str, float]:
    """Medians of the swaps, in seconds by step."""
    return dict(run.summary["swaps"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every engine; prints peaks, bounds and swap times."""
    args = _parser().parse_args(argv)
    results: dict[str, Any] = {}
    broken = False
    with tempfile.TemporaryDirectory(prefix="rollmesh-memory-", dir=args.scratch) as scratch:
        for engine in args.engines:
            run = measure(engine, Path(scratch) / engine, args)
            samples, phases = read_memory(run.folder), read_phases(run.folder)
            peaks = peaks_from_samples(samples, phases).to_mib()
            head, *rows = memory_grid(peaks)
            print(f"\n{engine}: MiB of their own, by phase\n" + table(head, rows))
            kept = bounds(engine, run, args.overhead)
            lines = [[name, f"{found:.0f}", f"{allowed:.0f}"] for name, found, allowed in kept]
            print(table(("bound", "found, MiB", "allowed, MiB"), lines))
            times = swaps(run)
            print(table(("step", "median"), [[name, f"{value:.3f}"] for name, value in times.items()]), flush=True)
            broken = broken or any(found > allowed for _, found, allowed in kept)
            results[engine] = {"peaks_mib": peaks, "bounds_mib": kept, "swaps": dict(times)}
            if args.plot and engine == args.engines[0]:
                args.plot.write_text(memory_over_time(samples, phases, samples[-1].unix_s), encoding="utf-8")
            if args.json:
                write_json(args.json, {"benchmark": "placement_memory", "machine": machine(), "results": results})
    return int(broken)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm", "sglang"), default=["hf"], help="of generators")
    parser.add_argument("--layers", type=int, default=16, help="of the model, 63 MB each")
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument(
        "--overhead", type=float, default=150.0, help="MiB that the bound of both sides allows beyond its sum"
    )
    parser.add_argument("--vllm-python", type=Path, default=REPOSITORY / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--sglang-python", type=Path, default=REPOSITORY / ".venv-sglang" / "bin" / "python")
    parser.add_argument("--scratch", type=Path, help="folder for the run, on a disk; default: the system's")
    parser.add_argument("--plot", type=Path, help="SVG of all processes' memory over time, of the first engine")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser


if __name__ == "__main__":
    sys.exit(main())
