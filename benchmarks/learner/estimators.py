"""Cost of the advantage estimators: scatter over groups and blockwise scans, compared with loops.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.estimators --json estimators.json
    OMP_NUM_THREADS=1 python -m benchmarks.learner.estimators --sequences 256 --tokens 512 --rounds 3   # seconds

Contenders, all from the same flat batch to one float32 advantage per token:

    ours       the registered estimator, spread over the tokens where it gives one value per sequence
    rows       a Python loop per row: dictionaries of groups, plain floats backwards in time within a row
    columns    a Python loop per column over the padded batch [S, T], all rows at once (recurrences only). The batch is
               padded beforehand, at no cost

Recurrences row by row are measured on `--loop-rows` rows, at both ends and in between, and scaled by tokens. They are
marked with `*` in the table and `scaled` in the JSON. Every round runs all contenders; a ratio is that of one round.
Before anything is measured, the contenders' results are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Summary, machine, summarize, table, write_json, yardstick
from rollmesh.learner.algorithms import advantages as _registered  # noqa: F401 - entering the registry
from rollmesh.learner.algorithms.advantages.whitening import whiten
from rollmesh.learner.algorithms.ragged import expand
from rollmesh.learner.algorithms.registry import ADVANTAGES
from rollmesh.learner.algorithms.types import Estimate, Rollouts

_GAMMA, _LAM = 0.99, 0.95
_GROUPED = ("grpo", "rloo", "opo")
_SETTINGS: dict[str, dict[str, Any]] = {
    "reinforce_plus_plus": {"gamma": _GAMMA},
    "gae": {"gamma": _GAMMA, "lam": _LAM},
}
_ESTIMATORS = (*_GROUPED, *_SETTINGS)


def make_batch(sequences: int, tokens: int, group_size: int, lengths: str, device: str) -> Rollouts:
    """Rewards 0 and 1, a KL penalty per token and a critic's values, for groups of neighbours.

    Args:
        lengths: `uniform`: 1 .. tokens; `full`: all of that many.
    """
    generator = torch.Generator().manual_seed(0)
    if lengths == "full":
        sizes = torch.full((sequences,), tokens)
    else:
        sizes = torch.randint(1, tokens + 1, (sequences,), generator=generator)
    total = int(sizes.sum())
    return Rollouts(
        group_ids=(torch.arange(sequences) // group_size).to(device),
        rewards=(torch.rand(sequences, generator=generator) < 0.5).float().to(device),
        lengths=sizes.to(device),
        behaviour_log_probs=torch.zeros(total, device=device),
        staleness=torch.zeros(total, dtype=torch.int32, device=device),
        truncated=torch.zeros(sequences, dtype=torch.bool, device=device),
        token_rewards=(0.01 * torch.randn(total, generator=generator)).to(device),
        values=torch.rand(total, generator=generator).to(device),
    )


def ours(name: str, rollouts: Rollouts) -> Tensor:
    """The registered estimator, one advantage per token."""
    result = ADVANTAGES.get(name, "advantage").target(rollouts, **_SETTINGS.get(name, {}))
    if isinstance(result, Estimate):
        return result.advantages
    return expand(result, rollouts.lengths, rollouts.num_tokens)


def row_loop(name: str, rollouts: Rollouts) -> Tensor:
    """One row after the other."""
    starts = [0, *rollouts.lengths.cumsum(0).tolist()]
    if name in _GROUPED:
        return _grouped_rows(name, rollouts, starts)
    assert rollouts.token_rewards is not None
    assert rollouts.values is not None
    decay = _GAMMA * (_LAM if name == "gae" else 1.0)
    result = torch.empty(rollouts.num_tokens)
    for row, reward in enumerate(rollouts.rewards.tolist()):
        cut = slice(starts[row], starts[row + 1])
        rewards, values = rollouts.token_rewards[cut].tolist(), rollouts.values[cut].tolist()
        rewards[-1] += reward
        carry = following = 0.0
        for t in range(len(rewards) - 1, -1, -1):
            error = rewards[t] + _GAMMA * following - values[t] if name == "gae" else rewards[t]
            carry = rewards[t] = error + decay * carry
            following = values[t]
        result[cut] = torch.tensor(rewards)
    return whiten(result)


def _grouped_rows(name: str, rollouts: Rollouts, starts: list[int]) -> Tensor:
    assert rollouts.token_rewards is not None
    groups, lengths = rollouts.group_ids.tolist(), rollouts.lengths.tolist()
    members: dict[int, list[tuple[float, int]]] = {}
    scores = []
    for row, reward in enumerate(rollouts.rewards.tolist()):
        scores.append(reward + float(rollouts.token_rewards[starts[row] : starts[row + 1]].sum()))
        members.setdefault(groups[row], []).append((scores[-1], lengths[row]))
    result = torch.empty(rollouts.num_tokens)
    for row, score in enumerate(scores):
        group = members[groups[row]]
        values = torch.tensor([value for value, _ in group])
        if name == "grpo":
            advantage = (score - float(values.mean())) / (float(values.std()) + 1e-6)
        elif name == "rloo":
            advantage = score - (float(values.sum()) - score) / (len(group) - 1)
        else:
            advantage = score - sum(value * length for value, length in group) / sum(length for _, length in group)
        result[starts[row] : starts[row + 1]] = advantage
    return result


@dataclass(frozen=True, slots=True)
class Padded:
    """The batch as a rectangle [S, T]."""

    rewards: Tensor
    values: Tensor
    mask: Tensor


def pad(rollouts: Rollouts) -> Padded:
    """The inputs of a padded system."""
    assert rollouts.token_rewards is not None
    assert rollouts.values is not None
    longest = int(rollouts.lengths.max())
    mask = torch.arange(longest, device=rollouts.lengths.device)[None] < rollouts.lengths[:, None]
    rewards, values = (torch.zeros(mask.shape, device=mask.device) for _ in range(2))
    rewards[mask], values[mask] = rollouts.token_rewards, rollouts.values
    rewards[torch.arange(len(rewards), device=mask.device), rollouts.lengths - 1] += rollouts.rewards
    return Padded(rewards, values, mask)


def column_loop(name: str, padded: Padded) -> Tensor:
    """One column after the other, [R] at the end."""
    decay = _GAMMA * (_LAM if name == "gae" else 1.0)
    result = torch.empty_like(padded.rewards)
    carry = following = torch.zeros_like(padded.rewards[:, 0])
    for t in range(result.shape[1] - 1, -1, -1):
        error = padded.rewards[:, t]
        if name == "gae":
            error = error + _GAMMA * following - padded.values[:, t]
            following = padded.values[:, t] * padded.mask[:, t]
        carry = (error + decay * carry) * padded.mask[:, t]
        result[:, t] = carry
    return whiten(result[padded.mask])


def part(rollouts: Rollouts, rows: int) -> Rollouts:
    """Some rows, evenly spread over the batch."""
    chosen = torch.linspace(0, rollouts.num_sequences - 1, rows).round().long().to(rollouts.lengths.device)
    ends = rollouts.lengths.cumsum(0)
    cuts = [slice(int(ends[row] - rollouts.lengths[row]), int(ends[row])) for row in chosen]
    assert rollouts.token_rewards is not None
    assert rollouts.values is not None
    return dataclasses.replace(
        rollouts,
        group_ids=torch.arange(rows),
        rewards=rollouts.rewards[chosen],
        lengths=rollouts.lengths[chosen],
        truncated=rollouts.truncated[chosen],
        behaviour_log_probs=torch.cat([rollouts.behaviour_log_probs[cut] for cut in cuts]),
        staleness=torch.cat([rollouts.staleness[cut] for cut in cuts]),
        token_rewards=torch.cat([rollouts.token_rewards[cut] for cut in cuts]),
        values=torch.cat([rollouts.values[cut] for cut in cuts]),
    )


def measure(name: str, rollouts: Rollouts, loop_rows: int, rounds: int) -> dict[str, Any]:
    """All contenders of one estimator, `rounds` times.

    Returns:
        seconds and ratios to ours by contender, `scaled`, and the single runs.
    """
    scaled = name not in _GROUPED and loop_rows < rollouts.num_sequences
    looped = part(rollouts, loop_rows) if scaled else rollouts
    factor = rollouts.num_tokens / looped.num_tokens
    contenders: dict[str, tuple[Callable[[], Tensor], float]] = {
        "ours": (lambda: ours(name, rollouts), 1.0),
        "rows": (lambda: row_loop(name, looped), factor),
    }
    _agree(ours(name, looped), row_loop(name, looped), f"{name}, rows")
    if name not in _GROUPED:
        padded = pad(rollouts)
        contenders["columns"] = (lambda: column_loop(name, padded), 1.0)
        _agree(ours(name, rollouts), column_loop(name, padded), f"{name}, columns")
    runs: list[dict[str, float]] = []
    for number in range(rounds):
        order = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        runs.append({which: _seconds(contenders[which][0]) * contenders[which][1] for which in order})
    seconds = {which: summarize(run[which] for run in runs) for which in contenders}
    ratios = {which: summarize(run[which] / run["ours"] for run in runs) for which in contenders if which != "ours"}
    return {"estimator": name, "seconds": seconds, "ratios": ratios, "scaled": scaled, "runs": runs}


def _agree(found: Tensor, expected: Tensor, what: str) -> None:
    if not torch.allclose(found.cpu(), expected.cpu(), rtol=1e-3, atol=1e-3):
        raise AssertionError(f"{what}: contenders differ by {float((found.cpu() - expected.cpu()).abs().max())}")


def _seconds(call: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    result = call()
    if result.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _rows(results: list[dict[str, Any]], tokens: int) -> list[list[object]]:
    lines: list[list[object]] = []
    for result in results:
        seconds: dict[str, Summary] = result["seconds"]
        for which, summary in seconds.items():
            mark = "*" if which == "rows" and result["scaled"] else ""
            ratio = result["ratios"].get(which, "1")
            lines.append(
                [result["estimator"], which, f"{summary}{mark}", f"{summary.median / tokens * 1e9:.3g}", ratio]
            )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192, help="longest sequence")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--lengths", choices=("uniform", "full"), default="uniform", help="1 .. tokens, or all of them")
    parser.add_argument("--loop-rows", type=int, default=64, help="rows on which a recurrence is looped over")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of ours and of columns; rows read from it")
    parser.add_argument("--only", nargs="*", choices=_ESTIMATORS, default=_ESTIMATORS)
    parser.add_argument("--json", type=Path, help="write all results here")
    arguments = parser.parse_args(argv)
    rollouts = make_batch(
        arguments.sequences, arguments.tokens, arguments.group_size, arguments.lengths, arguments.device
    )
    results = []
    for name in arguments.only:
        before = yardstick()
        results.append(measure(name, rollouts, arguments.loop_rows, arguments.rounds) | {"yardstick": before})
    sys.stdout.write(f"{arguments.sequences} sequences, {rollouts.num_tokens} tokens; * scaled by tokens\n\n")
    header = ("estimator", "contender", "seconds: median [range]", "ns per token", "times ours: median [range]")
    sys.stdout.write(table(header, _rows(results, rollouts.num_tokens)) + "\n")
    if arguments.json is not None:
        settings = {name: value for name, value in vars(arguments).items() if name != "json"}
        write_json(
            arguments.json,
            {"machine": machine(), "settings": settings, "tokens": rollouts.num_tokens, "results": results},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
