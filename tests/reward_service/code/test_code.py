"""Programs that are run: the forms of tests, how cases end, what is told about it."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest

from examples.demo.problems import programs
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.reward_service.code import scripts
from rollmesh.reward_service.code.inside import pytest as inside_pytest
from rollmesh.reward_service.code.scorer import Code
from rollmesh.reward_service.code.workplace import Workplace, run_one
from rollmesh.reward_service.configured import with_configured
from rollmesh.reward_service.outcomes import Failed, RewardItem
from rollmesh.reward_service.sandbox.interface import Executor, Job, Ran
from tests.reward_service.code.conftest import Score, make_engine, reward, scoring

pytestmark = pytest.mark.asyncio(loop_scope="package")

ADD = "Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```"
SUMS = {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3\n", "7\n", "12\n"]}


async def test_the_share_of_cases_or_all_of_them(score: Score) -> None:
    result = (await score(ADD, SUMS)).scored
    assert result.total == pytest.approx(2 / 3)
    assert {name: result.components[name] for name in ("passed", "cases", "compiled")} == {
        "passed": pytest.approx(2 / 3),
        "cases": 3,
        "compiled": 1,
    }
    assert "2 of 3 cases passed; case 3: its output is wrong" in result.evidence
    assert "input: 5 6\nexpected: 12\n" in result.evidence
    assert await reward(score, ADD, SUMS, source="all") == 0.0
    assert await reward(score, ADD, {"inputs": ["1 2"], "outputs": ["3"]}, source="all") == 1.0


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("print(1", "cannot be compiled: SyntaxError"),
        ("```python\nraise ValueError('x')\n```", "exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("import os; os.execv('/bin/sh', ['sh'])", "exit code 1"),
        ("x = [0] * 10**10", "memory"),
        ("print('1' * 10**7)", "output is too long"),
    ],
)
async def test_what_a_program_did_is_scored(score: Score, response: str, why: str) -> None:
    result = await score(response, SUMS)
    assert result.scored.total == 0.0
    assert why in result.scored.evidence
    assert result.scored.components["compiled"] == float("compiled" not in why)


async def test_cpu_time_is_for_all_cases_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.reward_service.code.workplace._WAITS", 1000)
    engine = make_engine(time_s=1.5, case_s=1.0)
    try:
        cases = {"inputs": ["1", "2", "3", "4"], "outputs": ["3"] * 4}
        result = await scoring(engine)("x = input()\nwhile x in '23': pass\nprint(3)", cases)
        ended = ("its CPU time is over", "ended by signal 9")
        assert any(why in result.scored.evidence for why in ended), result
        assert result.scored.components["passed"] == 0.25, "no time is left for the last"
    finally:
        await engine.close()


async def test_a_program_that_waits_has_used_up_its_time() -> None:
    engine = make_engine(time_s=0.5, case_s=0.5)
    try:
        result = await scoring(engine)("print(3) if input() == '1 2' else __import__('time').sleep(1000)", SUMS)
        assert result.scored.total == pytest.approx(1 / 3)
        assert "it waited until its time was over" in result.scored.evidence
    finally:
        await engine.close()


async def test_a_case_that_fails_among_others_is_run_alone(score: Score) -> None:
    """State that is left behind, descriptors of streams, an early end: all as if each case were the only one."""
    many = {"inputs": [str(n) for n in range(8)], "outputs": [str(n) for n in range(8)]}
    for program in (
        "import sys\nsys.seen = getattr(sys, 'seen', 0) + 1\nprint(input() if sys.seen == 1 else 'no')",
        "print(open(0).read())",
        "import os; os.write(1, os.read(0, 100))",
        "import os; print(input(), flush=True); os._exit(0)",
        "import atexit; atexit.register(print, input())",
        "import sys; print(input()); sys.exit()",
        "if __name__ == '__main__': print(input())",
        "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())",
    ):
        assert await reward(score, program, many) == 1.0, program
        assert await reward(score, program, many, source="all") == 1.0, program


async def test_functions_are_called(score: Score) -> None:
    cases = {"inputs": [[[1, 2], 3], [[], 0]], "outputs": [[[1, 2, 3]], [[0]]], "fn_name": "extend"}
    method = "class Solution:\n    def extend(self, a: List[int], b):\n        print(a)\n        return (*a, b)"
    assert await reward(score, method, cases) == 1.0
    assert await reward(score, "from __future__ import annotations\ndef extend(a, b): return a + [b]", cases) == 1.0
    assert await reward(score, "def extend(a, b): return [*a, b] if a else [1]", cases) == 0.5
    live = [{"input": '{"1": 2}\n"x"', "output": "[2, null]", "testtype": "functional"}]
    assert await reward(score, "def f(d, s):\n    return d[1], None", live, fn_name="f") == 1.0
    missing = await score("x = 1", live, fn_name="f")
    assert "KeyError: 'f'" in missing.scored.evidence


STACK = """
class EmptyError(Exception): pass
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x)
    def pop(self):
        if not self.items: raise EmptyError("empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
def even(n): return n % 2 == 0
def squares(n):
    for i in range(n): yield i * i
"""
PYTEST = """
import pytest
from solution import *
from solution import Stack, EmptyError

@pytest.fixture
def stack():
    return Stack()

def test_order(stack):
    for x in (1, "two", (3, 4)): stack.push(x)
    assert len(stack) == 3
    assert [stack.pop() for _ in range(3)] == [(3, 4), "two", 1]

def test_error(stack):
    with pytest.raises(EmptyError, match="empty"):
        stack.pop()

@pytest.mark.parametrize("n, expected", [(1, False), (2, True)])
def test_even(n, expected):
    assert even(n) is expected

class TestMore:
    def setup_method(self):
        self.stack = Stack([1])
    def test_equal(self):
        assert self.stack == Stack([1]) and self.stack != Stack([2])
        assert isinstance(self.stack, Stack)
    def test_items(self):
        n = 0
        while len(self.stack):
            self.stack.pop()
            n += 1
        assert n == 1
    def test_generated(self):
        assert list(squares(4)) == [0, 1, 4, 9]
        assert sum(squares(3)) / 2 == pytest.approx(2.5)
"""


async def test_assertions_and_test_files(score: Score) -> None:
    result = (await score(STACK, PYTEST)).scored
    assert (result.total, result.components["cases"]) == (1.0, 7), result.evidence
    wrong = (await score(STACK.replace("% 2 == 0", "% 2"), PYTEST)).scored
    assert wrong.total == pytest.approx(5 / 7)
    assert "test_even[1, False]: it failed" in wrong.evidence
    mbpp = {"test_list": ["assert even(2)", "assert even(3)", "assert not even(5)"]}
    assert await reward(score, STACK, **mbpp) == pytest.approx(2 / 3)
    check = "def check(candidate):\n    for i in range(50):\n        assert candidate(i) == (i % 2 == 0)"
    assert await reward(score, STACK, test=check, entry_point="even") == 1.0
    unit = (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertTrue(even(4))\nunittest.main()"
    )
    assert (
        await reward(score, STACK, test=unit.replace("unittest.main()", "if __name__ == '__main__': unittest.main()"))
        == 1.0
    )


@pytest.mark.parametrize("bounds", [{}, {"rel": 0.1}, {"abs": 0.1}, {"rel": 0.01, "abs": 0.1}, {"nan_ok": True}])
async def test_numbers_are_as_close_as_they_are_to_pytest(bounds: dict[str, Any]) -> None:
    numbers = (0.0, 5e-13, 2e-12, 0.05, 0.5, 1.0, 1.0 + 5e-7, 1.0 + 5e-6, 1.05, 1.5, 100, 101, 120, math.inf, math.nan)
    for found, expected in itertools.product(numbers, repeat=2):
        assert (found == inside_pytest.approx(expected, **bounds)) is (found == pytest.approx(expected, **bounds)), (
            found,
            expected,
        )


async def test_what_assertions_ask_first_is_asked_once_for_all_programs(
    score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Job] = []

    async def counted(executor: Executor, job: Job, stdin: bytes) -> Ran:
        runs.append(job)
        return await run_one(executor, job, stdin)

    monkeypatch.setattr(scripts, "run_one", counted)
    tests = "assert twice(1) == 2\nassert twice(3) == 6"
    assert await reward(score, "def twice(x): return 2 * x", tests) == 1.0
    assert len(runs) == 3
    assert await reward(score, "def twice(x): return x + 1", tests) == 0.5
    assert len(runs) == 5


async def test_files_of_the_sandbox_need_not_be_compiled_there(tmp_path: Path) -> None:
    job = Workplace(RewardSection()).inside_job(("values",), {}, math.inf)
    for name, content in job.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "values.py").write_text("raise ImportError('compiled here')")
    spec = importlib.util.spec_from_file_location("values_inside", tmp_path / "values.py")
    assert spec is not None
    assert spec.loader is not None
    values = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(values)
    assert values.encode((1,), None) == {"t": [1]}


async def test_a_program_that_does_not_load_fails_all_tests(score: Score) -> None:
    raising = "assert True\nimport pytest\ndef test_a():\n    with pytest.raises(ValueError):\n        even(3)"
    result = (await score("raise ValueError", raising)).scored
    assert result.total == pytest.approx(0.5), "a test that asks nothing of the program passes"
    assert "ValueError" in result.evidence
    uncompiled = (await score("def even(:", raising)).scored
    assert uncompiled.components["compiled"] == 0


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"test": "assert even("},
        {"test": "import numpy\nassert even(2)"},
        {"test": "x = 3"},
        {"truth": SUMS, "checker": "raise ValueError"},
        {"truth": SUMS, "language": "latin"},
        {"test": "assert even(2)", "language": "bash"},
    ],
)
async def test_tests_that_cannot_be_run_are_no_zero(score: Score, given: dict[str, Any]) -> None:
    truth = given.pop("truth", None)
    result = await score("def even(n): return True", truth, **given)
    assert result.WhichOneof("outcome") == "unscorable", result


CHECKER = "import sys\ngiven, _, found = (open(path).read() for path in sys.argv[1:])\n"
HALVES = "a, b = map(int, found.split())\nsys.exit(0 if a + b == int(given) else 1)"


async def test_a_checker_judges_what_is_not_equal(score: Score) -> None:
    sums = {"inputs": ["7", "8"], "outputs": ["0 7", "0 8"]}
    assert await reward(score, "print(3, 4)", sums, checker=CHECKER + HALVES) == 0.5
    printing = CHECKER + "print(float(sum(map(int, found.split())) == int(given)))"
    result = (await score("print(3, 4)", sums, checker=printing)).scored
    assert (result.total, "checker: 0.0" in result.evidence) == (0.5, True)


class Lost:
    """A sandbox that loses each program."""

    rung, missing, languages = 3, "", frozenset({"python", "native"})

    async def run_all(self, job: Job, inputs: Any, *, stop: Any = None) -> list[Ran]:
        return [Ran("infrastructure", reason="the sandbox is lost")] * len(inputs)

    async def close(self) -> None:
        return None


class Late(Lost):
    """A sandbox whose programs are not done by the deadline."""

    async def run_all(self, job: Job, inputs: Any, *, stop: Any = None) -> list[Ran]:
        await asyncio.sleep(job.deadline - time.monotonic())
        return [Ran("infrastructure", reason="the deadline has passed")] * len(inputs)


async def test_a_program_without_time_names_the_key_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(*_: Any, **__: Any) -> Late:
        return Late()

    monkeypatch.setattr("rollmesh.reward_service.code.workplace.open_executor", opened)
    section = RewardSection(scorer_timeout_s=0.5, code={"time_s": 0.3, "case_s": 0.2})
    result = await Code(section, "code", fraction=False)(RewardItem("i", "g", "s", "", ADD, SUMS))
    assert isinstance(result, Failed)
    assert (result.code, result.retryable) == ("sandbox", True)
    assert "0.45 s are nine tenths of reward.scorer_timeout_s" in result.message


async def test_what_the_infrastructure_did_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(*_: Any, **__: Any) -> Lost:
        return Lost()

    monkeypatch.setattr("rollmesh.reward_service.code.workplace.open_executor", opened)
    engine = make_engine()
    try:
        for given in (
            {"truth": SUMS},
            {"test": "assert even(2)"},
            {"truth": {**SUMS, "fn_name": "f", "inputs": [[1]] * 3}},
        ):
            result = await scoring(engine)(ADD, given.pop("truth", None), **given)
            assert (result.error.code, result.error.retryable) == ("sandbox", True), result
    finally:
        await engine.close()


async def test_without_a_turn_items_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.reward_service.code.scorer._SHARE", 0.0)
    engine = make_engine()
    try:
        result = await scoring(engine)(ADD, SUMS)
        assert (result.error.code, result.error.retryable) == ("not_begun", True), result
        assert "turn in the sandbox" in engine.present_wait().reason
    finally:
        await engine.close()


async def test_auto_counts_the_first_ten_cases_of_sources_of_programs(score: Score) -> None:
    twelve = {"inputs": ["1 1"] * 12, "outputs": ["2"] * 9 + ["3"] * 3}
    result = (await score(ADD, twelve, source="taco")).scored
    assert (result.total, result.components["cases"]) == (0.9, 10)
    assert await reward(score, ADD, twelve, source="apps", environment_reward={"won": 0.25}) == 0.25
    unknown = await score(ADD, twelve, source="TACO")
    assert "small letters" in unknown.error.message
    section = RewardSection(functions=["exact_match"])
    assert with_configured(section, section.functions, {})[1] == {}


async def test_programs_in_other_languages(score: Score) -> None:
    program = "```cpp\n#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }\n```"
    result = await score(program, SUMS, language="c++")
    if result.error.code == "no_sandbox":
        pytest.skip(result.error.message)
    assert result.scored.total == pytest.approx(2 / 3)
    failed = (await score(program.replace("int main", "int"), SUMS)).scored
    assert "error:" in failed.evidence
    assert failed.components["compiled"] == 0


async def test_the_demonstrations_answers_are_right(score: Score) -> None:
    for problem in itertools.islice(programs(), 40, 43):
        truth = problem.row(0, "train")["reward_model"]["ground_truth"]
        assert await reward(score, problem.answer, truth, source="all") == 1.0
        assert await reward(score, "print(1)", truth, source="all") == 0.0


GUESSES = """
import json, os, random, sys
guesses = {guesses}
rows = "".join(json.dumps([number, str(guess)]) + "\\n" for number in range(8) for guess in guesses)
for descriptor in range(3, 20):
    try:
        os.write(descriptor, rows.encode())
    except OSError:
        pass
"""


async def test_a_program_has_one_guess(score: Score) -> None:
    """Neither rows of its own in the batch's answer, nor one output among others and another alone, win a case."""
    for answers in (["yes"] * 8, ["yes", "no"] * 4):
        rows = {"inputs": ["x"] * 8, "outputs": answers}
        assert await reward(score, GUESSES.format(guesses=["yes", "no"]) + "print('?')", rows) == 0.0
        twice = "import sys\nprint('yes' if 'loading' in sys.modules else 'no')"
        assert await reward(score, twice, rows) == answers.count("no") / 8
    calls = {"inputs": [[1], [2], [3], [4]], "outputs": [1, 2, 3, 4], "fn_name": "f"}
    assert await reward(score, GUESSES.format(guesses=[1, 2, 3, 4]) + "def f(n): return 0", calls) == 0.0


async def test_an_output_that_a_checker_cannot_read_is_refused(score: Score) -> None:
    number = "import sys\nexpected, found = (float(open(path).read()) for path in sys.argv[2:])\n"
    for checker, output in (
        (number + "sys.exit(abs(expected - found) > 0.1)", "none"),
        (number + "print(1 - abs(expected - found))", "nan"),
        ("import sys\nfound = open(sys.argv[3]).read()\nif found != '2': sys.exit(f'wrong: {found}')", "Traceback"),
    ):
        assert await reward(score, f"print('{output}')", {"inputs": ["1"], "outputs": ["2"]}, checker=checker) == 0.0


@pytest.mark.parametrize(
    "program", ["def f(n): raise ImportError('numpy')", "def f(n): import numpy", "def f(n): return ValueError"]
)
async def test_no_answer_of_a_program_makes_its_tests_unscorable(score: Score, program: str) -> None:
    assert await reward(score, program, "from solution import f\ndef test_f():\n    assert f(f(1)) == 1") == 0.0


async def test_a_run_finds_nothing_of_an_earlier_one_in_memory_that_is_shared(score: Score) -> None:
    program = """
import ctypes, sys
frame = sys._getframe()
while "self" not in frame.f_locals: frame = frame.f_back
page = ctypes.addressof(ctypes.c_char.from_buffer(frame.f_locals["self"]._no_memory))
print(ctypes.string_at(page, 4096).strip(b"\\0"))
ctypes.memset(page + 1, 65, 4000)
"""
    for number in range(3):
        alone = {"inputs": ["", ""], "outputs": ["b''", "b''"]}
        assert await reward(score, f"{program}# {number}", alone) == 1.0
