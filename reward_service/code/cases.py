"""Programs run on inputs, and functions called, case by case; what comes out is compared here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.reward_service.code.checkers import Checker
from rollmesh.reward_service.code.comparing import same_text, same_value
from rollmesh.reward_service.code.imports import with_imports
from rollmesh.reward_service.code.programs import PYTHON, Program
from rollmesh.reward_service.code.rows import Calls, Texts
from rollmesh.reward_service.code.verdicts import CaseEnd, Verdict, is_compile_error, last_words, rows_of, trouble
from rollmesh.reward_service.code.workplace import Workplace, run_one, text_inside
from rollmesh.reward_service.sandbox.interface import Executor, Job, Ran

# Characters of an input or an output in the evidence.
_SHOWN = 600
FIRST = (
    '__name__ = "solution"; rollmesh_channel = globals().get("rollmesh_channel") or __import__("os").dup(1); '
    'isinstance(rollmesh_channel, int) and __import__("os").dup2(2, 1)'
)
"""In front of a program whose function is called: what it prints is none of the result."""
# Inputs from which one process for all is worth its start.
_BATCH = 2


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
    outputs: dict[int, str] = {}

    def accepts(number: int, found: str) -> bool:
        outputs[number] = found
        # All that a checker would be asked about stays open.
        return bool(tests.checker) or same_text(found, cases[number][1])

    def shown(number: int, found: str) -> dict[str, str]:
        given, expected = cases[number]
        return {"input": given[:_SHOWN], "expected": expected[:_SHOWN], "output": found[:_SHOWN]}

    run = _Cases(place, executor, made, [given for given, _ in cases], accepts, shown)
    verdict = await run.verdict(deadline, to_first=most.to_first)
    if tests.checker and not verdict.compile_error:
        checker = Checker(place, executor, tests)
        for number, end in verdict.ends.items():
            given, expected = cases[number]
            if end.why or same_text(outputs[number], expected):
                continue
            if (said := await checker.refuses(given, expected, outputs[number], deadline)) is not None:
                texts = {**shown(number, outputs[number]), "checker": said}
                verdict.ends[number] = CaseEnd(end.name, "the checker refuses its output", texts)
                if most.to_first:
                    break
    return verdict


async def run_calls(
    place: Workplace, executor: Executor, program: Program, tests: Calls, deadline: float, most: Most
) -> Verdict:
    """Calls a function of a Python program with the arguments of each case; as `run_texts`."""
    if program.language != PYTHON:
        raise ValueError(
            f"tests with fn_name call functions of Python alone, and the program is {program.language}: without "
            "fn_name, inputs and outputs are standard input and output in any language"
        )
    cases = tests.cases[: most.cases]
    source = with_imports(program.source, first=FIRST).encode(errors="replace")
    job = place.python_job({"solution.py": source + b"\n" + text_inside("calling.py")}, "solution.py", deadline)

    def shown(number: int, found: str) -> dict[str, str]:
        arguments, expected = (json.dumps(each)[:_SHOWN] for each in cases[number])
        return {"arguments": arguments, "expected": expected, "result": found[:_SHOWN]}

    def accepts(number: int, found: str) -> bool:
        return _is_result(found, cases[number][1], wrapped=tests.wrapped)

    inputs = [json.dumps({"function": tests.function, "arguments": list(given)}) for given, _ in cases]
    run = _Cases(place, executor, job, inputs, accepts, shown, calls=True)
    return await run.verdict(deadline, to_first=most.to_first)


def _is_result(text: str, expected: Any, *, wrapped: bool) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if same_value(found, expected):
        return True
    return wrapped and isinstance(expected, list) and len(expected) == 1 and same_value(found, expected[0])


class _Cases:
    """The cases of one program.

    The first input is run in a process of its own. If it passes, several others are run in one, which takes a tenth of
    the time. Unless all of them pass there, each is run again by itself, and only that counts. So a program has no
    second guess if it answers one thing among others and another thing alone.

    Args:
        job: of one input.
        inputs: standard input of each case.
        accepts: True if the output of a case, by its number, is right.
        shown: texts for the reader about a case and its output.
        calls: as of `inside/batch.py`.
    """

    def __init__(
        self,
        place: Workplace,
        executor: Executor,
        job: Job,
        inputs: Sequence[str],
        accepts: Callable[[int, str], bool],
        shown: Callable[[int, str], dict[str, str]],
        *,
        calls: bool = False,
    ) -> None:
        self._place = place
        self._executor = executor
        self._job = job
        self._inputs = inputs
        self._accepts = accepts
        self._shown = shown
        self._calls = calls
        self._verdict = Verdict(len(inputs))
        self._time_is_over = False

    async def verdict(self, deadline: float, *, to_first: bool) -> Verdict:
        """The ends of the cases, up to the first failure if `to_first`."""
        verdict, numbers = self._verdict, range(len(self._inputs))
        together = self._job.language == "python" and len(numbers) > _BATCH
        if to_first or together:
            # Most programs that fail do so at once.
            await self._run_alone(numbers[:1], to_first=to_first)
            numbers = numbers[1:]
        if self._time_is_over or verdict.compile_error or (to_first and not verdict.may_go_on):
            return verdict
        if not (together and verdict.may_go_on and await self._all_pass_in_one(numbers, deadline)):
            await self._run_alone(numbers, to_first=to_first)
        return verdict

    async def _run_alone(self, numbers: Sequence[int], *, to_first: bool) -> None:
        verdict, ended = self._verdict, 0

        def stop(ran: Ran) -> bool:
            nonlocal ended
            number = numbers[ended]
            ended += 1
            verdict.ends[number] = self._end(number, ran)
            verdict.cpu_s += ran.cpu_s
            if is_compile_error(ran) and verdict.cpu_s == ran.cpu_s:
                verdict.compile_error = last_words(ran)
                return True
            # A program that waits once has used up its time.
            self._time_is_over = verdict.cpu_s >= self._place.section.time_s or ran.end == "wall"
            return self._time_is_over or (to_first and bool(verdict.ends[number].why))

        if verdict.compile_error or verdict.cpu_s >= self._place.section.time_s or not numbers:
            return
        inputs = [self._inputs[number].encode(errors="replace") for number in numbers]
        ran = await self._executor.run_all(self._job, inputs, stop=stop)
        for last in ran[ended:]:  # after the last input nothing is left to stop
            stop(last)

    def _end(self, number: int, ran: Ran) -> CaseEnd:
        name, why = f"case {number + 1}", trouble(ran, self._job.limits.wall_s)
        found = ran.stdout.decode(errors="replace")
        if not why and self._accepts(number, found):
            return CaseEnd(name)
        what = "its result is wrong" if self._calls else "its output is wrong"
        return CaseEnd(name, why or what, {**self._shown(number, found), "error": last_words(ran)})

    async def _all_pass_in_one(self, numbers: Sequence[int], deadline: float) -> bool:
        """Runs cases in one process; false, with nothing changed, unless each has passed with its only output."""
        (file,) = self._job.argv
        job = self._place.inside_job(("batch", "loading"), self._job.files, deadline)
        # JSON may take six characters for one.
        job = replace(job, limits=replace(job.limits, output=6 * len(numbers) * self._job.limits.output))
        inputs = [self._inputs[number] for number in numbers]
        request = json.dumps({"file": file, "inputs": inputs, "calls": self._calls})
        ran = await run_one(self._executor, job, request.encode())
        # The program can write rows itself. So each case has one row, in order, and no other row is looked at.
        rows = rows_of(ran.stdout)
        if len(rows) != len(numbers):
            return False
        for at, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            match row:
                case [int(told), str(found)] if told == at and self._accepts(number, found):
                    continue
            return False
        self._verdict.cpu_s += ran.cpu_s
        self._verdict.ends.update({number: CaseEnd(f"case {number + 1}") for number in numbers})
        return True
