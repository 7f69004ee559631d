"""The scorers `code` and `code_fraction`: an item in, its outcome out."""

from __future__ import annotations

import math
import time

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.reward_service.code.cases import Most, run_calls, run_texts
from rollmesh.reward_service.code.programs import Program, program_of
from rollmesh.reward_service.code.rows import Calls, Script, Tests, Texts, tests_of
from rollmesh.reward_service.code.scripts import run_script
from rollmesh.reward_service.code.verdicts import SandboxError, Verdict
from rollmesh.reward_service.code.workplace import BusyError, workplace_of
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored, Unscorable, not_begun
from rollmesh.reward_service.sandbox.interface import Executor
from rollmesh.reward_service.sandbox.languages.table import language_of
from rollmesh.reward_service.scorers.versions import VERSIONS

# Share of a call's time in which its programs have to end.
_SHARE = 0.9
# Seconds for which a lack of turns is reported.
_RECENT_S = 10.0


class Code:
    """Runs the program of a response against the tests of its row.

    Equal items may get other scores: a program may draw numbers, or need just about the time that it has.

    Args:
        reward: of the configuration.
        name: of the scorer.
        fraction: the reward is the share of cases that pass; else 1 if all do, and 0 otherwise.
        cases: most cases of a row; None: as configured.
    """

    wants = ()

    def __init__(self, reward: RewardSection, name: str, *, fraction: bool, cases: int | None = None) -> None:
        self.__name__ = name
        self.version = VERSIONS[name]
        self._cases = min(filter(None, (cases, reward.code.cases)), default=None)
        self._fraction = fraction
        self._place = workplace_of(reward)
        self._time_s = _SHARE * reward.scorer_timeout_s
        self._busy_at = -math.inf

    def present_wait(self) -> Wait:
        """The reason why items wait: some had no turn in the sandbox a moment ago; empty while they have."""
        if time.monotonic() - self._busy_at > _RECENT_S:
            return NO_WAIT
        return Wait(f"{self.__name__}: programs wait for their turn in the sandbox (reward.isolation.concurrency)")

    async def __call__(self, item: RewardItem) -> Outcome:
        """The outcome of one item."""
        try:
            tests = tests_of(item)
            wanted = item.extra_info.get("language")
            program = program_of(item.response, wanted if isinstance(wanted, str) and wanted else None, _name_of)
        except ValueError as error:
            return Unscorable(str(error))
        began = time.monotonic()
        deadline = began + self._time_s
        begin_by = max(deadline - 2 * self._place.section.time_s, began + self._time_s / 4)
        try:
            async with self._place.turn(begin_by) as executor:
                verdict = await self._verdict(executor, program, tests, deadline)
        except BusyError:
            self._busy_at = time.monotonic()
            return not_begun("all turns in the sandbox are taken")
        except SandboxError as error:
            why = f"{self.__name__}: {error}"
            if time.monotonic() >= deadline:
                why += f"; {self._time_s:.3g} s are nine tenths of reward.scorer_timeout_s, compiling included"
            return Failed("sandbox", why, retryable=True)
        except ValueError as error:
            return Unscorable(str(error))
        except RollmeshError as error:
            # No sandbox, or no such language; another service may have it.
            return Failed("no_sandbox", f"{self.__name__}: {error}", retryable=True)
        share = verdict.passed / verdict.cases
        total = share if self._fraction else float(verdict.passed == verdict.cases)
        return Scored(total, verdict.components(), evidence=verdict.evidence())

    async def _verdict(self, executor: Executor, program: Program, tests: Tests, deadline: float) -> Verdict:
        place, most = self._place, Most(self._cases, to_first=not self._fraction)
        if isinstance(tests, Texts):
            return await run_texts(place, executor, program, tests, deadline, most)
        if isinstance(tests, Calls):
            return await run_calls(place, executor, program, tests, deadline, most)
        assert isinstance(tests, Script)
        return await run_script(place, executor, program, tests, deadline)


def _name_of(name: str) -> str | None:
    language = language_of(name)
    return language.name if language is not None else None
