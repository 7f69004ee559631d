"""Makes the model and the data of the demonstration: `python -m examples.demo.prepare --out FOLDER`.

Writes `model/` (a Hugging Face folder), `train.parquet` and `eval.parquet`. The model has seen a short supervised
warm start on the training problems. It answers some held-out problems, and gets most of them wrong: without a single
right answer there would be nothing to reinforce. Its accuracy then is printed and written to `prepared.json`;
everything above it is reinforcement learning's.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from examples.demo.model import build_tokenizer, program_tokenizer, write_model
from examples.demo.problems import Problem, Task, split_problems
from rollmesh.learner.trainers.warm_start import warm_start

_WARM_STEPS = {"arithmetic": 70, "strings": 70, "both": 100, "code": 120}
_WARM_LR = 1e-3
_WARM_BATCH = 64


def prepare(out: Path, *, task: Task, seed: int, largest_digit: int, held_out: int, warm_steps: int) -> dict[str, Any]:
    """Writes model and data; returns the content of `prepared.json`. Data of the same settings is kept."""
    asked = {"task": task, "seed": seed, "largest_digit": largest_digit, "held_out": held_out, "warm_steps": warm_steps}
    note = out / "prepared.json"
    if note.exists():
        found: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
        if found.get("asked") == asked:
            return found
        note.unlink()
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    train, evaluation = split_problems(task, largest_digit=largest_digit, held_out=held_out, seed=seed)
    write_rows(out / "train.parquet", train, "train")
    write_rows(out / "eval.parquet", evaluation, "eval")
    tokenizer = program_tokenizer() if task == "code" else build_tokenizer()
    with tempfile.TemporaryDirectory() as scratch:
        parameters = write_model(Path(scratch), seed, tokenizer)
        losses = warm_start(
            scratch,
            pairs(train, tokenizer, seed),
            steps=warm_steps,
            lr=_WARM_LR,
            batch=_WARM_BATCH,
            out_folder=out / "model",
            seed=seed,
        )
    made = {
        "asked": asked,
        "parameters": parameters,
        "train_rows": len(train),
        "eval_rows": len(evaluation),
        "warm_loss": round(losses[-1], 3),
        "held_out_after_warm_start": round(greedy_accuracy(out / "model", evaluation, tokenizer), 3),
    }
    note.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return made


def write_rows(path: Path, problems: Sequence[Problem], split: str) -> None:
    """Writes problems as Parquet with verl's fields."""
    rows = [problem.row(index, split) for index, problem in enumerate(problems)]
    pq.write_table(pa.Table.from_pylist(rows), path)


def pairs(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompts and right answers (end token included), in an order of their own."""
    shuffled = random.Random(seed).sample(list(problems), len(problems))
    end = [tokenizer.eos_token_id]
    return [(tokenizer.encode(problem.prompt), tokenizer.encode(problem.answer) + end) for problem in shuffled]


@torch.inference_mode()
def greedy_accuracy(folder: Path, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> float:
    """Share of problems whose most likely response is the answer: each of its tokens is the most likely one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = 0
    for prompt, answer in pairs(problems, tokenizer, seed=0):
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        right += logits.argmax(-1).tolist() == answer
    return right / len(problems)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-data"), help="folder to write")
    parser.add_argument("--task", choices=list(_WARM_STEPS), default="arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest-digit", type=int, default=4, help="of the operands of additions")
    parser.add_argument("--held-out", type=int, default=125, help="problems kept for evaluation")
    parser.add_argument("--warm-steps", type=int, help="supervised steps before reinforcement learning")
    options = parser.parse_args(arguments)
    made = prepare(
        options.out,
        task=options.task,
        seed=options.seed,
        largest_digit=options.largest_digit,
        held_out=options.held_out,
        warm_steps=options.warm_steps or _WARM_STEPS[options.task],
    )
    print(
        f"prepared {options.out}: {made['parameters'] / 1e6:.2f} M parameters, {made['train_rows']} training and "
        f"{made['eval_rows']} held-out problems ({made['asked']['task']})"
    )
    print(
        f"supervised warm start: {made['asked']['warm_steps']} steps, held-out accuracy "
        f"{made['held_out_after_warm_start']:.3f}; from here on it is reinforcement learning"
    )


if __name__ == "__main__":
    main()
