"""Makes the model and the data of the example: `python -m examples.vision.prepare --out FOLDER`.

Writes `model/`, `train.jsonl`, `eval.jsonl` and the pictures that they name. A short supervised warm start teaches the
model what answers look like, and leaves most of the seeing to reinforcement learning.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.vision.model import write_model
from examples.vision.pictures import questions
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.trainers.warm_start import warm_start
from rollmesh.learner.vision.prompts import PromptReader
from rollmesh.mesh.tokenizer_files import load_tokenizer

_ROWS, _HELD_OUT = 1500, 150
_LR, _BATCH = 1e-3, 64


def prepare(out: Path, *, seed: int, rows: int, warm_steps: int) -> float:
    """Writes model and data; returns the warm start's last loss, in nats per token."""
    torch.set_num_threads(1)
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    asked = list(itertools.islice(questions(random.Random(seed)), rows + _HELD_OUT))
    held_out, train = (
        [question.row(index, out, split) for index, question in enumerate(part)]
        for split, part in (("eval", asked[:_HELD_OUT]), ("train", asked[_HELD_OUT:]))
    )
    _write(out / "eval.jsonl", held_out)
    _write(out / "train.jsonl", train)
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), seed)
        losses = warm_start(
            scratch,
            _sequences(Path(scratch), out, train),
            steps=warm_steps,
            lr=_LR,
            batch=_BATCH,
            out_folder=out / "model",
            seed=seed,
        )
    return losses[-1]


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _sequences(model: Path, data: Path, rows: Sequence[dict[str, Any]]) -> list[TrainSequence]:
    """Questions with their right answers."""
    reader, tokenizer = PromptReader.load(model), load_tokenizer(model)
    assert reader is not None, "the model has a processor"
    sequences = []
    for row in rows:
        ids = tokenizer.encode(row["prompt"])
        prompt, images = np.array(ids, dtype=np.int32), None
        if row["images"]:
            prompt, images = reader.read(ids, tuple((data / name).read_bytes() for name in row["images"]))
        answer = [*tokenizer.encode(row["reward_model"]["ground_truth"]), tokenizer.eos_token_id]
        ones, zeros = np.ones(len(answer), dtype=np.uint8), np.zeros(len(answer), dtype=np.float32)
        sequences.append(TrainSequence(prompt, np.array(answer, dtype=np.int32), ones, zeros, images=images))
    return sequences


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/vision-data"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=_ROWS, help="of the training data")
    parser.add_argument("--warm-steps", type=int, default=40, help="supervised steps before reinforcement learning")
    options = parser.parse_args(arguments)
    loss = prepare(options.out, seed=options.seed, rows=options.rows, warm_steps=options.warm_steps)
    print(f"prepared {options.out}: {options.rows} training rows; loss after the warm start {loss:.3f} nats per token")


if __name__ == "__main__":
    main()
