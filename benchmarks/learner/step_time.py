"""One training step next to a plain loop over transformers and AdamW, and next to TRL's GRPOTrainer.

    OMP_NUM_THREADS=1 PYTHONPATH=FOLDER python -m benchmarks.learner.step_time --json step_time.json

All train the same random Qwen3 on the same groups, in float32 on one thread: the clipped surrogate, clipping, AdamW.
The plain loop and TRL pad sequences as they come, four to a micro-batch; TRL runs its own `training_step`. The engine
packs, or pads each micro-batch of similar lengths. Its micro-batches have as many tokens as the longest padded one. All
gradient norms of the first round must agree, else there is no result. Rounds alternate the four, and a ratio is that of
one round, in processor time. The first round is left out.

FOLDER has TRL and the packages that it needs in addition to this environment: `pip install --no-deps --target FOLDER
trl accelerate datasets pandas dill multiprocess xxhash python-dateutil pytz six tzdata`. Without TRL its columns are
empty.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.common import HelpFormatter, machine, summarize, table, write_json, yardstick
from benchmarks.learner.equivalence import surrogate
from benchmarks.learner.tiny_models import save_model
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.plan import PlanItem, plan_batch
from rollmesh.learner.batching.types import Packing, TrainSequence
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import MemorySection, OptimizerSection

_VOCABULARY = 4096
_MODEL = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "head_dim": 48,
    "max_position_embeddings": 4096,
}
_GROUPS, _MEMBERS, _PROMPT, _MEDIAN = 2, 8, 64, 64
_ROWS = 4
_RATE, _CLIP = 1e-6, 0.2
_SAME = 1e-3
Step = Callable[[], float]
"""A step of training; gives the gradient norm."""


def make_groups(rng: np.random.Generator, *, tail: bool, vocabulary: int = _VOCABULARY) -> list[TrainSequence]:
    """Groups that share prompts; responses of one length, or log-normal ones of the same median."""
    sequences = []
    for _ in range(_GROUPS):
        prompt = rng.integers(3, vocabulary, _PROMPT).astype(np.int32)
        lengths = np.clip(rng.lognormal(np.log(_MEDIAN), 1.0 if tail else 0.0, _MEMBERS), 2, 8 * _MEDIAN).astype(int)
        for length, advantage in zip(lengths, rng.normal(size=_MEMBERS), strict=True):
            ids = rng.integers(3, vocabulary, length).astype(np.int32)
            # A random model is nearly uniform, so these are near its own.
            log_probs = np.full(length, -np.log(vocabulary), dtype=np.float32)
            sequences.append(TrainSequence(prompt, ids, np.ones(length, np.uint8), log_probs, float(advantage)))
    return sequences


def padded(sequences: Sequence[TrainSequence], count: int = _ROWS) -> list[dict[str, Tensor]]:
    """Micro-batches as TRL takes them; completions are padded to the longest of all, as it pads them."""
    longest = max(len(s.response_ids) for s in sequences)
    found = []
    for first in range(0, len(sequences), count):
        rows = sequences[first : first + count]
        completions = pad_sequence([torch.from_numpy(s.response_ids).long() for s in rows], batch_first=True)
        completions = nn.functional.pad(completions, (0, longest - completions.shape[1]))
        lengths = torch.tensor([len(s.response_ids) for s in rows])
        prompts = torch.stack([torch.from_numpy(s.prompt_ids).long() for s in rows])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        found.append(
            {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": completions,
                "completion_mask": mask,
                "advantages": torch.tensor([float(np.mean(s.advantages)) for s in rows]),
                "old_per_token_logps": nn.functional.pad(
                    pad_sequence([torch.from_numpy(s.behaviour_log_probs) for s in rows], batch_first=True),
                    (0, longest - max(len(s.response_ids) for s in rows)),
                ),
                "num_items_in_batch": torch.tensor(float(sum(len(s.response_ids) for s in sequences))),
            }
        )
    return found


def plain(folder: Path, sequences: Sequence[TrainSequence], rows: int = _ROWS) -> Step:
    """A loop over padded micro-batches."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)
    batches = padded(sequences, rows)

    def step() -> float:
        for batch in batches:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            kept = batch["completion_ids"].shape[1] + 1
            logits = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=kept).logits[:, :-1]
            log_probs = logits.log_softmax(-1).gather(2, batch["completion_ids"][:, :, None])[:, :, 0]
            ratios = (log_probs - batch["old_per_token_logps"]).exp()
            clipped = ratios.clamp(1 - _CLIP, 1 + _CLIP)
            advantages, trained = batch["advantages"][:, None], batch["completion_mask"]
            loss = (-torch.minimum(advantages * ratios, advantages * clipped) * trained).sum(1) / trained.sum(1)
            (loss.mean() / len(batches)).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return step


