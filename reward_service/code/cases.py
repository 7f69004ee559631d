"""Programs run on inputs, and functions called, case by case; what comes out is compared here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.reward_service.code.checkers import Checker
from rollmesh.reward_service.code.comparing import same_text, same_value
from rollmesh.reward_service.code.imports import with_imports
from rollmesh.reward_service.code.programs import PYTHON, Program
from rollmesh.reward_service.code.rows import Calls, Texts
from rollmesh.reward_service.code.verdicts import CaseEnd, Verdict, is_compile_error, last_words, trouble
from rollmesh.reward_service.code.workplace import Workplace, inside
from rollmesh.reward_service.sandbox.interface import Executor, Job, Ran

# Characters of an input or an output in the evidence.
_SHOWN = 600
FIRST = '__name__ = "solution"; rollmesh_channel = __import__("os").dup(1); __import__("os").dup2(2, 1)'
"""In front of a program whose function is called: what it prints is none of the result."""
# Judges one run: the number of the case, and its end.
Judge = Callable[[int, Ran], CaseEnd]


@dataclass(frozen=True, slots=True)
class Most:
    """Bounds of what is run.

    Attributes:
        cases: of a row, the first ones; None: all.
        to_first: no further case after one that has failed.
    """

    cases: int | None
    to_first: bool


async def run_texts(
    place: Workplace, executor: Executor, program: Program, tests: Texts, deadline: float, most: Most
) -> Verdict:
    """Runs a program on the input of each case.

    Args:
        most: cases that are run.

    Raises:
        SandboxError: the infrastructure kept it from its end.
        ValueError: the checker cannot be used.
    """
    cases = tests.cases[: most.cases]
    made = await place.program_job(program, deadline, expected=4 * max(len(expected) for _, expected in cases))
    if isinstance(made, str):
        return Verdict(len(cases), compile_error=made)
    job = made
    outputs: list[str] = []

    def judge(number: int, ran: Ran) -> CaseEnd:
        given, expected = cases[number]
        name, why = f"case {number + 1}", trouble(ran, job.limits.wall_s)
        found = ran.stdout.decode(errors="replace")
        outputs.append(found)
        # Without the runs of a checker: what it would be asked about stays open.
        if not why and (tests.checker or same_text(found, expected)):
            return CaseEnd(name)
        shown = {"input": given[:_SHOWN], "expected": expected[:_SHOWN], "output": found[:_SHOWN]}
        return CaseEnd(name, why or "its output is wrong", {**shown, "error": last_words(ran)})

    inputs = [given.encode(errors="replace") for given, _ in cases]
    verdict = await _run_cases(place, executor, job, inputs, judge, to_first=most.to_first)
    if tests.checker and not verdict.compile_error:
        checker = Checker(place, executor, tests)
        for number, end in enumerate(verdict.ends):
            given, expected = cases[number]
            if end.why or same_text(outputs[number], expected):
                continue
            if (said := await checker.refuses(given, expected, outputs[number], deadline)) is not None:
                shown = {"input": given[:_SHOWN], "output": outputs[number][:_SHOWN], "checker": said}
                verdict.ends[number] = CaseEnd(end.name, "the checker refuses its output", shown)
                if most.to_first:
                    break
    return verdict


async def run_calls(
    place: Workplace, executor: Executor, program: Program, tests: Calls, deadline: float, most: Most
) -> Verdict:
    """Calls a function of a Python program with the arguments of each case; as `run_texts`."""
    if program.language != PYTHON:
        raise ValueError(f"functions are called in Python; the program is {program.language}")
    cases = tests.cases[: most.cases]
    (calling,) = inside("calling.py").values()
    source = with_imports(program.source, first=FIRST).encode(errors="replace")
    job = place.python_job({"solution.py": source + b"\n" + calling}, "solution.py", deadline)

    def judge(number: int, ran: Ran) -> CaseEnd:
        arguments, expected = cases[number]
        name, why = f"case {number + 1}", trouble(ran, job.limits.wall_s)
        if not why and _is_result(ran.stdout, expected, wrapped=tests.wrapped):
            return CaseEnd(name)
        found = ran.stdout[:_SHOWN].decode(errors="replace")
        shown = {"arguments": json.dumps(arguments)[:_SHOWN], "expected": json.dumps(expected)[:_SHOWN]}
        shown = {**shown, "result": found, "error": last_words(ran)}
        return CaseEnd(name, why or "its result is wrong", shown)

    inputs = [json.dumps({"function": tests.function, "arguments": list(given)}).encode() for given, _ in cases]
    return await _run_cases(place, executor, job, inputs, judge, to_first=most.to_first)


def _is_result(text: bytes, expected: Any, *, wrapped: bool) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if same_value(found, expected):
        return True
    return wrapped and isinstance(expected, list) and len(expected) == 1 and same_value(found, expected[0])


async def _run_cases(
    place: Workplace, executor: Executor, job: Job, inputs: Sequence[bytes], judge: Judge, *, to_first: bool
) -> Verdict:
    verdict = Verdict(len(inputs))

    def stop(ran: Ran) -> bool:
        verdict.ends.append(judge(len(verdict.ends), ran))
        verdict.cpu_s += ran.cpu_s
        if len(verdict.ends) == 1 and is_compile_error(ran):
            verdict.compile_error = last_words(ran)
            return True
        # A program that waits once has used up its time.
        over = verdict.cpu_s >= place.section.time_s or ran.end == "wall"
        return over or (to_first and bool(verdict.ends[-1].why))

    ran = await executor.run_all(job, inputs, stop=stop)
    for last in ran[len(verdict.ends) :]:  # after the last input nothing is left to stop
        stop(last)
    return verdict
