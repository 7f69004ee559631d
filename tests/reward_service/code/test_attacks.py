"""Programs that try to be rewarded for nothing, and what the tests show them."""

from __future__ import annotations

import pytest

from tests.reward_service.code.conftest import Score, reward

pytestmark = pytest.mark.asyncio(loop_scope="package")

TRUE = """
class True_:
    def __eq__(self, other): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __mul__ = __sub__
    def __abs__(self): return 0
    def __contains__(self, other): return True
    def __instancecheck__(self, other): return True
    def __len__(self): return 3
    def __hash__(self): return 0
"""
FORGED = [
    TRUE + "def add(a, b): return True_()",
    TRUE + "class Int(int):\n    __eq__ = __ne__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
    "def add(a, b): return Int(0)",
    "import sys\ndef add(a, b): sys.exit(0)",
    "import sys\nsys.exit(0)",
    "import os\ndef add(a, b): os._exit(0)",
    "import os\nos._exit(0)",
    "import builtins\nbuiltins.isinstance = lambda *_: True\nbuiltins.abs = lambda _: 0\nbuiltins.len = lambda _: 3\n"
    "def add(a, b): return 0",
    "print('1 passed')\nprint('{\"loaded\": true}')\ndef add(a, b): print('OK'); return None",
    "import os\nfor fd in range(3, 20):\n"
    "    try: os.write(fd, b'{\"loaded\": true}\\n3\\n')\n    except OSError: pass\n"
    "def add(a, b): return 0",
    "import json\njson.dumps = lambda *_, **__: '3'\njson.loads = lambda *_, **__: {'ops': []}\n"
    "def add(a, b): return 0",
    "import sys\nsys.modules['pytest'] = sys.modules['runner'] = None\ndef add(a, b): raise AssertionError",
    "def add(a, b): raise BaseException",
    "import sys\nframe = sys._getframe()\nwhile frame: frame.f_globals.update(passed=True); frame = frame.f_back\n"
    "def add(a, b): return frame",
    "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): return [3]",
    "def add(a, b): return (lambda: 3)",
    "def add(a, b):\n    a = []\n    a.append(a)\n    return a",
    "def add(a, b): return float('nan')",
]
ASSERTIONS = (
    "assert add(1, 2) == 3\nassert abs(add(1, 2) - 3) < 1e-6\nassert 3 == add(1, 2)\nassert add(1, 2) in (3, 4)\n"
    "assert isinstance(add(1, 2), int) and add(1, 2) > 2 and add(1, 2) - 3 <= 0\nassert not add(1, 2) != 3\n"
    "assert str(add(1, 2)) == '3'\nassert [add(1, 2)] == [3]\nassert {add(1, 2)} == {3}"
)


@pytest.mark.parametrize("program", FORGED)
async def test_no_assertion_is_won(score: Score, program: str) -> None:
    assert await reward(score, program, ASSERTIONS) == 0.0


@pytest.mark.parametrize("program", FORGED)
async def test_no_call_is_won(score: Score, program: str) -> None:
    cases = {"inputs": [[1, 2], [3, 4]], "outputs": [7, 8], "fn_name": "add"}
    assert await reward(score, program, cases) == 0.0


async def test_what_is_expected_is_nowhere_near_the_program(score: Score) -> None:
    """Its memory, its files and its standard input hold arguments, and no results."""
    looks = (
        "import gc, os, sys\n"
        "seen = sys.stdin.read()\n"
        "for folder, _, names in os.walk('.'):\n"
        "    for name in names: seen += open(os.path.join(folder, name), errors='replace').read()\n"
        "seen += repr([each for each in gc.get_objects() if isinstance(each, (dict, list))])\n"
        "answer = 'found' if str(7351 * 10 + 9) in seen else 'no'\n"
    )
    result = await score(looks + "print(answer)", {"inputs": ["1"], "outputs": ["73519"]})
    assert "output: no" in result.scored.evidence
    calls = looks.replace("sys.stdin.read()", "''") + "def f(x): return answer"
    result = await score(calls, {"inputs": [[1]], "outputs": [73519], "fn_name": "f"})
    assert 'result: "no"' in result.scored.evidence
    assert await reward(score, calls, "assert f(1) == 'no' and 73519") == 1.0


async def test_a_shared_process_is_told(score: Score) -> None:
    apply = "def apply(f, x): return f(x)"
    result = (await score(apply, "assert apply(lambda x: x + 1, 2) == 3")).scored
    assert (result.total, result.components["same_process"]) == (1.0, 1)
    tests = "assert apply(lambda x: x + 1, 2) == 3\nassert apply(abs, -2) == 2"
    for program in (
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "def apply(f, x): import os; print('passed'); os._exit(0)",
        "def apply(f, x): raise SystemExit(0)",
    ):
        assert await reward(score, program, tests) == 0.0
    # The program does not choose the way by what it gives back.
    result = (await score(TRUE + "def add(a, b): return True_()", "assert add(1, 2) == 3")).scored
    assert (result.total, "same_process" in result.components) == (0.0, False)


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        # Other answers each time, which change what is asked next.
        ("import time\ndef f(x): return time.perf_counter_ns()", "y = f(5)\nassert f(y + 1) == 5"),
        # An answer for which the tests ask without end.
        (
            "def f(x): return list(range(30_000)) if x == 5 else 0",
            "for y in f(5):\n    assert f(y) == 0\nassert f(6) == 1",
        ),
    ],
)
async def test_no_answer_makes_its_row_unscorable(score: Score, program: str, tests: str) -> None:
    assert await reward(score, program, tests) == 0.0
