"""`rollmesh sft`, `dpo` (KTO too) and `rm` compared with TRL's trainers: losses of 20 steps, and tokens per second.

    python -m benchmarks.peers.vs_trl_trainers --trl-python /path/to/trl-venv/bin/python --json trainers.json

Model, rows, their order, batch, optimizer and threads are the same. TRL lives in an environment of its own (its
requirements stand in `trl_trainers.py`). It pads the sequences of a step to the longest; without padding it needs a
kernel for CUDA. The two run one after the other. Tokens are those of prompts and responses, padding left out, and steps
of the warm-up are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

import rollmesh
from benchmarks.common import REPOSITORY, machine, table, write_json
from examples.demo.model import build_tokenizer
from rollmesh.mesh.runtime.threads import thread_environment

PEER = REPOSITORY / "benchmarks" / "peers" / "trl_trainers.py"
ROWS, STEPS, WARMUP, LR = 8, 20, 3, 1e-4
# Median and spread of a response's characters, each one token, and the longest.
LENGTHS = {"long tails": (32, 1.0), "one length": (48, 0.0)}
LONGEST = 256
_HEAD = ("responses", "trainer", "first loss", "last loss", "largest difference", "TRL, tokens/s", "tokens/s", "ratio")


def write_models(folder: Path) -> dict[str, Path]:
    """A random language model, and the same backbone as a classifier with a random head."""
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2 * LONGEST,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        num_labels=1,
    )
    torch.manual_seed(0)
    language_model = AutoModelForCausalLM.from_config(config)
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.model.load_state_dict(language_model.model.state_dict())
    folders = dict.fromkeys(("sft", "dpo", "kto"), folder / "model") | {"rm": folder / "classifier"}
    for name, model in (("sft", language_model), ("rm", classifier)):
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def write_rows(folder: Path, median: int, spread: float) -> dict[str, Path]:
    """Rows of words at random, in TRL's forms."""
    draw = random.Random(0)

    def text(length: int) -> str:
        return "".join(draw.choices(string.ascii_lowercase + " ", k=length - 1)) + draw.choice(string.ascii_lowercase)

    def response() -> str:
        return text(min(LONGEST, max(4, round(median * draw.lognormvariate(0.0, spread)))))

    pairs = [{"prompt": text(32), "chosen": response(), "rejected": response()} for _ in range(ROWS * STEPS)]
    single = [{"prompt": p["prompt"], "completion": p["chosen"]} for p in pairs]
    labeled = [{**row, "label": draw.random() < 0.5} for row in single]
    made = {"dpo": pairs, "kto": labeled, "rm": pairs, "sft": single}
    files = {}
    for name, rows in made.items():
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files


def train_here(command: str, model: Path, rows: Path, folder: Path) -> list[dict[str, Any]]:
    """The records of our steps."""
    config: dict[str, Any] = {
        "run": {"dir": str(folder), "name": command},
        "model": {"path": str(model)},
        "data": {"train": str(rows), "shuffle": False},
        "learner": {"steps": STEPS, "batch": {"rows": ROWS}, "optimizer": {"lr": LR}, "device": "cpu"},
        "logging": {"level": "warning"},
    }
    if command == "kto":
        config["loss"] = {"name": "kto"}
    {"sft": rollmesh.sft, "dpo": rollmesh.dpo, "kto": rollmesh.dpo, "rm": rollmesh.rm}[command](config)
    return [json.loads(line) for line in (folder / command / "metrics.jsonl").read_text().splitlines()]


def train_there(python: Path, command: str, model: Path, rows: Path, folder: Path) -> dict[str, Any]:
    """The report of TRL."""
    given = {"trainer": command, "model": model, "data": rows, "rows": ROWS, "steps": STEPS, "lr": LR}
    arguments = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    done = subprocess.run(
        [str(python), str(PEER), *arguments, "--output", str(folder / "trl")],
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **thread_environment(1)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"TRL failed:\n{done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def compare(python: Path, command: str, model: Path, rows: Path, folder: Path) -> dict[str, Any]:
    """Losses and speeds of both."""
    ours, theirs = train_here(command, model, rows, folder), train_there(python, command, model, rows, folder)
    losses = [record["actor/loss"] for record in ours]
    timed = slice(WARMUP, None)
    tokens = [record["perf/total_num_tokens"] for record in ours]
    here = statistics.median(t / r["timing_s/step"] for t, r in zip(tokens[timed], ours[timed], strict=True))
    there = statistics.median(t / s for t, s in zip(tokens[timed], theirs["seconds"][timed], strict=True))
    apart = max(abs(a - b) for a, b in zip(losses, theirs["losses"], strict=True))
    return {
        "trainer": command,
        "apart": apart,
        "first": losses[0],
        "last": losses[-1],
        "tokens_s": here,
        "trl_tokens_s": there,
        "versions": theirs["versions"],
    }


def _cells(found: dict[str, Any]) -> list[str]:
    here, there = found["tokens_s"], found["trl_tokens_s"]
    losses = (f"{found['first']:.4f}", f"{found['last']:.4f}", f"{found['apart']:.1e}")
    return [found["lengths"], found["trainer"], *losses, f"{there:.0f}", f"{here:.0f}", f"{here / there:.2f}"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter of an environment with TRL")
    parser.add_argument("--only", choices=["sft", "dpo", "kto", "rm"], help="one trainer alone")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args(argv)
    os.environ.update(thread_environment(1))
    results = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
        models = write_models(Path(scratch))
        for lengths, (median, spread) in LENGTHS.items():
            folder = Path(scratch, lengths.replace(" ", "-"))
            folder.mkdir()
            files = write_rows(folder, median, spread)
            for command, rows in files.items():
                if args.only not in (None, command):
                    continue
                found = compare(args.trl_python, command, models[command], rows, folder)
                results.append({"lengths": lengths, **found})
                sys.stdout.write(json.dumps(results[-1]) + "\n")
                sys.stdout.flush()
    sys.stdout.write(table(_HEAD, map(_cells, results)) + "\n")
    if args.json:
        write_json(args.json, {"machine": machine(), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
