"""Memory of a whole training step with a vocabulary of 152,064, next to plain transformers and TRL's GRPOTrainer.

    OMP_NUM_THREADS=1 PYTHONPATH=FOLDER python -m benchmarks.learner.step_memory --json step_memory.json

The steps are those of `step_time`, which says what FOLDER is, on responses of one length. Micro-batches have 4, 8 and
16 padded rows of 128 tokens, or as many packed ones. The model is so narrow that logits are nearly all of the memory.

    tiles   the engine with `learner.memory.logits_mib: 0`: logits are computed tile by tile, and again.

    engine  the engine as it is by default: logits are kept where they fit into 1 GiB.

    plain   a loop over transformers, which computes the logits of responses alone, as TRL does.

Each number is of a process of its own: the kernel's peak of resident memory during the second step. In brackets is how
much more that is than before the step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from benchmarks.common import REPOSITORY, HelpFormatter, machine, table, write_json
from benchmarks.learner.loss_cost import peak_rss_kib
from benchmarks.learner.step_time import Step, engine, make_groups, plain, trl
from benchmarks.learner.tiny_models import save_model
from rollmesh.mesh.config.learner import MemorySection

_VOCABULARY = 152_064
_MODEL = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
_ROWS = (4, 8, 16)
_TOKENS = 128
CONTENDERS = ("tiles", "engine", "plain", "TRL")


def measure_once(contender: str, folder: Path, rows: int) -> dict[str, float]:
    """Resident MiB before and at most during a second step, and the first step's gradient norm."""
    step = _step(contender, folder, rows)
    norm = step()
    # From here on the kernel's peak is of what follows.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = peak_rss_kib()
    step()
    return {"before_mib": before / 1024, "peak_mib": peak_rss_kib() / 1024, "grad_norm": norm}


def _step(contender: str, folder: Path, rows: int) -> Step:
    sequences = make_groups(np.random.default_rng(0), tail=False, vocabulary=_VOCABULARY)
    if contender == "plain":
        return plain(folder, sequences, rows)
    if contender == "TRL":
        return trl(folder, sequences, folder.parent, rows, _VOCABULARY)
    return engine(
        folder, sequences, rows, rows=False, memory=MemorySection(logits_mib=0 if contender == "tiles" else 1024)
    )


def _in_a_process(contender: str, folder: Path, rows: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.learner.step_memory", "--once", contender, str(folder), str(rows)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=1200, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    if args.once:
        contender, folder, rows = args.once
        print(json.dumps(measure_once(contender, Path(folder), int(rows))))
        return
    contenders = [name for name in CONTENDERS if name != "TRL" or importlib.util.find_spec("trl") is not None]
    cells: dict[str, dict[str, Any]] = {}
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_model(Path(scratch) / "model", "qwen3", **_MODEL)
        for rows in _ROWS:
            found = {name: _in_a_process(name, folder, rows) for name in contenders}
            cells[str(rows * _TOKENS)] = found
            logits = rows * _TOKENS * _VOCABULARY * 4 / 2**20
            seen = (
                f"{part['peak_mib']:,.0f} (+{part['peak_mib'] - part['before_mib']:,.0f})" for part in found.values()
            )
            lines.append([f"{rows * _TOKENS:,}", f"{logits:,.0f}", *seen])
    print(table(("tokens", "float32 logits, MiB", *(f"{name}, MiB" for name in contenders)), lines))
    norms = [part["grad_norm"] for found in cells.values() for part in found.values()]
    print(f"gradient norms: {min(norms):.6g} .. {max(norms):.6g}")
    if args.json:
        write_json(args.json, {"machine": machine(), "cells": cells})


if __name__ == "__main__":
    main()
