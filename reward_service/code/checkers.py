"""Special judges: a program of the row that is given input, expected output and output, in a run of its own.

Its arguments are the names of three files: input, expected output, output. It refuses with exit code 1 or
2, and accepts with 0. It also refuses if the first word that it prints is a number below 1, or a word of refusal.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rollmesh.reward_service.code.programs import PYTHON, Program
from rollmesh.reward_service.code.rows import Texts
from rollmesh.reward_service.code.verdicts import last_words, trouble
from rollmesh.reward_service.code.workplace import Workplace, run_one
from rollmesh.reward_service.sandbox.interface import Executor, Ran

_FILES = ("input.txt", "expected.txt", "output.txt")
_REFUSALS = ("false", "no", "wrong", "wa", "reject", "rejected", "refused")
_REFUSES = (1, 2)


class Checker:
    """The checker of a row."""

    def __init__(self, place: Workplace, executor: Executor, tests: Texts) -> None:
        self._place = place
        self._executor = executor
        self._source = tests.checker
        self._language = tests.checker_language or _language(tests.checker)

    async def refuses(self, given: str, expected: str, found: str, deadline: float) -> str | None:
        """The words with which the checker refuses an output; None if it accepts it.

        Raises:
            SandboxError: the infrastructure kept it from its end.
            ValueError: the checker does not work.
        """
        ran, limit_s = await self._run((given, expected, found), deadline)
        said = ran.stdout[:200].decode(errors="replace").strip()
        if ran.end == "exit" and ran.code in _REFUSES and b"Traceback" not in ran.stderr:
            return said or last_words(ran) or f"exit code {ran.code}"
        if why := trouble(ran, limit_s):
            # Else a program could leave its row without a score, by an output that the checker cannot read.
            if await self._accepts_expected(given, expected, deadline):
                return f"the checker, which works with the expected output, fails: {why}: {last_words(ran)}"
            raise ValueError(f"the checker does not work: {why}: {last_words(ran)}")
        return said if _is_refusal(said) else None

    async def _accepts_expected(self, given: str, expected: str, deadline: float) -> bool:
        ran, limit_s = await self._run((given, expected, expected), deadline)
        return not trouble(ran, limit_s) and not _is_refusal(ran.stdout[:200].decode(errors="replace").strip())

    async def _run(self, texts: tuple[str, str, str], deadline: float) -> tuple[Ran, float]:
        """The end of a run with input, expected output and output, and the seconds that it had."""
        files = {name: text.encode(errors="replace") for name, text in zip(_FILES, texts, strict=True)}
        longest = max(map(len, texts))
        job = await self._place.program_job(Program(self._language, self._source), deadline, expected=longest)
        if isinstance(job, str):
            raise ValueError(f"the checker cannot be compiled: {job[-500:]}")
        job = replace(job, files={**job.files, **files}, argv=[*job.argv, *_FILES])
        return await run_one(self._executor, job, b""), job.limits.wall_s


def _is_refusal(said: str) -> bool:
    word = said.partition("\n")[0].partition(" ")[0].lower()
    try:
        return not 1 <= float(word) < math.inf  # a score that is no number refuses
    except ValueError:
        return word in _REFUSALS


def _language(source: str) -> str:
    return "cpp" if "#include" in source else PYTHON
