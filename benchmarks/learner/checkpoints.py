"""Checkpoints during training: how long it stands still, how long the write takes, and how much that slows steps.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.checkpoints --json checkpoints.json
    OMP_NUM_THREADS=1 python -m benchmarks.learner.checkpoints --kills 5

A random model of 86 million parameters trains on the CPU, with one thread for each rank. Its weights and moments in
float32 are 1 GB. Checkpoints are written as the learner does it, with digests and fsync. Steps are taken before them
and meanwhile, without a pause. Training stands still until it may continue, and a checkpoint is written when its folder
has its name. A checkpoint "at once" is one for which training waits from begin to end.

With `--kills` nothing of this is measured. Learners of one rank are killed instead, each at a random moment of a write,
and the next one continues from what it finds (`benchmarks.learner.checkpoint_kills`).

`--scratch` needs 3 GB on disk (give the disk that is to be measured), and 5 GB of memory are used.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import HelpFormatter, machine, summarize, table, write_json, yardstick
from benchmarks.learner.checkpoint_kills import kill_learners
from benchmarks.rank_processes import run_ranks
from rollmesh.learner.checkpoint.deadlines import WRITE_S
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, keep_freed_memory
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.testing.engine_cases import make_sequences, make_spec, train

_SIZES = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
RANKS = (1, 2)
_BEFORE = 3


def make(scratch: Path) -> None:
    """Writes the model."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_SIZES)).save_pretrained(scratch / "model")


def measure(scratch: Path, times: int) -> dict[str, list[float]]:
    """Writes checkpoints on this rank; gives seconds of every one, and of the steps around it."""
    keep_freed_memory(TENSOR_BYTES)
    engine = create_engine(make_spec(scratch / "model", total_steps=10_000))
    store = CheckpointStore(scratch / "checkpoints")
    found: dict[str, list[float]] = {name: [] for name in ("step", "stood", "written", "step_during", "at_once")}
    version = 0
    # The first one makes what later ones find: moments, groups of ranks, memory.
    for number in range(times + 1):
        seen: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(_BEFORE):
            version += 1
            seen["step"].append(_step(engine, version))
        began = time.perf_counter()
        written = store.begin({"actor": engine}, PolicyVersion(1, version), {})
        seen["stood"].append(time.perf_counter() - began)
        ended: list[float] = []
        written.add_done_callback(lambda _, ended=ended: ended.append(time.perf_counter()))
        while not _on_all(engine, written.done()):
            version += 1
            seen["step_during"].append(_step(engine, version))
        written.result()
        seen["written"].append(ended[0] - began)
        _clear(store, engine)
        version += 1
        began = time.perf_counter()
        store.begin({"actor": engine}, PolicyVersion(1, version), {}).result(WRITE_S)
        seen["at_once"].append(time.perf_counter() - began)
        _clear(store, engine)
        if number:
            for name, values in seen.items():
                found[name] += values
    store.close()
    engine.close()
    return found


def _step(engine: Engine, seed: int) -> float:
    began = time.perf_counter()
    train(engine, make_sequences(seed, groups=1))
    return time.perf_counter() - began


def _on_all(engine: Engine, done: bool) -> bool:
    """Ranks take the same number of steps."""
    return engine.world.sum_ints([int(done)])[0] == engine.layout.processes


def _clear(store: CheckpointStore, engine: Engine) -> None:
    engine.world.barrier()
    if engine.layout.leads:
        for _, folder in store.list():
            shutil.rmtree(folder)
    engine.world.barrier()


def _run(scratch: Path, ranks: int, times: int) -> dict[str, list[float]]:
    """Measures on ranks of their own; gives rank 0's seconds."""
    command = [sys.executable, "-m", "benchmarks.learner.checkpoints", "--scratch", str(scratch), "--times", str(times)]
    found: list[dict[str, list[float]]] = run_ranks([*command, "--rank"], ranks)
    return found[0]


def _kill(scratch: Path, kills: int) -> list[dict[str, Any]]:
    write_s, found = kill_learners(scratch, kills)
    rows = [
        [
            f"{kill.after_s:.1f}",
            "all, with its name" if kill.bytes_written is None else f"{kill.bytes_written / 1e6:.0f}",
            "the new one" if kill.new else "the one before",
            "yes" if kill.whole else "no",
        ]
        for kill in found
    ]
    print(f"A write that nothing disturbs takes {write_s:.1f} s.")
    print(table(("killed after, s", "written, MB", "continued from", "whole"), rows))
    print(f"{sum(kill.whole for kill in found)} of {kills} continued from a whole checkpoint")
    return [asdict(kill) for kill in found]


_HEADER = ("ranks", "stood still, s", "written, s", "share", "at once, s", "step, s", "step during the write, s")


def main() -> None:
    """Measures on every number of ranks, or as one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--scratch", type=Path, help="folder of the checkpoints; a temporary one, if left out")
    parser.add_argument("--times", type=int, default=5, help="checkpoints of each kind")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of ranks")
    parser.add_argument("--kills", type=int, default=0, help="kill so many learners amid a write, and measure nothing")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        arguments.rank.write_text(json.dumps(measure(arguments.scratch, arguments.times)))
        return
    rows: list[list[str]] = []
    numbers: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        make(Path(folder))
        if arguments.kills:
            numbers, arguments.ranks = _kill(Path(folder), arguments.kills), []
        for ranks in arguments.ranks:
            before = yardstick()
            summaries = {name: summarize(seen) for name, seen in _run(Path(folder), ranks, arguments.times).items()}
            share = summaries["stood"].median / summaries["written"].median
            cells = [summaries[name] for name in ("stood", "written", "at_once", "step", "step_during")]
            rows.append([str(ranks), *map(str, cells[:2]), f"{share:.1%}", *map(str, cells[2:])])
            found: dict[str, Any] = {name: asdict(summary) for name, summary in summaries.items()}
            numbers.append({"ranks": ranks, "share": share, "yardstick": [before, yardstick()], **found})
    if rows:
        print(table(_HEADER, rows))
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), "rows": numbers})


if __name__ == "__main__":
    main()
