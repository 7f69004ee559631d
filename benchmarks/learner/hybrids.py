"""Training steps of hybrid models: recurrent layers alone in rows, compared with the whole model in rows.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.hybrids --json hybrids.json

Both compute the same gradient from the same groups, each as its own packing is planned, with one token budget. Lengths
of responses are log-normal. Rounds alternate the two; a ratio is that of one round, in processor time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging as transformers_logging

from benchmarks.common import HelpFormatter, machine, summarize, table, write_json
from benchmarks.learner.tiny_models import VOCABULARY, save_model
from rollmesh.learner.algorithms.losses.supervised import cross_entropy
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.plan import PlanItem, plan_batch
from rollmesh.learner.batching.types import Packing, TrainSequence
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection

_DELTA_NET = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 4}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA_NET
    | {"linear_num_value_heads": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
    },
}
"""Settings of the models beyond those that all have."""
_COMMON = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 4096}


def groups(rng: np.random.Generator, count: int, size: int, prompt: int, response: int) -> list[list[TrainSequence]]:
    """Random groups; `response` is the median of the responses' lengths."""
    found = []
    for _ in range(count):
        ids = rng.integers(0, VOCABULARY, prompt).astype(np.int32)
        lengths = np.clip(rng.lognormal(np.log(response), 0.8, size), 2, 8 * response).astype(int)
        found.append(
            [
                TrainSequence(
                    ids,
                    rng.integers(0, VOCABULARY, length).astype(np.int32),
                    np.ones(length, dtype=np.uint8),
                    np.zeros(length, dtype=np.float32),
                )
                for length in lengths
            ]
        )
    return found


def step(engine: Any, batch: Sequence[Sequence[TrainSequence]], budget: int) -> float:
    """Processor seconds of one accumulated gradient."""
    sequences = [sequence for group in batch for sequence in group]
    items = [
        PlanItem(number, len(s.prompt_ids), len(s.response_ids)) for number, group in enumerate(batch) for s in group
    ]
    plan = plan_batch(items, token_budget=budget, packing=engine.packing)
    packed = [pack(sequences, indices) for indices in plan.minibatches[0][0]]
    began = time.process_time()
    engine.accumulate(packed, cross_entropy, engine.global_counts(packed))
    seconds = time.process_time() - began
    engine.discard()
    return seconds


def measure(architecture: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step in each packing, and their ratios by round."""
    batch = groups(np.random.default_rng(0), args.groups, args.size, args.prompt, args.response)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), architecture, **_COMMON | SIZES[architecture])
        spec = EngineSpec(ModelSection(path=folder), OptimizerSection(), 1)
        with closing(create_engine(spec)) as packed, closing(create_engine(spec)) as rows:
            assert packed.packing is Packing.REPEATED
            rows._runner.repack("of a comparison")
            rows.packing = Packing.ROWS
            seconds: dict[str, list[float]] = {"packed": [], "rows": []}
            for number in range(args.rounds + 1):
                for name, engine in (("packed", packed), ("rows", rows)):
                    spent = step(engine, batch, args.budget)
                    if number:
                        seconds[name].append(spent)
    ratios = [slow / fast for slow, fast in zip(seconds["rows"], seconds["packed"], strict=True)]
    return {"model": architecture, **seconds, "ratio": ratios}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learner.hybrids", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--size", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=128, help="median tokens of a response")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    results = [measure(architecture, args) for architecture in SIZES]
    lines = [(r["model"], *(summarize(r[name]) for name in ("rows", "packed", "ratio"))) for r in results]
    print(table(("model", "rows, s", "packed, s", "rows / packed"), lines))
    if args.json:
        write_json(args.json, {"machine": machine(), "results": results})


if __name__ == "__main__":
    main()
