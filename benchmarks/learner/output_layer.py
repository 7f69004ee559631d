"""Memory and time of the output layer with the loss's log-probs: all logits at once, kept in tiles, and recomputed.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.output_layer --json output_layer.json

Contenders, over the same hidden states and weight, forward and backward, entropy included:

    whole       logits of all tokens, as transformers gives them, then the learner's kernel.

    kept        the learner's output layer whose logits all fit into `learner.memory.logits_mib`.

    recomputed  the same with 0: logits are computed tile by tile, and again in the backward pass.

Each measurement is a process of its own. Peak memory is that of one call above hidden states, weight and the gradients
of both, which every contender makes. Rounds alternate the order; a ratio is that of one round, in processor time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common import REPOSITORY, machine, summarize, table, write_json
from benchmarks.learner.loss_cost import peak_rss_kib
from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.fsdp2.output_layer import OutputLayer
from rollmesh.learner.engines.output.layer import LogitMemory
from rollmesh.learner.engines.output.log_probs import token_log_probs
from rollmesh.learner.engines.output.logit_form import LogitForm
from rollmesh.learner.engines.output.softmax_pieces import Targets

CONTENDERS = ("whole", "kept", "recomputed")


def measure_once(contender: str, tokens: int, width: int, vocabulary: int, dtype: str, device: str) -> dict[str, float]:
    """Processor seconds, wall seconds and MiB of one forward and backward pass."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    layer = nn.Linear(width, vocabulary, bias=False, dtype=kind, device=device)
    step = _contender(contender, layer)
    _pass(step, *_case(64, width, vocabulary, kind, device))
    hidden, targets = _case(tokens, width, vocabulary, kind, device)
    gradients = (layer.weight.numel() + hidden.numel()) * kind.itemsize
    layer.weight.grad = None
    before = _reset_peak(device)
    cpu, wall = time.process_time(), time.perf_counter()
    _pass(step, hidden, targets)
    if device == "cuda":
        torch.cuda.synchronize()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_rss_kib() * 1024
    return {"cpu_s": cpu, "wall_s": wall, "peak_mib": (peak - before - gradients) / 2**20}


def _contender(name: str, layer: nn.Linear) -> Callable[[Tensor, Targets], tuple[Tensor, Tensor]]:
    if name == "whole":
        return lambda hidden, targets: token_log_probs(functional.linear(hidden, layer.weight), targets).policy()
    ours = OutputLayer(layer, LogitForm(), LogitMemory(1 << 50 if name == "kept" else 0))
    return lambda hidden, targets: ours(hidden, Opaque(targets))[:2]


def _case(tokens: int, width: int, vocabulary: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Targets]:
    hidden = torch.randn(tokens, width, dtype=dtype, device=device, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,), device=device)
    return hidden, Targets(labels, entropy_gradient=True, sum_pi_squared=True)


def _pass(step: Callable[[Tensor, Targets], tuple[Tensor, Tensor]], hidden: Tensor, targets: Targets) -> None:
    log_probs, entropy = step(hidden, targets)
    (log_probs.sum() + 1e-3 * entropy.sum()).backward()


def _reset_peak(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak_rss_kib() * 1024


def main(argv: list[str] | None = None) -> int:
    """Measures all contenders at each number of tokens; prints a table and writes everything to --json."""
    args = _parse(argv)
    if args.once:
        print(json.dumps(measure_once(args.once, args.tokens[0], args.width, args.vocabulary, args.dtype, args.device)))
        return 0
    results: dict[str, Any] = {}
    rows: list[tuple[object, ...]] = []
    for tokens in args.tokens:
        contenders = [name for name in CONTENDERS if name == "recomputed" or tokens <= args.whole_up_to]
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for number in range(args.rounds):
            for name in contenders if number % 2 == 0 else reversed(contenders):
                seen[name].append(_in_a_process(name, tokens, args))
        for name in contenders:
            peak = summarize(run["peak_mib"] for run in seen[name])
            ratio: object = "-"
            if "whole" in seen:
                pairs = zip(seen[name], seen["whole"], strict=True)
                ratio = summarize(own["cpu_s"] / whole["cpu_s"] for own, whole in pairs)
            rows.append((tokens, name, f"{tokens * args.vocabulary * 4 / 2**20:.0f}", peak, ratio))
        results[str(tokens)] = seen
        if args.json:
            document = {"benchmark": "output_layer", "arguments": vars(args) | {"json": None}, "machine": machine()}
            write_json(args.json, {**document, "results": results})
    print(table(("tokens", "contender", "float32 logits, MiB", "peak, MiB", "of whole (processor)"), rows))
    return 0


def _in_a_process(contender: str, tokens: int, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.learner.output_layer", "--once", contender, "--tokens", str(tokens)]
    command += ["--width", str(args.width), "--vocabulary", str(args.vocabulary)]
    command += ["--dtype", args.dtype, "--device", args.device]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1200, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--whole-up-to", type=int, default=4096, help="tokens up to which all logits are held")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
