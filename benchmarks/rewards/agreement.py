"""Do scorers agree with the graders of other projects? Both grade generated pairs, and each difference has its reason.

`python -m benchmarks.rewards.agreement --python VERL/bin/python --python GYM/bin/python --json agreement.json`. Each
interpreter has some of the packages (verl, math-verify, TRL, NeMo Gym). Graders that no interpreter has are left out,
and named. The exit code is 1 where a kind of pair is graded otherwise and has no reason in `agreement_explanations`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.rewards.agreement_explanations import EXPLANATIONS
from benchmarks.rewards.agreement_pairs import Pair, pairs
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.text import with_part
from rollmesh.reward_service.code.scorer import Code
from rollmesh.reward_service.outcomes import RewardItem, Scored
from rollmesh.reward_service.scorers import SCORERS

# Scorer, grader of another project, pairs.
COMPARED = (
    ("gsm8k_strict", "verl gsm8k", "gsm8k"),
    ("gsm8k_flexible", "verl gsm8k flexible", "gsm8k"),
    ("gsm8k", "verl gsm8k", "gsm8k"),
    ("math_string", "verl math_reward", "math"),
    ("math", "verl math_verify", "math"),
    ("math", "math-verify", "math"),
    ("math", "TRL accuracy", "math"),
    ("math", "verl prime_math", "math"),
    ("math_dapo", "verl math_dapo", "dapo"),
    ("qa", "verl qa", "qa"),
    ("choice", "NeMo Gym mcqa", "choice"),
    ("code_fraction", "verl prime_code", "code"),
)
_GRADERS = Path(__file__).with_name("peer_graders.py")
_EQUAL = 1e-9
_BEGIN = "<!-- agreement: written by benchmarks.rewards.agreement -->"


@dataclass(frozen=True, slots=True)
class Difference:
    """A kind of pair that is graded otherwise: how often, and the first of them."""

    kind: str
    count: int
    of: int
    ours: str
    theirs: str
    response: str
    truth: str


class Peer:
    """Graders of one interpreter."""

    def __init__(self, python: str, process: subprocess.Popen[str]) -> None:
        self.python = python
        self._process = process
        self.known: dict[str, dict[str, str]] = json.loads(self._line())

    def grade(self, grader: str, pair: Pair) -> str | float:
        """The score, or the error in words."""
        asked = {"grader": grader, "response": pair.response, "truth": pair.truth, "extra": pair.extra}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._line())
        return float(answer["score"]) if "score" in answer else str(answer["error"])

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self.python}: the graders ended")
        return line


@contextmanager
def _peer(python: str) -> Iterator[Peer]:
    command = [python, str(_GRADERS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield Peer(python, process)
        finally:
            process.kill()


def _ours(scorer: str, pair: Pair, loop: asyncio.Runner) -> str | float:
    extra = dict(pair.extra)
    if "options" in extra:
        # NeMo Gym has one object for each option.
        extra["options"] = {label: text for option in extra["options"] for label, text in option.items()}
    item = RewardItem("i", "g", "source", "", pair.response, pair.truth, extra)
    outcome = loop.run(_code()(item)) if scorer == "code_fraction" else SCORERS[scorer](item)
    return outcome.total if isinstance(outcome, Scored) else type(outcome).__name__


def compare(scorer: str, grader: str, peer: Peer, drawn: Sequence[Pair], loop: asyncio.Runner) -> list[Difference]:
    """Grades all pairs by both; the kinds that differ."""
    unlike: dict[str, list[tuple[Pair, Any, Any]]] = {}
    for pair in drawn:
        ours, theirs = _ours(scorer, pair, loop), peer.grade(grader, pair)
        same = isinstance(ours, float) and isinstance(theirs, float) and abs(ours - theirs) < _EQUAL
        if not same:
            unlike.setdefault(pair.kind, []).append((pair, ours, theirs))
    return [
        Difference(
            kind, len(found), sum(pair.kind == kind for pair in drawn), _shown(ours), _shown(theirs), pair.response,
            pair.truth,
        )
        for kind, found in unlike.items()
        for pair, ours, theirs in found[:1]
    ]  # fmt: skip


@cache
def _code() -> Code:
    """One for all pairs, since it has one sandbox."""
    return Code(RewardSection(scorer_timeout_s=60.0, timeout_s=120.0), "code_fraction", fraction=True, cases=10)


def _shown(score: str | float) -> str:
    return f"{score:g}" if isinstance(score, float) else score


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The tables of the documentation: counts, and the kinds that differ."""
    rows = [
        f"| `{one['scorer']}` | {one['grader']} | {one['version']} | {one['pairs']:,} | {one['agree']:,} |"
        for one in results
    ]
    head = "| scorer | grader | versions | pairs | graded alike |\n|---|---|---|---|---|\n"
    unlike = [
        f"| `{one['scorer']}` | {one['grader']} | {each['kind']} | {each['ours']} | {each['theirs']} "
        f"| {each['reason']} |"
        for one in results
        for each in one["differences"]
    ]
    other = "| scorer | grader | kind of pair | here | there | reason |\n|---|---|---|---|---|---|\n"
    return f"{head}{_joined(rows)}\n{other}{_joined(unlike)}"


def _joined(rows: Sequence[str]) -> str:
    return "".join(f"{row}\n" for row in dict.fromkeys(rows))


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", required=True, help="interpreter with packages of others")
    parser.add_argument("--each", type=int, default=20, help="pairs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scorer", action="append", help="only these scorers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="Markdown in which the tables are replaced")
    options = parser.parse_args()
    results, odd = [], []
    with ExitStack() as closers, asyncio.Runner() as loop:
        peers = [closers.enter_context(_peer(python)) for python in options.python]
        for scorer, grader, family in COMPARED:
            if options.scorer and scorer not in options.scorer:
                continue
            having = [peer for peer in peers if "version" in peer.known[grader]]
            if not having:
                print(f"{grader}: left out: {peers[0].known[grader]['missing']}")
            for peer in having:
                # verl starts several processes for each program.
                drawn = pairs(family, min(options.each, 2) if family == "code" else options.each, options.seed)
                version = peer.known[grader]["version"]
                found = compare(scorer, grader, peer, drawn, loop)
                agree = len(drawn) - sum(each.count for each in found)
                print(f"{scorer} and {grader} ({version}): {agree} of {len(drawn)}")
                reasons = {each.kind: EXPLANATIONS.get((scorer, grader, each.kind), "") for each in found}
                for each in found:
                    print(
                        f"  {each.kind} ({each.count} of {each.of}): {each.ours} here, {each.theirs} there, for "
                        f"{each.response[-60:]!r} and {each.truth!r}: {reasons[each.kind] or 'NOT EXPLAINED'}"
                    )
                odd += [f"{scorer}, {grader}: {kind}" for kind, reason in reasons.items() if not reason]
                differences = [
                    {"kind": each.kind, "count": each.count, "ours": each.ours, "theirs": each.theirs,
                     "reason": reasons[each.kind]} for each in found
                ]  # fmt: skip
                results.append(
                    {"scorer": scorer, "grader": grader, "version": version, "pairs": len(drawn), "agree": agree,
                     "differences": differences}
                )  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps({"seed": options.seed, "results": results}, indent=1), encoding="utf-8")
    if options.page is not None:
        text = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_part(text, _BEGIN, "<!-- end -->", markdown(results)), encoding="utf-8")
    for line in odd:
        print(f"not explained: {line}")
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main())
