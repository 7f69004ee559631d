"""Export of a sharded model: how much memory it takes in addition to the model, and how long, with 1, 2 and 4 ranks.

Method: a random Qwen3 of 191 M parameters (float32 masters, exported in bfloat16) is sharded by the FSDP2 engine over
gloo ranks on this machine. Every export is read by a consumer that keeps nothing. Four ways, one after the other in the
same processes, in alternating order:

- `batches`: the engine's own export (batches of 64 MiB, cast before they travel, gathered on rank 0 alone);
- `parts`: the same with every rank as a holder, which reads its part of the tensors;
- `parameters`: every parameter gathered on every rank in its master dtype, then cast;
- `model`: torch's full state dict on rank 0, in host memory.

Memory is the kernel's: the peak of the resident set during the export above that before it, with freed memory released
(`malloc_trim`). It counts what C++ allocates as well. One process computes on one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import machine, summarize, table, write_json, yardstick
from benchmarks.rank_processes import run_ranks

_RANKS = (1, 2, 4)
_WAYS = ("batches", "parts", "parameters", "model")
_TIMEOUT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    document = measure_each(__spec__.name, _RANKS, lambda folder, ranks: measure(folder, ranks, arguments.rounds))
    if arguments.json:
        write_json(arguments.json, document)
    print(as_table(document))


def measure_each(module: str, numbers: Sequence[int], measure: Callable[[Path, int], dict[str, Any]]) -> dict[str, Any]:
    """A cell for each number of ranks, with a model that a process of its own has made.

    Args:
        module: takes `--make FOLDER`.
        numbers: of ranks.
        measure: makes a cell, from the model's folder and a number of ranks.
    """
    document: dict[str, Any] = {"machine": machine(), "yardstick_before": yardstick(), "cells": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        subprocess.run([sys.executable, "-m", module, "--make", str(folder)], check=True, timeout=_TIMEOUT_S)
        document["cells"] += [measure(folder, ranks) for ranks in numbers]
    document["yardstick_after"] = yardstick()
    return document


def measure(folder: Path, ranks: int, rounds: int) -> dict[str, Any]:
    """All ways with one number of ranks."""
    command = [sys.executable, "-m", __spec__.name, "--rank-of", str(folder), "--rounds", str(rounds)]
    return {"ranks": ranks, "by_rank": run_ranks(command, ranks, timeout_s=_TIMEOUT_S)}


def as_table(document: dict[str, Any]) -> str:
    """Medians with their ranges."""
    rows = []
    for cell in document["cells"]:
        for way in _WAYS:
            runs = [rank["runs"][way] for rank in cell["by_rank"]]
            first = summarize(run["extra_mib"] for run in runs[0])
            others = [run["extra_mib"] for rank in runs[1:] for run in rank]
            seconds = summarize(run["seconds"] for run in runs[0])
            rows.append((cell["ranks"], way, first, summarize(others) if others else "", seconds))
    header = ("ranks", "way", "rank 0: MiB in addition to the model", "other ranks: MiB", "seconds")
    return table(header, rows)


def run_rank(folder: Path, rounds: int, out: Path) -> None:
    """One rank: measures, and writes what it saw as JSON."""
    import torch

    from rollmesh.learner.engines.interface import EngineSpec
    from rollmesh.learner.engines.registry import create_engine
    from rollmesh.mesh.config.inputs import ModelSection

    torch.set_num_threads(1)
    engine = create_engine(EngineSpec(ModelSection(path=str(folder), dtype="bfloat16"), None, 1))
    ways: dict[str, Callable[[], int]] = {
        "batches": lambda: _consume(engine.export_weights()),
        "parts": lambda: _consume(engine.export_weights(holders=range(engine.layout.processes))),
        "parameters": lambda: _consume(_every_parameter(engine)),
        "model": lambda: _consume(_whole_model(engine)),
    }
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    for number in range(rounds + 1):
        for way in _WAYS if number % 2 else reversed(_WAYS):
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            _barrier()
            Path("/proc/self/clear_refs").write_text("5")
            before, began = _resident_mib("VmRSS"), time.perf_counter()
            nbytes = ways[way]()
            seconds = time.perf_counter() - began
            # The first round grows what grows once: connections, caches of the allocator.
            if number:
                extra = _resident_mib("VmHWM") - before
                runs[way].append({"extra_mib": extra, "seconds": seconds, "bytes": nbytes})
            _barrier()
    engine.close()
    out.write_text(json.dumps({"runs": runs}), encoding="utf-8")


def _barrier() -> None:
    """Waits until every rank is here."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _consume(tensors: Any) -> int:
    """Reads every byte once and keeps none."""
    import torch

    total = 0
    for _, tensor in tensors:
        tensor.view(torch.uint8).max()
        total += tensor.nbytes
    return total


def _every_parameter(engine: Any) -> Any:
    import torch
    from torch.distributed.tensor import DTensor

    for name, tensor in engine._runner.named_tensors():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, full.detach().to("cpu", torch.bfloat16).contiguous()


def _whole_model(engine: Any) -> Any:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name, tensor in get_model_state_dict(engine._runner.module, options=options).items():
        yield name, tensor.to(torch.bfloat16)


def _resident_mib(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def make(folder: Path) -> None:
    """Writes the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=64_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=10,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--rank-of"]:
        run_rank(Path(sys.argv[2]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
