#!/usr/bin/env python
# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.11", "transformers>=5.2", "trl>=1.9", "datasets>=4.7", "accelerate>=1.4"]
# ///
"""TRL's GRPOTrainer on a model folder and a prompt file of ours: the peer of `benchmarks/whole_loop/vs_trl.py`.

Runs in an environment of its own (the requirements above). It knows nothing of this repository but the files it is
given, and prints one JSON object on its last line. Settings that would slow TRL down for nothing are off. These are
bf16 autocast and gradient checkpointing (both on by default), the reference model, a second pass for old log-probs, and
logging of completions. Lengths are the model's own, so no logits processor is paid for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with prompt and reward_model.ground_truth")
    parser.add_argument("--reward", required=True, help="FILE.py:FUNCTION with verl's signature")
    parser.add_argument("--groups", type=int, default=8, help="prompts per step")
    parser.add_argument("--n", type=int, default=8, help="completions per prompt")
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--continuous-batching", action="store_true", help="transformers' continuous batching engine")
    parser.add_argument("--output", type=Path, default=Path("trl-output"), help="TRL's output folder")
    return parser.parse_args(argv)


def load_reward(reference: str) -> Callable[..., list[float]]:
    """Wraps a function with verl's signature into TRL's batch signature."""
    path, _, name = reference.rpartition(":")
    spec = importlib.util.spec_from_file_location("peer_reward", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot load a reward function from {reference}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = getattr(module, name)

    def reward(completions: list[str], ground_truth: list[str], **_columns: Any) -> list[float]:
        return [score("", text, truth, None) for text, truth in zip(completions, ground_truth, strict=True)]

    return reward


def build_trainer(args: argparse.Namespace) -> tuple[Any, list[dict[str, float]]]:
    """The trainer, and the list that it fills with one row per step: end time, mean length, generation seconds."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    with args.data.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    dataset = Dataset.from_list(
        [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]
    )
    steps: list[dict[str, float]] = []
    generation: list[float] = []

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            result = super()._generate_and_score_completions(inputs)
            generation.append(time.perf_counter() - began)
            return result

    class Clock(TrainerCallback):
        def on_log(self, *_trainer: Any, logs: Any = None, **_others: Any) -> None:
            if logs and "reward" in logs:
                steps.append(
                    {
                        "ended_s": time.perf_counter(),
                        "mean_length": logs["completions/mean_length"],
                        "max_length": logs["completions/max_length"],
                        "reward": logs["reward"],
                        "generation_s": generation[-1],
                    }
                )

    config = GRPOConfig(
        output_dir=str(args.output),
        seed=args.seed,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        max_steps=args.steps,
        per_device_train_batch_size=args.groups * args.n,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=args.n,
        max_completion_length=args.max_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        mask_truncated_completions=False,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_transformers_continuous_batching=args.continuous_batching,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=load_reward(args.reward),
        args=config,
        train_dataset=dataset,
        callbacks=[Clock()],
    )
    return trainer, steps


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    import torch
    import transformers
    import trl

    torch.set_num_threads(args.threads)
    trainer, steps = build_trainer(args)
    began = time.perf_counter()
    trainer.train()
    for row in steps:
        row["ended_s"] -= began
    result = {
        "system": "trl.GRPOTrainer",
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "threads": args.threads,
        "continuous_batching": args.continuous_batching,
        "samples_per_step": args.groups * args.n,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "steps": steps,
    }
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
