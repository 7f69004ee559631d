"""Step time, traffic and peak memory of Megatron-Core's layouts next to FSDP2, on the same models and the same steps.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.engine_layouts --json engine_layouts.json

Models are random and in float32. One has the demonstration's size and short sequences, a dense one 16 M parameters, a
third one experts; two query heads share a key. A step is the clipped surrogate, clipping and AdamW, on micro-batches
that are packed before. It is measured with a prompt for each response, and with prompts that the responses of a group
share. FSDP2 computes a shared prompt once, Megatron once for each response. A token counts once for every response that
has it.

Every layout has gloo processes of its own, on one thread each, with the learner's memory settings. In a round each
layout runs once, one after another, and a ratio is that of one round. Numbers of a round are medians of its steps.
Seconds are those of the slowest rank, processor seconds those of all ranks together. Gradient norms of all layouts must
agree, else there is no result.

Memory is the peak of the resident set (VmHWM) in a second step, over that after the steps of a tiny model. Its
processes return freed memory at once. Bytes are those that the kernel writes for a rank in this step (`wchar`): gloo's
messages, over loopback.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig

from benchmarks.common import HelpFormatter, machine, summarize, table, write_json, yardstick
from benchmarks.learner.equivalence import surrogate
from benchmarks.learner.planned_memory import MALLOC
from benchmarks.rank_processes import run_ranks
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.plan import PlanItem, plan_batch
from rollmesh.learner.batching.types import PackedBatch, TrainSequence
from rollmesh.learner.engines.interface import Engine, EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, freeze_heap, keep_freed_memory
from rollmesh.testing.engine_cases import save_random

_SAME = 1e-3
_MIB = 1 << 20
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
_EXPERTS = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its steps.

    Attributes:
        kind: of transformers.
        settings: of its configuration.
        groups, members: sequences of a step.
        prompt, response: their mean lengths.
        budget: tokens of a micro-batch.
    """

    kind: str
    settings: Mapping[str, Any]
    groups: int = 4
    members: int = 4
    prompt: int = 32
    response: int = 48
    budget: int = 384


