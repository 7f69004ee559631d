"""`rollmesh plan` compared with real training steps: peak memory of a rank, planned and resident, with 1 and 2 ranks.

Method: a random Qwen3 model is trained by the FSDP2 engine over gloo ranks on this machine, in float32. A step has two
micro-batches of one sequence. The second step is measured, so that moments are there. Resident memory is the
kernel's peak (VmHWM) above what the process held after it had trained a tiny model in the same way. So Python, torch,
transformers and what they set up at their first use are not in it. Freed memory is returned at once here
(`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`). Else the reuse by glibc would be measured. One process computes
on one thread.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.common import machine, table, write_json
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.builders import build_algorithm
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.runtime.memory_tuning import collect_garbage_seldom, freeze_heap
from rollmesh.mesh.runtime.ranks import environment_of
from rollmesh.planning.cluster import parse_devices
from rollmesh.planning.models import RunModels
from rollmesh.planning.plan import make_plan

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
_IMPORTED_ONCE = (
    "rollmesh.learner.engines.fsdp2.create",
    "rollmesh.planning.block_costs",
    "transformers.models.qwen3.modeling_qwen3",
)
_MIB = 1 << 20
_engines: list[Any] = []


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how it is trained.

    Attributes:
        hidden, layers, vocabulary: of the model; tied embeddings where `tied`.
        tokens: of a micro-batch.
        ranks: of the learner.
        recompute: activations are computed again in the backward pass.
    """

    hidden: int = 512
    layers: int = 4
    vocabulary: int = 32768
    tied: bool = False
    tokens: int = 512
    ranks: int = 1
    recompute: bool = False


CASES = tuple(
    Case(ranks=ranks, recompute=recompute, tied=tied, tokens=tokens)
    for ranks in (1, 2)
    for recompute, tied, tokens in ((False, False, 512), (True, False, 512), (True, True, 2048))
)
_TINY = Case(hidden=128, layers=1, vocabulary=64, tokens=16)
# Cheap enough for a test.
SMALL = (Case(layers=2, vocabulary=16384, tied=True, tokens=128, ranks=2, recompute=True),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one small case")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not os.environ.keys() >= MALLOC.keys():
        environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    # Imported once, for all processes that are forked here; none of them searches it for garbage.
    usual = gc.get_threshold()
    collect_garbage_seldom()
    for module in _IMPORTED_ONCE:
        importlib.import_module(module)
    freeze_heap()
    gc.set_threshold(*usual)
    cells = [measure(case) for case in (SMALL if arguments.small else CASES)]
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), "cells": cells})
    print(as_table(cells))


def as_table(cells: list[dict[str, Any]]) -> str:
    """Planned and measured, MiB per rank."""
    header = (
        "ranks",
        "parameters",
        "tokens",
        "recomputed",
        "tied",
        "planned (phase)",
        "measured by rank",
        "planned/most",
    )
    return table(
        header,
        [
            (
                cell["ranks"],
                f"{cell['parameters'] / 1e6:.1f} M",
                cell["tokens"],
                cell["recompute"],
                cell["tied"],
                f"{cell['planned_bytes'] / _MIB:.0f} ({cell['phase']})",
                ", ".join(f"{nbytes / _MIB:.0f}" for nbytes in cell["measured_bytes"]),
                f"{cell['planned_bytes'] / max(cell['measured_bytes']):.3f}",
            )
            for cell in cells
        ],
    )


def measure(case: Case) -> dict[str, Any]:
    """Plans and trains one case."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        _in_process(_make_model, case, folder)
        _in_process(_make_model, replace(_TINY, tied=case.tied), _tiny(folder))
        measured = _train(case, folder, Path(scratch) / "meeting")
        planned = _in_process(_plan, case, folder)
    return asdict(case) | planned | {"measured_bytes": measured}


def _train(case: Case, folder: Path, meeting: Path) -> list[int]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(case.ranks)]
    ranks = [
        context.Process(target=_rank, args=(case, folder, rank, meeting, sending))
        for rank, (_, sending) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"ranks ended with {[rank.exitcode for rank in ranks]}")
        return [receiving.recv() for receiving, _ in pipes]
    finally:
        for rank in ranks:
            rank.kill()


def _in_process(work: Any, *arguments: Any) -> Any:
    """The result of `work` in a process of its own, whose memory goes with it."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(work(*arguments)))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work.__name__} ended with {process.exitcode}")
    return receiving.recv()


def _tiny(folder: Path) -> Path:
    """The tiny model next to a folder's."""
    return folder.with_name("tiny")


def _make_model(case: Case, folder: Path) -> None:
    config = Qwen3Config(
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64,
        num_key_value_heads=case.hidden // 128,
        head_dim=64,
        vocab_size=case.vocabulary,
        tie_word_embeddings=case.tied,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _plan(case: Case, folder: Path) -> dict[str, Any]:
    config = load_config(
        {
            "model": {"path": str(folder)},
            "data": {"train": "none.jsonl"},
            "rollout": {"n": 2, "replicas": 0, "max_prompt_tokens": 1, "max_response_tokens": case.tokens - 1},
            "learner": {
                "ranks": case.ranks,
                "device": "cpu",
                "activation_checkpointing": case.recompute,
                "batch": {"groups": case.ranks, "tokens_per_micro_batch": case.tokens},
            },
        }
    )
    cluster, roles = parse_devices("1xCPU"), build_algorithm(config).needs.roles
    role = make_plan(config, cluster, roles, RunModels(config)).roles[0]
    phase = max((phase for phase in role.phases if phase.name != "inference"), key=lambda phase: phase.total)
    assert role.setup.micro_batches == 2, "as it is trained"
    return {"planned_bytes": phase.total, "phase": phase.name, "parameters": role.setup.shape.elements}


def _rank(case: Case, folder: Path, rank: int, meeting: Path, sending: Connection) -> None:
    os.environ.update(environment_of(rank, case.ranks, meeting))
    torch.set_num_threads(1)
    _steps(replace(_TINY, recompute=case.recompute), _tiny(folder))
    gc.collect()
    before = _resident("VmRSS")
    _steps(case, folder)
    sending.send(_resident("VmHWM") - before)


def _steps(case: Case, folder: Path) -> None:
    """Trains two steps; the peak counts from the second one on."""
    model = ModelSection(path=str(folder))
    engine = create_engine(EngineSpec(model, OptimizerSection(), 10, activation_checkpointing=case.recompute))
    count = case.tokens - 1
    rng = np.random.default_rng(0)
    sequences = [
        TrainSequence(
            np.ones(1, dtype=np.int32),
            rng.integers(3, case.vocabulary, count).astype(np.int32),
            np.ones(count, dtype=np.uint8),
            np.zeros(count, dtype=np.float32),
        )
        for _ in range(2)
    ]
    batches = [pack(sequences, [index]) for index in range(2)]

    def loss(output: ModelOutput, _: TokenBatch, counts: GlobalCounts) -> LossOutput:
        return LossOutput(-output.policy()[0].sum() / counts.tokens, Metrics())

    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")
        engine.accumulate(batches, loss, engine.global_counts(batches))
        engine.apply()
    # Kept: a second process group of the same ranks would need another place to meet.
    _engines.append(engine)


def _resident(field: str) -> int:
    """Bytes from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