def engine(
    folder: Path,
    sequences: Sequence[TrainSequence],
    count: int = _ROWS,
    *,
    rows: bool,
    memory: MemorySection | None = None,
) -> Step:
    """The FSDP2 engine on one rank, packed or padded, with as many tokens to a micro-batch as so many rows."""
    section = OptimizerSection(lr=_RATE, max_grad_norm=1.0)
    spec = EngineSpec(ModelSection(path=str(folder)), section, 1 << 20, memory=memory or MemorySection())
    made: Any = create_engine(spec)
    if rows:
        made._runner.repack("of a comparison")
        made.packing = Packing.ROWS
    budget = count * (_PROMPT + max(len(s.response_ids) for s in sequences))

    def step() -> float:
        items = [PlanItem(i // _MEMBERS, len(s.prompt_ids), len(s.response_ids)) for i, s in enumerate(sequences)]
        plan = plan_batch(items, token_budget=budget, packing=made.packing)
        batches = [pack(sequences, indices) for indices in plan.minibatches[0][0]]
        made.accumulate(batches, surrogate, made.global_counts(batches))
        return float(made.apply().metrics["grad_norm"])

    return step


def trl(
    folder: Path,
    sequences: Sequence[TrainSequence],
    scratch: Path,
    rows: int = _ROWS,
    vocabulary: int = _VOCABULARY,
) -> Step:
    """TRL's own training step, its gradient accumulation and its optimizer, on given samples."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    class GivenBatchTrainer(GRPOTrainer):  # type: ignore[misc]  # of an environment without types
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

    batches = padded(sequences, rows)
    config = GRPOConfig(
        output_dir=str(scratch / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=len(batches),
        num_generations=_MEMBERS,
        beta=0.0,
        epsilon=_CLIP,
        loss_type="grpo",
        learning_rate=_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        report_to="none",
    )
    words = {f"t{number}": number for number in range(vocabulary)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), pad_token="t0", eos_token="t2"
    )
    trainer = GivenBatchTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "t3"}] * _MEMBERS),
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = len(batches)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)

    def step() -> float:
        # `accelerate` steps and zeroes only where gradients are synchronized, as after the last micro-batch.
        trainer.accelerator.gradient_state._set_sync_gradients(True)
        for batch in batches:
            trainer.training_step(model, dict(batch), None)
        norm = float(trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return step


def measure(folder: Path, sequences: Sequence[TrainSequence], rounds: int, *, with_trl: bool) -> dict[str, Any]:
    """Processor seconds of each one's steps, by round.

    Raises:
        ValueError: the gradients differ.
    """
    steps: dict[str, Step] = {"plain": plain(folder, sequences)}
    if with_trl:
        steps["TRL"] = trl(folder, sequences, folder.parent)
    steps["packed"] = engine(folder, sequences, rows=False)
    steps["padded"] = engine(folder, sequences, rows=True)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        norms = {}
        for name, step in steps.items():
            began = time.process_time()
            norms[name] = step()
            if number:
                seconds[name].append(time.process_time() - began)
        if not number and max(norms.values()) > (1 + _SAME) * min(norms.values()):
            raise ValueError(f"gradient norms differ: {norms}")
    trained = sum(len(s.response_ids) for s in sequences)
    places = sum(batch["completion_ids"].numel() for batch in padded(sequences))
    return {"seconds": seconds, "trained_tokens": trained, "padded_tokens": places}


def _line(lengths: str, found: Mapping[str, Any]) -> list[object]:
    seconds = found["seconds"]

    def ratio(slow: str, fast: str) -> str:
        if slow not in seconds:
            return ""
        return str(summarize(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)))

    filled = f"{found['trained_tokens'] / found['padded_tokens']:.0%}"
    pairs = [(slow, fast) for slow in ("plain", "TRL") for fast in ("packed", "padded")]
    return [lengths, filled, summarize(seconds["packed"]), *(ratio(*pair) for pair in pairs)]


_HEADER = (
    "responses",
    "trained of the padded",
    "packed, s",
    "plain / packed",
    "plain / padded",
    "TRL / packed",
    "TRL / padded",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    with_trl = importlib.util.find_spec("trl") is not None
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    document: dict[str, Any] = {"machine": machine(), "yardstick_before": yardstick(), "cells": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_model(Path(scratch) / "model", "qwen3", **_MODEL)
        for lengths, tail in (("of one length", False), ("long tails", True)):
            sequences = make_groups(np.random.default_rng(0), tail=tail)
            document["cells"][lengths] = measure(folder, sequences, args.rounds, with_trl=with_trl)
    document["yardstick_after"] = yardstick()
    print(table(_HEADER, [_line(lengths, found) for lengths, found in document["cells"].items()]))
    if args.json:
        write_json(args.json, document)


if __name__ == "__main__":
    main()