_DEMONSTRATION = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 73}
CASES = {
    "demonstration": Case(
        "qwen3",
        _DEMONSTRATION | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
        groups=32,
        members=8,
        prompt=6,
        response=4,
        budget=4096,
    ),
    "dense": Case(
        "qwen3",
        _HEADS
        | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 48, "vocab_size": 8192},
    ),
    "experts": Case(
        "qwen3_moe",
        _HEADS | _EXPERTS | {"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 32, "vocab_size": 8192},
    ),
}
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 128}


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to divide a model."""

    backend: str
    processes: int = 1
    parallel: ParallelSection = field(default_factory=ParallelSection)


WORKLOADS = {"own prompts": False, "shared prompts": True}
"""Groups share their prompts, by the name of the workload."""
REFERENCE = "FSDP2, one rank"
"""The layout of ratios."""
_DENSE_LAYOUTS = {
    REFERENCE: Layout("fsdp2"),
    "Megatron, one rank": Layout("megatron"),
    "FSDP2 x2": Layout("fsdp2", 2),
    "Megatron TP2": Layout("megatron", 2, ParallelSection(tp=2)),
    "Megatron TP2, `sp: 1`": Layout("megatron", 2, ParallelSection(tp=2, sp=1)),
    "Megatron PP2": Layout("megatron", 2, ParallelSection(pp=2)),
    "Megatron DP2": Layout("megatron", 2),
}
# Experts in a tensor-parallel group need sequence parallelism.
_EXPERT_LAYOUTS = {name: layout for name, layout in _DENSE_LAYOUTS.items() if layout.parallel.sp is None} | {
    "Megatron EP2": Layout("megatron", 2, ParallelSection(ep=2))
}
LAYOUTS = {"demonstration": _DENSE_LAYOUTS, "dense": _DENSE_LAYOUTS, "experts": _EXPERT_LAYOUTS}


def make_sequences(case: Case, vocabulary: int, *, shared: bool) -> list[TrainSequence]:
    """The sequences of a step; unless groups share their prompts, each sequence has a prompt of its own."""
    rng = np.random.default_rng(0)
    sequences = []
    for number in range(case.groups * case.members):
        if not shared or number % case.members == 0:
            prompt = _tokens(rng, case.prompt, vocabulary)
        ids = _tokens(rng, case.response, vocabulary)
        # A random model is nearly uniform, so these are near its own.
        log_probs = np.full(len(ids), -np.log(vocabulary), dtype=np.float32)
        sequences.append(TrainSequence(prompt, ids, np.ones(len(ids), np.uint8), log_probs, float(rng.normal())))
    return sequences


def make_batches(engine: Engine, sequences: Sequence[TrainSequence], case: Case) -> list[PackedBatch]:
    """The micro-batches of this rank."""
    items = [PlanItem(i // case.members, len(s.prompt_ids), len(s.response_ids)) for i, s in enumerate(sequences)]
    plan = plan_batch(items, token_budget=case.budget, ranks=engine.layout.dp_size, packing=engine.packing)
    return [pack(sequences, indices) for indices in plan.minibatches[0][engine.layout.dp_rank]]


def time_steps(folder: Path, case: Case, layout: Layout, steps: int) -> dict[str, Any]:
    """Seconds and processor seconds of this rank's steps, by workload."""
    keep_freed_memory(TENSOR_BYTES)
    engine = _engine(folder / "model", layout)
    freeze_heap()
    found: dict[str, Any] = {}
    for name, shared in WORKLOADS.items():
        sequences = make_sequences(case, engine.vocab_size, shared=shared)
        batches = make_batches(engine, sequences, case)
        norm = _step(engine, batches)
        walls, busy = [], []
        for _ in range(steps):
            began, processor = time.perf_counter(), time.process_time()
            _step(engine, batches)
            walls.append(time.perf_counter() - began)
            busy.append(time.process_time() - processor)
        found[name] = {
            "seconds": statistics.median(walls),
            "processor_s": statistics.median(busy),
            "norm": norm,
            "tokens": sum(map(len, sequences)),
            "micro_batches": len(batches),
        }
    engine.close()
    return found


def measure_memory(folder: Path, case: Case, layout: Layout) -> dict[str, Any]:
    """Bytes that this rank holds at most in a second step, and writes in it."""
    tiny = _engine(folder / "tiny", layout)
    few = replace(case, groups=2, members=2, prompt=4, response=4)
    for _ in range(2):
        _step(tiny, make_batches(tiny, make_sequences(few, tiny.vocab_size, shared=False), few))
    gc.collect()
    base = _account("status", "VmRSS") << 10
    engine = _engine(folder / "model", layout)
    batches = make_batches(engine, make_sequences(case, engine.vocab_size, shared=False), case)
    _step(engine, batches)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    written = _account("io", "wchar")
    _step(engine, batches)
    found = {"peak": (_account("status", "VmHWM") << 10) - base, "sent": _account("io", "wchar") - written}
    engine.close()
    tiny.close()
    return found


def _engine(folder: Path, layout: Layout) -> Engine:
    section = OptimizerSection(lr=1e-6, max_grad_norm=1.0)
    spec = EngineSpec(ModelSection(path=str(folder)), section, 1 << 20, parallel=layout.parallel)
    return create_engine(spec, backend=layout.backend)


def _step(engine: Engine, batches: Sequence[PackedBatch]) -> float:
    engine.accumulate(batches, surrogate, engine.global_counts(batches))
    return float(engine.apply().metrics["grad_norm"])


