"""Memory that ranks give back between turns on shared devices, and the seconds that it takes, by part.

    OMP_NUM_THREADS=1 python -m benchmarks.placement.turn_memory --json turn_memory.json

Every layout has gloo processes of its own, on one thread each, with the learner's memory settings. A rank loads a
random model in float32 and makes two steps of AdamW. It writes a checkpoint, publishes a version and accumulates
another gradient. Then gradients, optimizer and parameters go to files in `--rest`, and come back in the other order.
The step that follows must have a finite gradient.

Memory is the resident memory of a rank without mapped files (RssAnon), in MiB, after each part. `imports` is that of a
process which has trained a tiny model, and `trained` that amid the step. Seconds are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.common import HelpFormatter, machine, table, write_json
from benchmarks.learner.engine_layouts import Layout
from benchmarks.rank_processes import run_ranks
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.distributed.turn_memory import held_bytes
from rollmesh.learner.distributed.weight_export import WeightExport
from rollmesh.learner.engines.interface import Engine, EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.engines.resting_parts import GRADIENTS, OPTIMIZER, PARAMS
from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import DistributedSection, OptimizerSection
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.runtime.memory_tuning import (
    TENSOR_BYTES,
    allocate_from_one_heap,
    freeze_heap,
    keep_freed_memory,
    return_freed_memory,
)
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.testing.engine_cases import make_batches, make_sequences, policy_loss, save_random, train

_MIB = 1 << 20
_PARTS = (GRADIENTS, OPTIMIZER, PARAMS)
LAYOUTS = {
    "FSDP2, one rank": Layout("fsdp2"),
    "FSDP2 x2": Layout("fsdp2", 2),
    "Megatron, one rank": Layout("megatron"),
    "Megatron DP2": Layout("megatron", 2),
    "Megatron TP2": Layout("megatron", 2, ParallelSection(tp=2)),
}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}


def make_models(folder: Path, hidden: int, layers: int, vocabulary: int) -> int:
    """Writes the model and a tiny one; returns the parameters of the model."""
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    config = AutoConfig.for_model("qwen3", **_HEADS, **sizes, head_dim=hidden // 8, vocab_size=vocabulary)
    save_random(config, folder / "model")
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 64}
    save_random(AutoConfig.for_model("qwen3", **_HEADS, **tiny), folder / "tiny")
    return sum((folder / "model" / file.name).stat().st_size for file in folder.glob("model/*.safetensors")) // 4


def measure(folder: Path, layout: Layout, rest: Path) -> dict[str, Any]:
    """One rank's bytes and seconds."""
    keep_freed_memory(TENSOR_BYTES)
    allocate_from_one_heap()
    tiny = _engine(folder / "tiny", layout, rest)
    train(tiny, make_sequences(0))
    tiny.offload()
    found: dict[str, Any] = {"imports": _resident()}
    engine = _engine(folder / "model", layout, rest)
    freeze_heap()
    for seed in range(2):
        train(engine, make_sequences(seed))
    _publish_and_save(engine, folder)
    batches = make_batches(engine, make_sequences(2))
    engine.accumulate(batches, policy_loss, engine.global_counts(batches))
    found["trained"] = _resident()
    found |= {f"{part} away": _timed(partial(engine.offload, **_only(part))) for part in _PARTS}
    found["resting"] = dict(engine.resting_bytes)
    found |= {f"{part} back": _timed(partial(engine.onload, **_only(part))) for part in reversed(_PARTS)}
    assert math.isfinite(engine.apply().metrics["grad_norm"]), "the step has used memory that was not back"
    for each in (engine, tiny):
        each.close()
    return found


def _engine(model: Path, layout: Layout, rest: Path) -> Engine:
    spec = EngineSpec(
        ModelSection(path=str(model), dtype="bfloat16"),
        OptimizerSection(),
        10,
        parallel=layout.parallel,
        rest_folder=rest,
    )
    return create_engine(spec, backend=layout.backend)


def _publish_and_save(engine: Engine, folder: Path) -> None:
    rules = PublishRules(transport="shm")
    publisher = WeightPublisher("benchmark", {}, rules) if engine.layout.leads else None
    channel = RankChannel(DistributedSection()) if engine.layout.processes > 1 else None
    export = WeightExport(engine, channel, rules.bucket_bytes, ahead=False)
    export.export(publisher, PolicyVersion(1, 1)).result()
    export.close()
    if publisher is not None:
        publisher.close()
    store = CheckpointStore(folder / f"saved-{engine.layout.processes}-{type(engine).__name__}")
    store.begin({"actor": engine}, PolicyVersion(1, 1), {}).result()
    store.close()


def _only(part: str) -> dict[str, bool]:
    return {name: name == part for name in _PARTS}


def _timed(work: Callable[[], object]) -> dict[str, float]:
    began = time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - began, "resident": _resident()}


def _resident() -> int:
    gc.collect()
    return_freed_memory()
    return held_bytes(torch.device("cpu"))


def _line(name: str, ranks: list[dict[str, Any]]) -> list[str]:
    moves = [(part, way) for way, parts in (("away", _PARTS), ("back", _PARTS[::-1])) for part in parts]
    base = [f"{max(rank[key] for rank in ranks) / _MIB:.0f}" for key in ("imports", "trained")]
    cells = []
    for part, way in moves:
        found = [rank[f"{part} {way}"] for rank in ranks]
        resident, seconds = (max(each[key] for each in found) for key in ("resident", "seconds"))
        cells.append(f"{resident / _MIB:.0f} ({seconds:.2f} s)")
    return [name, *base, *cells]


_HEADER = (
    "layout",
    "imports, MiB",
    "trained",
    *(f"{part} away" for part in _PARTS),
    *(f"{part} back" for part in reversed(_PARTS)),
)


def main() -> None:
    """Measures all layouts, or one rank of one in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="which of them")
    parser.add_argument("--hidden", type=int, default=640, help="width of the model; divisible by 16")
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument("--vocabulary", type=int, default=32768, help="of the model")
    parser.add_argument("--rest", type=Path, help="folder for what rests, on a disk; a temporary one, if left out")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        name, folder, rest, out = arguments.part
        Path(out).write_text(json.dumps(measure(Path(folder), LAYOUTS[name], Path(rest))), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(dir=arguments.rest) as scratch:
        folder, rest = Path(scratch), Path(scratch) / "resting"
        parameters = make_models(folder, arguments.hidden, arguments.layers, arguments.vocabulary)
        found = {}
        for name in arguments.layouts:
            command = [sys.executable, "-m", __spec__.name, "--part", name, str(folder), str(rest)]
            found[name] = run_ranks(command, LAYOUTS[name].processes)
            print(_line(name, found[name]), file=sys.stderr)
    print(f"{parameters / 1e6:.0f} M parameters, {4 * parameters / _MIB:.0f} MiB in float32")
    print(table(_HEADER, [_line(name, ranks) for name, ranks in found.items()]))
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), "parameters": parameters, "layouts": found})


if __name__ == "__main__":
    main()
