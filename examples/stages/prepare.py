"""Makes the model and the data of all stages: `python -m examples.stages.prepare --out FOLDER`.

`base/` is a freshly initialized model, which answers nothing right. `answers.jsonl` has prompts with right answers, for
`sft`. `pairs.jsonl` has prompts with a right and a wrong answer, for `rm`. `train.parquet` has prompts for `run`, with
verl's fields. `eval.parquet` has held-out prompts, of which no other file has any.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.demo.model import write_model
from examples.demo.prepare import write_rows
from examples.demo.problems import Problem, split_problems

_LARGEST_DIGIT, _HELD_OUT = 4, 125


def prepare(out: Path, seed: int) -> None:
    """Writes all files; the same for the same seed."""
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = split_problems("arithmetic", largest_digit=_LARGEST_DIGIT, held_out=_HELD_OUT, seed=seed)
    write_model(out / "base", seed)
    _write_lines(out / "answers.jsonl", ({"prompt": one.prompt, "completion": one.answer} for one in train))
    _write_lines(out / "pairs.jsonl", _pairs(train, random.Random(seed)))
    write_rows(out / "train.parquet", train, "train")
    write_rows(out / "eval.parquet", held_out, "eval")


def _pairs(problems: Sequence[Problem], rng: random.Random) -> Iterator[dict[str, str]]:
    """Right answers next to wrong ones: near ones, any others, and answers that are too short or too long.

    Without the last kind the policy finds long answers, which the reward model has never seen and scores highly.
    """
    for problem in problems:
        right = problem.answer
        wrong = [f"{number:02d}" for number in range(100) if f"{number:02d}" != right]
        near = [answer for answer in wrong if any(a == b for a, b in zip(answer, right, strict=True))]
        digits = "".join(rng.choices(string.digits, k=3))
        odd = [right[0], right[1], right + digits[:1], digits[:1] + right, right + digits, digits, right + right]
        for rejected in near + rng.sample(wrong, 20) + rng.sample(odd, 4):
            yield {"prompt": problem.prompt, "chosen": right, "rejected": rejected}


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/stages/data"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    prepare(options.out, options.seed)


if __name__ == "__main__":
    main()
