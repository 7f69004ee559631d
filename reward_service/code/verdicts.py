"""Ends of a program's cases, in numbers and in words. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmesh.mesh.text import bounded
from rollmesh.reward_service.sandbox.interface import Ran

# Share of its time that a program which waits does not compute; share in which a busy host has had too few processors.
_BUSY, _STALLED = 0.02, 0.1
# Bytes of standard error that are looked at; rows of a traceback that are none of the program's.
_READ = 8192
_SANDBOXS_OWN = re.compile(r'  File "[^"\n]*/reward_service/sandbox/[^"\n]*", line.*\n')
# Characters of one text in the evidence.
_SHOWN = 600
_OVER = {
    "cpu": "its CPU time is over",
    "wall": "it waited until its time was over",
    "memory": "its memory is exhausted",
    "output": "its output is too long",
    "denied": "it made a call that programs may not make",
}


class SandboxError(Exception):
    """The infrastructure kept a program from running, or from its end."""


@dataclass(frozen=True, slots=True)
class CaseEnd:
    """The end of a case.

    Attributes:
        name: of the case.
        why: reason of a failure; empty for a case that passed.
        shown: texts for a reader, by what they are.
    """

    name: str
    why: str = ""
    shown: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Verdict:
    """The ends of a program's cases.

    Attributes:
        cases: number of cases.
        ends: of those that were run, by their number from 0 on.
        cpu_s: CPU seconds of the program.
        compile_error: the compiler's words; empty for a program that could be run.
        same_process: the tests shared a process with the program.
    """

    cases: int
    ends: dict[int, CaseEnd] = field(default_factory=dict)
    cpu_s: float = 0.0
    compile_error: str = ""
    same_process: bool = False

    @property
    def passed(self) -> int:
        """Number of cases that passed."""
        return sum(not end.why for end in self.ends.values())

    @property
    def may_go_on(self) -> bool:
        """False once a case has failed, or the program cannot be compiled."""
        return not self.compile_error and self.passed == len(self.ends)

    def components(self) -> dict[str, float]:
        """Parts of the score."""
        parts = {
            "passed": self.passed / self.cases,
            "cases": float(self.cases),
            "compiled": float(not self.compile_error),
            "cpu_s": self.cpu_s,
        }
        return {**parts, "same_process": float(self.cases)} if self.same_process else parts

    def evidence(self) -> str:
        """For a reader: how many passed, and how the first failure came about."""
        head = f"{self.passed} of {self.cases} cases passed"
        if self.compile_error:
            return f"{head}; the program cannot be compiled: {bounded(_error_first(self.compile_error), _SHOWN)}"
        failed = next((end for _, end in sorted(self.ends.items()) if end.why), None)
        if failed is None:
            left = self.cases - len(self.ends)
            return f"{head}; no time was left for {left}" if left else head
        texts = [f"{what}: {bounded(text, _SHOWN)}" for what, text in failed.shown.items() if text]
        return "\n".join([f"{head}; {failed.name}: {failed.why}", *texts])


def trouble(ran: Ran, wall_s: float) -> str:
    """The reason why a run failed, whatever it has put out; empty for one that ended well.

    A program whose time is over has waited for something. That may have been a processor, if it has computed meanwhile
    and the host had too few. A host that keeps no account of this is taken to have had too few.

    Args:
        ran: its end.
        wall_s: seconds that it had.

    Raises:
        SandboxError: the infrastructure ended it.
    """
    if ran.end == "infrastructure":
        raise SandboxError(ran.reason)
    had_too_few = ran.stalled_s is None or ran.stalled_s >= _STALLED * wall_s
    if ran.end == "wall" and ran.cpu_s >= _BUSY * wall_s and had_too_few:
        raise SandboxError(f"the machine is too busy: {ran.cpu_s:.1f} s of a processor in {wall_s:.1f} s")
    if ran.end == "signal":
        return f"it was ended by signal {ran.code}"
    if ran.end == "exit":
        return f"it ended with exit code {ran.code}" if ran.code else ""
    return _OVER[ran.end]


def last_words(ran: Ran) -> str:
    """The end of what a program has written to standard error."""
    words = ran.stderr[-_READ:].decode(errors="replace")
    return _SANDBOXS_OWN.sub("", words)[-_SHOWN:].strip()


def is_compile_error(ran: Ran) -> bool:
    """True for a Python program that could not be compiled."""
    words = last_words(ran).rpartition("\n")[2].partition(":")[0]
    return ran.end == "exit" and ran.code == 1 and not ran.stdout and words in _NO_PYTHON


def _error_first(words: str) -> str:
    """A compiler's words; Python's begin with the error, which its traceback has at the end."""
    places, _, error = words.rpartition("\n")
    if error.partition(":")[0] not in _NO_PYTHON:
        return words
    return "\n".join(filter(None, [error, places.removeprefix("Traceback (most recent call last):\n")]))


_NO_PYTHON: Sequence[str] = ("SyntaxError", "IndentationError", "TabError")


def rows_of(output: bytes) -> list[Any]:
    """The rows of JSON up to the first that is none."""
    rows = []
    for row in output.split(b"\n")[:-1]:
        try:
            rows.append(json.loads(row))
        except (ValueError, RecursionError):
            break
    return rows
