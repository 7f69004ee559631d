"""The cost of the loss: log-probs, entropies and the clipped surrogate from given logits, forward and backward.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.loss_cost --json loss_cost.json

Contenders, over the same logits:

    plain        log_softmax of the logits in float32, then gather: what a loss cannot do without, naively
    logsumexp    gather minus logsumexp, the usual way to keep the log-probs of the vocabulary out of memory
    ours         the learner's kernel and PPO's clipped surrogate with its metrics; gives the entropies too
    ours+H       the same with a bonus for the entropy, differentiated
    ours+p2      the same with the sums of squared probabilities (optimal token baseline)

Every round runs all contenders, in alternating order; a ratio is that of one round, so what disturbs a whole round
cancels. Processor time is given next to wall time: on a shared machine it is the steadier of the two. Peak memory is
that of one call in a process of its own, above the logits. The gradient of the logits is part of it for all contenders.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import REPOSITORY, Summary, machine, summarize, table, write_json, yardstick
from rollmesh.learner.algorithms.aggregation import aggregate
from rollmesh.learner.algorithms.losses import ppo
from rollmesh.learner.algorithms.types import GlobalCounts, TokenBatch
from rollmesh.learner.engines.output.log_probs import token_log_probs
from rollmesh.learner.engines.output.softmax_pieces import Targets

_SEQUENCE = 64
_ENTROPY_BONUS = 1e-3


@dataclass(frozen=True, slots=True)
class Case:
    """Shape and dtype of the logits."""

    tokens: int
    vocabulary: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.tokens} x {self.vocabulary} {self.dtype}"

    @property
    def mib(self) -> float:
        """Size of the logits, and of their gradient."""
        return self.tokens * self.vocabulary * getattr(torch, self.dtype).itemsize / 2**20


CASES = (
    Case(512, 152_064, "float32"),
    Case(512, 152_064, "bfloat16"),
    Case(2048, 32_000, "float32"),
    Case(2048, 32_000, "bfloat16"),
)


@dataclass(frozen=True, slots=True)
class Data:
    """Logits as a model gives them, and what the loss knows of the tokens."""

    logits: Tensor
    labels: Tensor
    tokens: TokenBatch
    counts: GlobalCounts


Contender = Callable[[Data], Tensor]
"""Data -> 0-d loss."""


def _plain(data: Data) -> Tensor:
    log_probs = torch.log_softmax(data.logits.float(), -1).gather(1, data.labels[:, None])[:, 0]
    return -(log_probs * data.tokens.advantages).sum() / data.counts.tokens


def _logsumexp(data: Data) -> Tensor:
    logits = data.logits.float()
    log_probs = logits.gather(1, data.labels[:, None])[:, 0] - torch.logsumexp(logits, -1)
    return -(log_probs * data.tokens.advantages).sum() / data.counts.tokens


def _ours(data: Data, *, entropy_gradient: bool = False, sum_pi_squared: bool = False) -> Tensor:
    targets = Targets(data.labels, entropy_gradient=entropy_gradient, sum_pi_squared=sum_pi_squared)
    output = token_log_probs(data.logits, targets)
    log_probs, entropy = output.policy()
    loss, _ = ppo(log_probs, data.tokens.behaviour_log_probs, data.tokens)
    if entropy_gradient:
        loss = loss - _ENTROPY_BONUS * entropy
    return aggregate(loss, data.tokens, data.counts, "token_mean")


CONTENDERS: dict[str, Contender] = {
    "plain": _plain,
    "logsumexp": _logsumexp,
    "ours": _ours,
    "ours+H": lambda data: _ours(data, entropy_gradient=True),
    "ours+p2": lambda data: _ours(data, sum_pi_squared=True),
}


def make_data(case: Case, device: torch.device) -> Data:
    """Random logits, filled row by row so that making them needs no more memory than they have."""
    torch.manual_seed(0)
    logits = torch.empty(case.tokens, case.vocabulary, dtype=getattr(torch, case.dtype), device=device)
    for row in logits:
        row.copy_(torch.randn(case.vocabulary, device=device) * 3.0)
    sequences = max(1, case.tokens // _SEQUENCE)
    lengths = torch.full((sequences,), case.tokens // sequences, device=device)
    lengths[-1] += case.tokens - int(lengths.sum())
    labels = torch.randint(0, case.vocabulary, (case.tokens,), device=device)
    with torch.no_grad():
        behaviour, _ = token_log_probs(logits, Targets(labels)).policy()
    tokens = TokenBatch(
        sequence_ids=torch.repeat_interleave(torch.arange(sequences, device=device), lengths),
        sequence_lengths=lengths,
        # Ratios on both sides of 1, as after some updates.
        behaviour_log_probs=behaviour + 0.1 * torch.randn(case.tokens, device=device),
        advantages=torch.randn(case.tokens, device=device),
        staleness=torch.zeros(case.tokens, dtype=torch.int32, device=device),
        sequence_rewards=torch.zeros(sequences, device=device),
    )
    return Data(logits.requires_grad_(), labels, tokens, GlobalCounts(case.tokens, sequences))


def run_once(contender: Contender, data: Data) -> tuple[float, float]:
    """One forward and backward pass; gives wall and processor seconds."""
    data.logits.grad = None
    _synchronize(data)
    wall, cpu = time.perf_counter(), time.process_time()
    contender(data).backward()
    _synchronize(data)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """Alternates the contenders."""
    data = make_data(case, device)
    walls: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    cpus: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    moods = []
    for contender in CONTENDERS.values():
        run_once(contender, data)
    for number in range(rounds):
        moods.append(yardstick())
        for name in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
            wall, cpu = run_once(CONTENDERS[name], data)
            walls[name].append(wall * 1e3)
            cpus[name].append(cpu * 1e3)
    return {
        "wall_ms": {name: summarize(values) for name, values in walls.items()},
        "cpu_ms": {name: summarize(values) for name, values in cpus.items()},
        "wall_ratio": {name: _ratio(walls, name) for name in CONTENDERS},
        "cpu_ratio": {name: _ratio(cpus, name) for name in CONTENDERS},
        "yardsticks": moods,
    }


def peak_mib(case: Case, contender: str, device: str) -> float:
    """Peak memory of one pass above the logits, in MiB, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.learner.loss_cost", "--peak", contender, "--device", device]
    command += ["--case", str(case.tokens), str(case.vocabulary), case.dtype]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def _measure_peak(case: Case, contender: Contender, device: torch.device) -> float:
    # Memory that the first call loads and keeps belongs to no contender.
    run_once(contender, make_data(Case(4, 64, case.dtype), device))
    data = make_data(case, device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_once(contender, data)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # The peak begins again at what is resident now.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = peak_rss_kib()
    run_once(contender, data)
    return (peak_rss_kib() - before) / 2**10


def peak_rss_kib() -> int:
    """Peak of resident memory, KiB, since the process started or `clear_refs` was written to."""
    # Not `ru_maxrss`: that one starts at the size of the process that started this one.
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def _synchronize(data: Data) -> None:
    if data.logits.is_cuda:
        torch.cuda.synchronize()


def _ratio(times: dict[str, list[float]], name: str) -> Summary:
    """Contender over plain, round by round."""
    return summarize(own / plain for own, plain in zip(times[name], times["plain"], strict=True))


_HEADER = ("logits", "contender", "wall, ms", "of plain (wall)", "of plain (processor)", "peak above logits, MiB")


def _rows(case: Case, result: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            case,
            name,
            result["wall_ms"][name],
            result["wall_ratio"][name],
            result["cpu_ratio"][name],
            f"{result['peak_mib'][name]:.0f} (gradient {case.mib:.0f})",
        )
        for name in CONTENDERS
    ]


def main(argv: list[str] | None = None) -> int:
    """Measures all cases; prints a table and writes everything to --json."""
    args = _parse(argv)
    device = torch.device(args.device)
    if args.peak:
        tokens, vocabulary, dtype = args.case
        print(json.dumps(_measure_peak(Case(int(tokens), int(vocabulary), dtype), CONTENDERS[args.peak], device)))
        return 0
    results: dict[str, Any] = {}
    rows = []
    for case in [case for case in CASES if case.vocabulary in args.vocabularies]:
        print(f"{case}: {args.rounds} rounds", file=sys.stderr, flush=True)
        result = measure(case, device, args.rounds)
        result["peak_mib"] = {name: round(peak_mib(case, name, args.device), 1) for name in CONTENDERS}
        result["logits_mib"] = round(case.mib, 1)
        results[str(case)] = result
        rows += _rows(case, result)
        if args.json:
            document = {"benchmark": "loss_cost", "threads": torch.get_num_threads(), "machine": machine()}
            write_json(args.json, {**document, "results": results})
    print(table(_HEADER, rows))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    sizes = sorted({case.vocabulary for case in CASES})
    parser.add_argument("--vocabularies", nargs="+", type=int, choices=sizes, default=sizes)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
