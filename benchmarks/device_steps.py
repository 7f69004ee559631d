"""Training steps on one CUDA device: time, tokens, share of its arithmetic, waits, and memory next to the plan's.

    python -m benchmarks.device_steps --json device_steps.json

Models have random weights, and the sizes of Qwen2.5 or 32 experts in each layer. Parameters are bfloat16, masters and
AdamW float32. A step is the clipped surrogate on groups of responses of one length, in micro-batches of so many tokens.
Each case has a process of its own. Its first two steps are left out; seconds are the host's, with a wait for the device
at both ends of a step. MFU counts the operations that the model needs, a shared prompt once for all of its responses,
whatever an engine computes.

Memory is the most that torch had allocated for tensors during the measured steps. The plan's is that of `rollmesh plan`
for the same micro-batches. Waits are those of which torch warns (`torch.cuda.set_sync_debug_mode`), in a step more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import REPOSITORY, HelpFormatter, machine, summarize, table, write_json
from benchmarks.learner.equivalence import surrogate
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.plan import PlanItem, plan_batch
from rollmesh.learner.batching.types import PackedBatch, TrainSequence
from rollmesh.learner.engines.device_peaks import peak_tflops
from rollmesh.learner.engines.interface import Engine, EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.planning.cluster import parse_devices
from rollmesh.planning.command import plan_run

_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "heads": (4, 2), "tied": True},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "heads": (14, 2), "tied": True},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "heads": (12, 2), "tied": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "heads": (28, 4), "tied": False},
    "experts": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "heads": (16, 4),
        "tied": False,
    },
}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "head_dim": 64}
_MEMBERS, _PROMPT = 8, 128
_WARM = 2
_MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, an engine, and the batches of a step.

    Attributes:
        engine: training backend.
        size: of the model.
        recompute: activations are computed again in the backward pass.
        groups: of a step.
        response: tokens of each response.
        budget: tokens of a micro-batch.
    """

    engine: str = "fsdp2"
    size: str = "0.5B"
    recompute: bool = False
    groups: int = 16
    response: int = 896
    budget: int = 16384