def _tokens(rng: np.random.Generator, mean: int, vocabulary: int) -> NDArray[np.int32]:
    count = rng.integers(mean - mean // 4, mean + mean // 4 + 1)
    return rng.integers(3, vocabulary, count).astype(np.int32)


def _account(file: str, field: str) -> int:
    """A number of the kernel's account of this process."""
    lines = Path(f"/proc/self/{file}").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def _run(part: str, scratch: Path, model: str, layout: str, steps: int) -> list[dict[str, Any]]:
    """Runs a part in the processes of a layout; gives the findings of each rank."""
    options = ["--scratch", str(scratch), "--steps", str(steps)]
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, *options, "--part", part, model, layout]
    environment = MALLOC if part == "memory" else {}
    return run_ranks(command, LAYOUTS[model][layout].processes, environment=environment)


def measure(scratch: Path, model: str, rounds: int, steps: int) -> dict[str, Any]:
    """All layouts of a model.

    Raises:
        SystemExit: gradient norms differ.
    """
    kind, settings = CASES[model].kind, CASES[model].settings
    config = AutoConfig.for_model(kind, **settings)
    save_random(config, scratch / model / "model")
    save_random(AutoConfig.for_model(kind, **dict(settings) | _TINY), scratch / model / "tiny")
    memory = {name: _run("memory", scratch, model, name, steps) for name in LAYOUTS[model]}
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        times = {name: _run("time", scratch, model, name, steps) for name in LAYOUTS[model]}
        for workload in WORKLOADS:
            norms = {name: ranks[0][workload]["norm"] for name, ranks in times.items()}
            if max(norms.values()) > (1 + _SAME) * min(norms.values()):
                raise SystemExit(f"gradient norms differ: {norms}")
        found.append({"yardstick": yardstick(), "times": times})
        print(f"{model}: round {number + 1} of {rounds}", file=sys.stderr)
    return {"memory": memory, "rounds": found}


def _lines(model: str, found: Mapping[str, Any]) -> list[list[object]]:
    def by_round(layout: str, workload: str, number: str, join: Callable[..., float] = max) -> list[float]:
        return [join(rank[workload][number] for rank in each["times"][layout]) for each in found["rounds"]]

    lines = []
    for name, memory in found["memory"].items():
        cells: list[object] = [model, name]
        for workload in WORKLOADS:
            seconds, reference = (by_round(layout, workload, "seconds") for layout in (name, REFERENCE))
            tokens = by_round(name, workload, "tokens")[0]
            cells += [
                summarize(seconds),
                f"{tokens / statistics.median(seconds):,.0f}",
                summarize(own / one for own, one in zip(seconds, reference, strict=True)),
                f"{statistics.median(by_round(name, workload, 'processor_s', sum)):.3g}",
            ]
        cells.append(", ".join(f"{rank['peak'] / _MIB:.0f}" for rank in memory))
        cells.append(", ".join(f"{rank['sent'] / _MIB:.1f}" for rank in memory) if len(memory) > 1 else "")
        lines.append(cells)
    return lines


_HEADER = (
    "model",
    "layout",
    *(f"{column}, {name}" for name in WORKLOADS for column in ("s", "tokens / s", "ratio", "processor s")),
    "peak MiB by rank",
    "MiB sent by rank",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all, or one part in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), help="which of them")
    parser.add_argument("--rounds", type=int, default=3, help="of all layouts")
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.part:
        part, model, name, out = args.part
        folder, case, layout = args.scratch / model, CASES[model], LAYOUTS[model][name]
        timed = part == "time"
        found = time_steps(folder, case, layout, args.steps) if timed else measure_memory(folder, case, layout)
        write_json(Path(out), found)
        return
    document: dict[str, Any] = {"machine": machine(), "models": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.models:
            document["models"][model] = measure(Path(scratch), model, args.rounds, args.steps)
    print(table(_HEADER, [line for model, found in document["models"].items() for line in _lines(model, found)]))
    if args.json:
        write_json(args.json, document)


if __name__ == "__main__":
    main()
