"""Assertions and test files, run in another process than the program.

The tests run with the answers of the program that are known. All that they ask beyond is asked of the program, and
they run again (`inside/link.py`). The program runs from its start each time; its first answer to a question stands. The
first questions are the same for all programs, and are kept. Where the tests hand the program functions or objects of
their own, both share a process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollmesh.reward_service.code.programs import PYTHON, Program
from rollmesh.reward_service.code.rows import Script
from rollmesh.reward_service.code.verdicts import CaseEnd, Verdict, is_compile_error, last_words, rows_of, trouble
from rollmesh.reward_service.code.workplace import Workplace, run_one, solution
from rollmesh.reward_service.sandbox.interface import Executor

# Times that tests are run: calls whose arguments are results of other calls take one more for each of these.
_ROUNDS = 12
# Bytes of a program's answers to its tests.
_ANSWERS = 4 << 20
_TESTS = ("trial", "runner", "link", "values", "loading", "pytest")
_PROGRAM = ("session", "values", "loading")
_TOGETHER = ("together", "runner", "loading", "pytest")


class _Trial:
    def __init__(self, place: Workplace, executor: Executor, program: Program, tests: Script, deadline: float) -> None:
        self._place = place
        self._executor = executor
        self._source = solution(program)
        self._request = {"setup": tests.setup, "parts": list(tests.parts), "entry_point": tests.entry_point}
        self._deadline = deadline
        self._left_s = place.section.time_s
        self._ended = ""

    async def verdict(self) -> Verdict:
        """The cases' ends; see `run_script`."""
        verdict = Verdict(0)
        ops: list[Any] = []
        results: list[Any] = []
        for _ in range(_ROUNDS):
            answer, why = await self._run_tests(ops, results)
            if answer is not None and answer["too_many"]:
                answer, why = None, "they ask more of the program than can be kept"
            if answer is None:
                # The program's answers decide what is asked.
                if not ops:
                    raise ValueError(f"the tests do not work: {why}")
                verdict.ends = {0: CaseEnd("case 1", f"the tests cannot be run with what it answers: {why}")}
                return verdict
            if answer["broken"]:
                raise ValueError(answer["broken"])
            verdict.cases = len(answer["cases"])
            if answer["reason"]:
                if ops:  # the program has had a part in it
                    raise ValueError(f"the tests need the program's own process: {answer['reason']}")
                return await self._together(verdict, answer["reason"], [case["name"] for case in answer["cases"]])
            if not answer["pending"]:
                for number, case in enumerate(answer["cases"]):
                    why = "" if case["passed"] else f"it failed: {case['text']}"
                    verdict.ends[number] = CaseEnd(case["name"], why, {"program": self._ended})
                return verdict
            same = _in_common(ops, answer["ops"])
            ops = answer["ops"]
            # The first answer stands: a program that answers otherwise the next time has no second guess.
            results = [*results[:same], *(await self._run_program(ops, verdict))[same:]]
        raise ValueError(f"the tests ask the program again and again, with each answer, more than {_ROUNDS} times")

    async def _run_tests(self, ops: Sequence[Any], results: Sequence[Any]) -> tuple[dict[str, Any] | None, str]:
        """The answer of `trial.py`, or the reason why there is none."""
        job = self._place.inside_job(_TESTS, {}, self._deadline, cpu_s=self._place.section.time_s)
        request = json.dumps({**self._request, "ops": ops, "results": results}).encode()
        key = hashlib.sha256(request).digest()
        if (kept := self._place.asked.get(key)) is not None:
            return json.loads(kept), ""
        ran = await run_one(self._executor, job, request)
        if why := trouble(ran, job.limits.wall_s):
            return None, f"{why}: {last_words(ran)}"
        answer = json.loads(ran.stdout)
        if not ops:
            self._place.asked.put(key, ran.stdout)
        return answer, ""

    async def _run_program(self, ops: Sequence[Any], verdict: Verdict) -> list[Any]:
        """Results of operations; those for which the program did not live are told as such."""
        if self._left_s <= 0:
            self._ended = "its CPU time is over"
            return [{"ended": self._ended}] * len(ops)
        files = {"solution.py": self._source}
        job = self._place.inside_job(_PROGRAM, files, self._deadline, cpu_s=self._left_s)
        job = replace(job, limits=replace(job.limits, output=_ANSWERS))
        ran = await run_one(self._executor, job, json.dumps({"ops": ops}).encode())
        verdict.cpu_s += ran.cpu_s
        self._left_s -= ran.cpu_s
        rows = rows_of(ran.stdout)
        loaded, results = rows[:1] == [{"loaded": True}], rows[1 : len(ops) + 1]
        if not loaded and is_compile_error(ran):
            verdict.compile_error = last_words(ran)
        results = results if loaded else []
        missing = len(ops) - len(results)
        why = trouble(ran, job.limits.wall_s)
        self._ended = f"{why or 'it has ended'}\n{last_words(ran)}" if missing else ""
        return [*results, *[{"ended": why}] * missing]

    async def _together(self, verdict: Verdict, reason: str, names: Sequence[str]) -> Verdict:
        if not self._place.section.same_process:
            raise ValueError(
                f"the tests need the program's own process, which reward.code.same_process refuses: {reason}"
            )
        passwords = [secrets.token_hex(16) for _ in names]
        files = {"solution.py": self._source}
        job = self._place.inside_job(_TOGETHER, files, self._deadline, cpu_s=self._left_s)
        request = {**self._request, "passwords": passwords}
        ran = await run_one(self._executor, job, json.dumps(request).encode())
        verdict.same_process = True
        verdict.cpu_s = ran.cpu_s
        if is_compile_error(ran):
            verdict.compile_error = last_words(ran)
        shown = set(ran.stdout.decode(errors="replace").split("\n"))
        why = trouble(ran, job.limits.wall_s) or "it failed"
        for number, (name, password) in enumerate(zip(names, passwords, strict=True)):
            passed = password in shown
            verdict.ends[number] = CaseEnd(name) if passed else CaseEnd(name, why, {"error": last_words(ran)})
        return verdict


def _in_common(before: Sequence[Any], after: Sequence[Any]) -> int:
    """The number of operations with which both begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))


async def run_script(place: Workplace, executor: Executor, program: Program, tests: Script, deadline: float) -> Verdict:
    """Runs tests of a Python program.

    Raises:
        SandboxError: the infrastructure kept them from their end.
        ValueError: the tests do not work, whatever the program is.
    """
    if program.language != PYTHON:
        raise ValueError(f"the tests are Python; the program is {program.language}")
    return await _Trial(place, executor, program, tests, deadline).verdict()
