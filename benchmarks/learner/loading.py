"""The memory of a process while a model is loaded, and while its checkpoint is exported.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.loading --json loading.json

The models are random, of 0.5 billion parameters (1 GB in bfloat16): a dense one, and one whose experts are stored one
by one. 1, 2 and 4 gloo ranks load each as the learner does, into float32 masters. Two ranks write a
checkpoint, and one process exports it in bfloat16. Memory is the peak of the resident set (VmHWM) over that after the
imports and a tiny model. Next to it stands what the process may hold.

While it loads that is its shard and buffers: a piece of 64 MiB, or three times its part of what one conversion reads.
While it exports it is a tensor in bfloat16, and twice a rank's part of it in float32. A tensor of experts counts once
more.

Every measurement has a process of its own for each rank. `--scratch` needs 8 GB on disk, and 10 GB of memory are used.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import REPOSITORY, HelpFormatter, machine, table, write_json
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.engines.fsdp2.checkpoint_tensors import read_tensors
from rollmesh.learner.engines.fsdp2.loading import PIECE_BYTES
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.model_files.folder_writer import write_folder
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.runtime.ranks import environment_of
from rollmesh.mesh.trajectory.versions import PolicyVersion

_DENSE = {
    "vocab_size": 32768,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {"dense": ("llama", _DENSE), "experts": ("qwen3_moe", _EXPERTS)}
RANKS = (1, 2, 4)
# Ranks that write the checkpoint which is exported.
_SAVING = 2
# Copies of a conversion: the stored tensors, the stacked ones, and the joined one.
_COPIES = 3
_MIB = 1 << 20


def make(name: str, scratch: Path) -> None:
    """Writes a model in bfloat16, and a tiny one of its kind."""
    kind, settings = MODELS[name]
    for folder, sizes in ((scratch / name, settings), (scratch / f"tiny-{name}", _TINY)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.bfloat16)
        model.save_pretrained(folder)


def load(name: str, scratch: Path) -> dict[str, float]:
    """Loads a model on this rank; gives bytes of its shard, of what it may hold and what it held, and seconds."""
    tiny = create_engine(_spec(scratch / f"tiny-{name}"))
    began = time.perf_counter()
    engine, peak = _peak(lambda: create_engine(_spec(scratch / name)))
    seconds = time.perf_counter() - began
    local = (parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in _parameters(engine))
    shard = sum(parameter.nbytes for parameter in local)
    ranks = int(os.environ["WORLD_SIZE"])
    with StoredModel(scratch / name) as stored:
        read = [
            sum(stored.files.stored[source].nbytes for source, _ in conversion.sources)
            // (ranks if conversion.is_by_expert else 1)
            for conversion in stored.plan.conversions
            if conversion.converter is not None
        ]
        full = sum(parameter.nbytes for parameter in stored.model.parameters())
    buffers = max([PIECE_BYTES, *(_COPIES * nbytes for nbytes in read)])
    if ranks == _SAVING:
        for saved, model in ((name, engine), (f"tiny-{name}", tiny)):
            store = CheckpointStore(scratch / f"checkpoints-{saved}")
            store.begin({"actor": model}, PolicyVersion(1, 0), {}).result()
    engine.close()
    tiny.close()
    return {"full": full, "shard": shard, "buffers": buffers, "measured": peak, "seconds": seconds}


def export(name: str, scratch: Path) -> dict[str, float]:
    """Exports the checkpoint; gives the bytes of what the process may hold and what it held, and seconds."""
    _export(f"tiny-{name}", scratch)
    began = time.perf_counter()
    _, peak = _peak(lambda: _export(name, scratch))
    seconds = time.perf_counter() - began
    with StoredModel(scratch / name) as stored:
        split = {n for c in stored.plan.conversions if c.converter is not None for n in c.results}
        held = max(
            parameter.numel() * ((2 + 2 * (n in split)) + 2 * 4 / _SAVING)
            for n, parameter in stored.model.named_parameters()
        )
        full = sum(parameter.nbytes for parameter in stored.model.parameters())
    return {"full": full, "buffers": held, "measured": peak, "seconds": seconds}


def _export(name: str, scratch: Path) -> None:
    ((_, checkpoint),) = CheckpointStore(scratch / f"checkpoints-{name}").list()
    with StoredModel(scratch / name) as source:
        described = source.describe()
        tensors = read_tensors(checkpoint, described, torch.bfloat16)
        write_folder(scratch / f"out-{name}", source, described, tensors, torch.bfloat16)


def _spec(folder: Path) -> EngineSpec:
    return EngineSpec(ModelSection(path=str(folder), dtype="bfloat16"), OptimizerSection(), total_steps=1)


def _parameters(engine: Any) -> list[torch.Tensor]:
    return list(engine._model.parameters())


def _peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """Does some work; gives its result, and the bytes that were resident in between over those before."""
    gc.collect()
    # The peak begins again at what is resident now.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _high_water()
    return work(), _high_water() - before


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10


def _measure(part: str, name: str, scratch: Path, ranks: int = 1) -> dict[str, Any]:
    """Runs a part on ranks of their own; gives the largest of each number over them."""
    command = [sys.executable, "-m", "benchmarks.learner.loading", "--scratch", str(scratch), "--part", part, name]
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [*command, str(out)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment_of(rank, ranks, Path(folder) / "meeting")},
                cwd=REPOSITORY,
            )
            for rank, out in enumerate(outs)
        ]
        try:
            ended = [process.wait(timeout=900) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(ended):
            raise SystemExit(f"{part} {name} on {ranks} ranks ended with {ended}")
        found = [json.loads(out.read_text()) for out in outs]
    return {key: max(row[key] for row in found) for key in found[0]}


def _row(part: str, name: str, ranks: int, found: dict[str, float]) -> list[str]:
    mib = {key: value / _MIB for key, value in found.items() if key != "seconds"}
    may = mib.get("shard", 0.0) + mib["buffers"]
    cells = [name, part, str(ranks), f"{mib['full']:.0f}", f"{mib.get('shard', 0.0):.0f}", f"{mib['buffers']:.0f}"]
    return [*cells, f"{may:.0f}", f"{mib['measured']:.0f}", f"{mib['measured'] / may:.2f}", f"{found['seconds']:.0f}"]


_HEADER = ("model", "part", "ranks", "float32 model, MiB", "shard", "buffers", "both", "measured", "ratio", "seconds")


def main() -> None:
    """Measures all, or one part in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--scratch", type=Path, help="folder of the models; a temporary one, if left out")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which of them")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts: dict[str, Callable[[str, Path], Any]] = {"make": make, "load": load, "export": export}
    if arguments.part:
        part, name, out = arguments.part
        Path(out).write_text(json.dumps(parts[part](name, arguments.scratch) or {}))
        return
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        scratch, rows, numbers = Path(folder), [], []
        for name in arguments.models:
            _measure("make", name, scratch)
            for part, ranks in [*(("load", ranks) for ranks in RANKS), ("export", 1)]:
                found = _measure(part, name, scratch, ranks)
                rows.append(_row(part, name, ranks, found))
                numbers.append({"model": name, "part": part, "ranks": ranks, **found})
                print(rows[-1], file=sys.stderr)
    print(table(_HEADER, rows))
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), "rows": numbers})


if __name__ == "__main__":
    main()