CASES = (
    *(Case(engine, "0.5B", recompute) for recompute in (False, True) for engine in ("fsdp2", "megatron")),
    *(Case(engine, size, True, groups=8) for size in ("1.5B", "experts") for engine in ("fsdp2", "megatron")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--engines", default="fsdp2,megatron")
    parser.add_argument("--sizes", default="0.5B,1.5B,experts")
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    parser.add_argument("--device", default="cuda", help="cpu: for the script's own sake")
    parser.add_argument("--devices", default="1xH100-80G", help="of the plan")
    parser.add_argument("--tiny", action="store_true", help="a tiny model alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help="one case, as JSON, in this process")
    parser.add_argument("--folder", type=Path, help="of its model")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(Case(**json.loads(options.case)), options.folder, options)))
        return
    engines, sizes = options.engines.split(","), options.sizes.split(",")
    cases = [case for case in CASES if case.engine in engines and case.size in sizes]
    if options.tiny:
        cases = [Case(engine, "tiny", groups=2, response=32, budget=256) for engine in engines]
    cells = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            folder = Path(scratch) / case.size
            if not folder.exists():
                make_model(case.size, folder, options.device)
            cells.append(_in_a_process(case, folder, options))
            print(table(_HEADER, [_row(cells[-1])]), flush=True)
    if options.json:
        write_json(options.json, {"machine": machine(), "device": _device_name(options.device), "cells": cells})
    print(table(_HEADER, [_row(cell) for cell in cells]))


def make_model(size: str, folder: Path, device: str) -> None:
    """Writes a random model."""
    sizes = dict(_SIZES[size])
    heads, groups = sizes.pop("heads")
    config = AutoConfig.for_model(
        "qwen3_moe" if size == "experts" else "qwen2",
        **(_EXPERTS if size == "experts" else {}),
        vocab_size=151936 if size != "tiny" else 256,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=sizes.pop("tied"),
        max_position_embeddings=32768,
        **sizes,
    )
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def measure(case: Case, folder: Path, options: Any) -> dict[str, Any]:
    """Steps of one case in this process."""
    cuda = options.device == "cuda"
    peak = peak_tflops(_device_name("cuda"), "bfloat16") if cuda else None
    spec = EngineSpec(
        ModelSection(path=str(folder), dtype="bfloat16"),
        OptimizerSection(lr=1e-6),
        100,
        device=options.device,
        param_dtype="bfloat16" if cuda else "float32",
        activation_checkpointing=case.recompute,
        peak_tflops=peak,
    )
    engine = create_engine(spec, backend=case.engine)
    sequences = _sequences(case, engine.vocab_size)
    batches = _batches(engine, case, sequences)
    for _ in range(_WARM):
        _step(engine, batches)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = [_timed(engine, batches) for _ in range(options.steps)]
    allocated = torch.cuda.max_memory_allocated() if cuda else 0
    reserved = torch.cuda.max_memory_reserved() if cuda else 0
    flops = 3.0 * sum(engine.cost.forward_flops(batch.row) for batch in batches)
    middle = float(np.median(seconds))
    found = {
        **asdict(case),
        "micro_batches": len(batches),
        "seconds": summarize(seconds),
        "tokens_per_s": case.groups * _MEMBERS * (_PROMPT + case.response) / middle,
        "tflops": flops / 1e12 / middle,
        "mfu": flops / 1e12 / middle / peak if peak else None,
        "allocated_mib": allocated / _MIB,
        "reserved_mib": reserved / _MIB,
        "waits": _waits(engine, batches) if cuda else None,
        "parameters": sum(int(np.prod(tensor.shape)) for tensor in engine.exported_tensors()),
    }
    engine.close()
    return json.loads(json.dumps(found, default=asdict))  # type: ignore[no-any-return]


def _planned(case: Case, folder: Path, devices: str) -> dict[str, Any]:
    config = load_config(
        {
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "data": {"train": "none.jsonl"},
            "rollout": {
                "n": _MEMBERS,
                "replicas": 0,
                "max_prompt_tokens": _PROMPT,
                "max_response_tokens": case.response,
            },
            "learner": {
                "engine": case.engine,
                "ranks": 1,
                "device": "cuda",
                "param_dtype": "bfloat16",
                "activation_checkpointing": case.recompute,
                "batch": {"groups": case.groups, "tokens_per_micro_batch": case.budget},
            },
        }
    )
    role = plan_run(config, parse_devices(devices)).plan.roles[0]
    phase = max((phase for phase in role.phases if phase.name != "inference"), key=lambda phase: phase.total)
    return {"planned_mib": phase.total / _MIB, "phase": phase.name}


def _sequences(case: Case, vocabulary: int) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(case.groups):
        prompt = rng.integers(3, vocabulary, _PROMPT).astype(np.int32)
        for advantage in rng.normal(size=_MEMBERS):
            ids = rng.integers(3, vocabulary, case.response).astype(np.int32)
            log_probs = np.full(case.response, -np.log(vocabulary), dtype=np.float32)
            mask = np.ones(case.response, np.uint8)
            sequences.append(TrainSequence(prompt, ids, mask, log_probs, float(advantage)))
    return sequences


def _batches(engine: Engine, case: Case, sequences: list[TrainSequence]) -> list[PackedBatch]:
    items = [PlanItem(i // _MEMBERS, len(s.prompt_ids), len(s.response_ids)) for i, s in enumerate(sequences)]
    (micro,) = plan_batch(items, token_budget=case.budget, ranks=1, packing=engine.packing).minibatches[0]
    return [pack(sequences, indices, device=engine.device) for indices in micro]


def _step(engine: Engine, batches: list[PackedBatch]) -> None:
    engine.accumulate(batches, surrogate, engine.global_counts(batches))
    engine.apply()


def _timed(engine: Engine, batches: list[PackedBatch]) -> float:
    _synchronize(engine)
    began = time.perf_counter()
    _step(engine, batches)
    _synchronize(engine)
    return time.perf_counter() - began


def _synchronize(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


def _waits(engine: Engine, batches: list[PackedBatch]) -> int:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _step(engine, batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in seen)


def _in_a_process(case: Case, folder: Path, options: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.device_steps", "--case", json.dumps(asdict(case))]
    command += ["--folder", str(folder), "--steps", str(options.steps), "--device", options.device]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    # While it loads the model.
    planned = _planned(case, folder, options.devices)
    out, errors = process.communicate(timeout=600)
    if process.returncode:
        return {**asdict(case), "error": errors.strip()[-3000:]}
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found | planned


_HEADER = (
    "model",
    "engine",
    "recomputed",
    "micro-batches",
    "s per step",
    "tokens/s",
    "TFLOP/s",
    "MFU",
    "waits",
    "allocated, GiB",
    "reserved",
    "planned (phase)",
    "planned/allocated",
)


def _row(cell: dict[str, Any]) -> tuple[object, ...]:
    first = (cell["size"], cell["engine"], cell["recompute"])
    if "error" in cell:
        return (*first, *["-"] * 9, cell["error"][-2000:])
    seconds = cell["seconds"]
    return (
        *first,
        cell["micro_batches"],
        f"{seconds['median']:.3f} [{seconds['low']:.3f} .. {seconds['high']:.3f}]",
        f"{cell['tokens_per_s']:,.0f}",
        f"{cell['tflops']:.0f}",
        "" if cell["mfu"] is None else f"{cell['mfu']:.1%}",
        cell["waits"],
        f"{cell['allocated_mib'] / 1024:.2f}",
        f"{cell['reserved_mib'] / 1024:.2f}",
        f"{cell['planned_mib'] / 1024:.2f} ({cell['phase']})",
        f"{cell['planned_mib'] / cell['allocated_mib']:.3f}" if cell["allocated_mib"] else "",
    )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    main()
