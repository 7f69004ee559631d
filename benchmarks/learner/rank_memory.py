"""The memory of a rank that loads a model, trains, publishes and saves it, and of a process that exports a checkpoint.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.rank_memory --json rank_memory.json

The models are random and have 1 GB in float32: a dense one, and one whose experts are stored one by one. 1, 2 and 4
gloo ranks each load one as the learner does, into float32 masters. They make two steps on few tokens, publish four
versions in bfloat16 into shared memory, and write a checkpoint. One process exports the checkpoint of two ranks in
bfloat16. Memory is the peak of the resident set (VmHWM) in a phase, over that after the imports and a tiny model. Next
to it stands what the process may hold:

- load: its shard, and as buffers a piece of 64 MiB, or three times its part of what one conversion reads.
- train: masters, gradients and two moments. As buffers the larger of two moments. One is the largest phase that
  `rollmesh plan` reckons with: activations, logits, gathered parameters, gradients before their reduction. The other,
  on several ranks, is the reduction of the largest group of parameters, a layer or a matrix of the vocabulary. There
  are its gradient, the buffer that is reduced, gloo's copy of it, the shard of the result, the next layer, and
  activations.
- publish: masters and moments. As buffers one tensor of the shard in bfloat16, and pages in shared memory that it has
  written or digested. They are of the versions that rank 0 keeps, and of the next.
- save: masters and moments, their copy, and one tensor of the shard.
- export: no shard, a tensor in bfloat16, and twice a rank's part of it in float32. A tensor of experts
  counts once more.

Every measurement has a process of its own for each rank. Freed memory is returned at once, as in `planned_memory`.
`--scratch` needs 8 GB on disk, and 8 GB of memory are used.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import HelpFormatter, machine, table, write_json
from benchmarks.learner.planned_memory import MALLOC
from benchmarks.learner.training_buffers import training_buffers
from benchmarks.rank_processes import run_ranks
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.distributed.weight_export import WeightExport
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.engines.tensors.checkpoint_tensors import read_tensors
from rollmesh.learner.model_files.folder_writer import write_folder
from rollmesh.learner.model_files.reading import PIECE_BYTES
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import DistributedSection, OptimizerSection
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.testing.engine_cases import make_sequences, train

_DENSE = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
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
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {"dense": ("llama", _DENSE), "experts": ("qwen3_moe", _EXPERTS)}
RANKS = (1, 2, 4)
# Ranks that write the checkpoint which is exported.
_SAVING = 2
# Copies of a conversion: the stored tensors, the stacked ones, and the joined one.
_COPIES = 3
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes of a rank in a phase.

    Attributes:
        state: that stay: shards of masters, gradients, moments, and their copy.
        buffers: that it may hold beyond them.
        measured: that were resident at most, by rank.
        seconds: that it took.
    """

    state: int
    buffers: int
    measured: tuple[int, ...]
    seconds: float


def make(name: str, scratch: Path, layers: int) -> None:
    """Writes a model in bfloat16, and a tiny one of its kind."""
    kind, settings = MODELS[name]
    for folder, sizes, count in ((scratch / name, settings, layers), (scratch / f"tiny-{name}", _TINY, 1)):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, num_hidden_layers=count, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)


