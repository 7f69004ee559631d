#!/usr/bin/env python
# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.11", "transformers>=5.2", "trl>=1.9", "datasets>=4.7", "accelerate>=1.4"]
# ///
"""TRL's SFTTrainer, DPOTrainer, KTOTrainer and RewardTrainer on a model and rows of ours: peer of `vs_trl_trainers`.

Runs in an environment of its own (the requirements above). It knows nothing of this repository but the files it is
given. Its last line is one JSON object: loss and seconds of every step. Settings that would slow TRL down
for nothing are off: bf16 autocast and gradient checkpointing, both on by default. Rows come in the order of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trainer", choices=["sft", "dpo", "kto", "rm"], required=True)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder; of a classifier for rm")
    parser.add_argument("--data", type=Path, required=True, help="JSONL in TRL's form for the trainer")
    parser.add_argument("--rows", type=int, default=8, help="rows per step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("trl-output"), help="TRL's output folder")
    return parser.parse_args(argv)


def build_trainer(args: argparse.Namespace) -> tuple[Any, list[float], list[float]]:
    """The trainer, and the lists that it fills: loss and seconds of every step."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl import (
        DPOConfig,
        DPOTrainer,
        KTOConfig,
        KTOTrainer,
        RewardConfig,
        RewardTrainer,
        SFTConfig,
        SFTTrainer,
    )

    trainer_class, config_class = {
        "sft": (SFTTrainer, SFTConfig),
        "dpo": (DPOTrainer, DPOConfig),
        "kto": (KTOTrainer, KTOConfig),
        "rm": (RewardTrainer, RewardConfig),
    }[args.trainer]
    losses: list[float] = []
    seconds: list[float] = []

    class InOrder(trainer_class):  # type: ignore[misc, valid-type]  # chosen at run time
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            found = super().compute_loss(*given, **named)
            losses.append(float((found[0] if isinstance(found, tuple) else found).detach()))
            return found

        def _get_train_sampler(self, *_given: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    class Clock(TrainerCallback):
        def on_step_begin(self, *_trainer: Any, **_others: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_trainer: Any, **_others: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

    model_class = AutoModelForSequenceClassification if args.trainer == "rm" else AutoModelForCausalLM
    further = {"precompute_ref_log_probs": True} if args.trainer in ("dpo", "kto") else {}
    config = config_class(
        output_dir=str(args.output),
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        max_steps=args.steps,
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=1,
        max_length=None,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **further,
    )
    with args.data.open(encoding="utf-8") as lines:
        dataset = Dataset.from_list([json.loads(line) for line in lines])
    trainer = InOrder(
        model=model_class.from_pretrained(args.model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        args=config,
        train_dataset=dataset,
        callbacks=[Clock()],
    )
    return trainer, losses, seconds


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    import torch
    import transformers
    import trl

    torch.set_num_threads(args.threads)
    trainer, losses, seconds = build_trainer(args)
    trainer.train()
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    result = {"system": f"trl.{args.trainer}", "versions": versions, "losses": losses, "seconds": seconds}
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
