"""Special judges: a program of the row that is given input, expected output and output, in a run of its own.

Its arguments are the names of three files: input, expected output, output. It refuses with exit code 1 or
2, and accepts with 0. It also refuses if the first word that it prints is a number below 1, or a word of refusal.
"""

from __future__ import annotations

from dataclasses import replace

from rollmesh.reward_service.code.programs import PYTHON, Program
from rollmesh.reward_service.code.rows import Texts
from rollmesh.reward_service.code.verdicts import last_words, trouble
from rollmesh.reward_service.code.workplace import Workplace, run_one
from rollmesh.reward_service.sandbox.interface import Executor

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
        texts = (given, expected, found)
        files = {name: text.encode(errors="replace") for name, text in zip(_FILES, texts, strict=True)}
        longest = max(map(len, texts))
        job = await self._place.program_job(Program(self._language, self._source), deadline, expected=longest)
        if isinstance(job, str):
            raise ValueError(f"the checker cannot be compiled: {job[-500:]}")
        job = replace(job, files={**job.files, **files}, argv=[*job.argv, *_FILES])
        ran = await run_one(self._executor, job, b"")
        said = ran.stdout[:200].decode(errors="replace").strip()
        if ran.end == "exit" and ran.code in _REFUSES and b"Traceback" not in ran.stderr:
            return said or last_words(ran) or f"exit code {ran.code}"
        if why := trouble(ran, job.limits.wall_s):
            raise ValueError(f"the checker does not work: {why}: {last_words(ran)}")
        return said if _is_refusal(said) else None


def _is_refusal(said: str) -> bool:
    word = said.partition("\n")[0].partition(" ")[0].lower()
    try:
        return float(word) < 1
    except ValueError:
        return word in _REFUSALS


def _language(source: str) -> str:
    return "cpp" if "#include" in source else PYTHON
