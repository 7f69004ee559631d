"""Special judges: a program of the row that is given input, expected output and output, in a run of its own.

Its arguments are the names of three files: input, expected output, output. It accepts with exit code 0, unless the
first word that it prints is a number below 1 or one of the words of refusal; it refuses with exit code 1 or 2.
"""

from __future__ import annotations

from rollmesh.reward_service.code.programs import PYTHON
from rollmesh.reward_service.code.rows import Texts
from rollmesh.reward_service.code.verdicts import last_words, trouble
from rollmesh.reward_service.code.workplace import Workplace, run_one
from rollmesh.reward_service.sandbox.interface import Executor, Job

_FILES = ("input.txt", "expected.txt", "output.txt")
_REFUSALS = ("false", "no", "wrong", "wa", "reject", "rejected", "refused")
_REFUSES = (1, 2)


class Checker:
    """The checker of a row."""

    def __init__(self, place: Workplace, executor: Executor, tests: Texts) -> None:
        self._place = place
        self._executor = executor
        self._source = tests.checker.encode(errors="replace")
        if tests.checker_language.lower() not in ("", PYTHON, "py", "python3"):
            raise ValueError(f"checkers are written in Python; this one is {tests.checker_language}")

    async def refuses(self, given: str, expected: str, found: str, deadline: float) -> str | None:
        """The words with which the checker refuses an output; None if it accepts it.

        Raises:
            SandboxError: the infrastructure kept it from its end.
            ValueError: the checker does not work.
        """
        texts = (given, expected, found)
        files = {name: text.encode(errors="replace") for name, text in zip(_FILES, texts, strict=True)}
        files = {**files, "checker.py": self._source}
        job = Job("python", files, ["checker.py", *_FILES], limits=self._place.limits(), deadline=deadline)
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