def run_phases(name: str, scratch: Path) -> dict[str, Phase]:
    """Loads, trains and saves a model on this rank."""
    ranks = int(os.environ["WORLD_SIZE"])
    buffers = training_buffers(scratch / name, ranks)
    tiny = _loaded(scratch / f"tiny-{name}")
    _steps(tiny)
    base = _begin()
    engine, seconds = _timed(lambda: _loaded(scratch / name))
    tensors = [tensor for _, tensor in engine._runner.named_tensors()]
    shards = [(t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors]
    shard = sum(shards)
    with StoredModel(scratch / name) as stored:
        read = [
            sum(stored.files.stored[source].nbytes for source, _ in conversion.sources)
            // (ranks if conversion.is_by_expert else 1)
            for conversion in stored.plan.conversions
            if conversion.converter is not None
        ]
    found = {"load": Phase(shard, max([PIECE_BYTES, *(_COPIES * nbytes for nbytes in read)]), (_peak(base),), seconds)}
    _begin()
    _, seconds = _timed(lambda: _steps(engine))
    found["train"] = Phase(4 * shard, buffers, (_peak(base),), seconds)
    _publish(tiny)
    _begin()
    _, seconds = _timed(lambda: _publish(engine))
    found["publish"] = Phase(3 * shard, max(shards) // 2 + _pages(shard * ranks // 2, ranks), (_peak(base),), seconds)
    _save(tiny, scratch / f"saved-{ranks}" / f"tiny-{name}")
    _begin()
    _, seconds = _timed(lambda: _save(engine, scratch / f"saved-{ranks}" / name))
    found["save"] = Phase(2 * 3 * shard, max(shards), (_peak(base),), seconds)
    engine.close()
    tiny.close()
    return found


def export(name: str, scratch: Path) -> dict[str, Phase]:
    """Exports the checkpoint of two ranks."""
    _export(f"tiny-{name}", scratch)
    base = _begin()
    _, seconds = _timed(lambda: _export(name, scratch))
    peak = _peak(base)
    with StoredModel(scratch / name) as stored:
        split = {n for c in stored.plan.conversions if c.converter is not None for n in c.results}
        held = max(
            parameter.numel() * ((2 + 2 * (n in split)) + 2 * 4 / _SAVING)
            for n, parameter in stored.model.named_parameters()
        )
    return {"export": Phase(0, int(held), (peak,), seconds)}


def _export(name: str, scratch: Path) -> None:
    ((_, checkpoint),) = CheckpointStore(scratch / f"saved-{_SAVING}" / name).list()
    with StoredModel(scratch / name) as source:
        described = source.describe()
        tensors = read_tensors(checkpoint, described, torch.bfloat16)
        write_folder(scratch / f"out-{name}", source, described, tensors, torch.bfloat16)


def _loaded(folder: Path) -> Any:
    return create_engine(EngineSpec(ModelSection(path=str(folder), dtype="bfloat16"), OptimizerSection(), 10))


def _steps(engine: Any) -> None:
    for seed in range(2):
        train(engine, make_sequences(seed))


def _publish(engine: Any) -> None:
    """Publishes versions until the first is released."""
    rules = PublishRules(transport="shm")
    publisher = WeightPublisher("benchmark", {}, rules) if engine.layout.leads else None
    channel = RankChannel(DistributedSection()) if engine.layout.processes > 1 else None
    export = WeightExport(engine, channel, rules.bucket_bytes)
    for version in range(rules.keep_versions + 2):
        export.export(publisher, PolicyVersion(1, version)).result()
    export.close()
    if publisher is not None:
        publisher.close()


def _pages(version: int, ranks: int) -> int:
    """Bytes of the versions in shared memory that one rank has written, or digested."""
    return int((PublishRules().keep_versions + 1) * version * (2 / ranks - 1 / ranks**2))


def _save(engine: Any, folder: Path) -> None:
    store = CheckpointStore(folder)
    store.begin({"actor": engine}, PolicyVersion(1, 0), {}).result()
    store.close()


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def _begin() -> int:
    """The peak begins again at what is resident now, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _high_water()


def _peak(base: int) -> int:
    """Bytes that were resident since `_begin` over those of the base."""
    return _high_water() - base


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10


def _measure(part: str, name: str, scratch: Path, ranks: int = 1, *options: str) -> dict[str, Phase]:
    """Runs a part on ranks of their own; gives what each held at most, and the largest of the other numbers."""
    command = [sys.executable, "-m", __spec__.name, "--scratch", str(scratch), *options, "--part", part, name]
    found = run_ranks(command, ranks, environment=MALLOC)
    return {
        phase: Phase(
            **{key: max(rank[phase][key] for rank in found) for key in numbers if key != "measured"},
            measured=tuple(rank[phase]["measured"][0] for rank in found),
        )
        for phase, numbers in found[0].items()
    }


def _line(name: str, phase: str, ranks: int, found: Phase) -> list[str]:
    held = found.state + found.buffers
    mib = [f"{number / _MIB:.0f}" for number in (found.state, found.buffers, held)]
    measured = ", ".join(f"{number / _MIB:.0f}" for number in found.measured)
    return [name, phase, str(ranks), *mib, measured, f"{max(found.measured) / held:.2f}", f"{found.seconds:.0f}"]


_HEADER = ("model", "phase", "ranks", "state, MiB", "buffers", "both", "measured by rank", "ratio", "seconds")


def main() -> None:
    """Measures all, or one part in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--scratch", type=Path, help="folder of the models; a temporary one, if left out")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which of them")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="numbers of them; 2 for an export")
    parser.add_argument("--layers", type=int, default=16, help="of the models; fewer need less memory")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts: dict[str, Callable[[str, Path], Any]] = {
        "make": partial(make, layers=arguments.layers),
        "run_phases": run_phases,
        "export": export,
    }
    if arguments.part:
        part, name, out = arguments.part
        found = parts[part](name, arguments.scratch) or {}
        Path(out).write_text(json.dumps({phase: asdict(numbers) for phase, numbers in found.items()}))
        return
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        scratch, rows, numbers = Path(folder), [], []
        for name in arguments.models:
            _measure("make", name, scratch, 1, "--layers", str(arguments.layers))
            exports = [("export", 1)] if _SAVING in arguments.ranks else []
            for part, ranks in [*(("run_phases", ranks) for ranks in arguments.ranks), *exports]:
                for phase, found in _measure(part, name, scratch, ranks).items():
                    rows.append(_line(name, phase, ranks, found))
                    numbers.append({"model": name, "phase": phase, "ranks": ranks, **asdict(found)})
                    print(rows[-1], file=sys.stderr)
                if ranks not in (1, _SAVING):
                    shutil.rmtree(scratch / f"saved-{ranks}")
    print(table(_HEADER, rows))
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), "rows": numbers})


if __name__ == "__main__":
    main()
