"""Programs of responses, tests of rows, and comparisons."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from rollmesh.learner.evaluation.measurement_identity import reward_measurement
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.reward_service.code import rows
from rollmesh.reward_service.code.comparing import same_text, same_value
from rollmesh.reward_service.code.imports import with_imports
from rollmesh.reward_service.code.programs import Program, program_of
from rollmesh.reward_service.code.rows import Calls, Script, Tests, Texts
from rollmesh.reward_service.code.verdicts import SandboxError, trouble
from rollmesh.reward_service.outcomes import RewardItem
from rollmesh.reward_service.sandbox.interface import Ran

NAMES = {"python": "python", "py": "python", "cpp": "cpp", "c++": "cpp", "bash": "bash"}


@pytest.mark.parametrize(
    ("response", "wanted", "program"),
    [
        ("print(1)", None, ("python", "print(1)")),
        ("a ```python\nx\n``` b ```py\ny\n``` c", None, ("python", "y\n")),
        ("```\nx\n```", None, ("python", "x\n")),
        ("```C++\nx\n```", None, ("cpp", "x\n")),
        ("```cpp\nx\n```\nprints\n```text\n3\n```", None, ("cpp", "x\n")),
        ("```cpp\nx\n```\n```python\ny\n```", "cpp", ("cpp", "x\n")),
        ("```python\nx\n```", "c++", ("cpp", "x\n")),
        ("thoughts ```python\nx\n", None, ("python", "x\n")),
        ("```print(1)```", None, ("python", "print(1)")),
        ("```python print(1)```", None, ("python", "print(1)")),
        ("```{.python}\nx\n```", None, ("python", "x\n")),
        ("", None, ("python", "")),
    ],
)
def test_the_program_is_the_last_block(response: str, wanted: str | None, program: tuple[str, str]) -> None:
    assert program_of(response, wanted, lambda name: NAMES.get(name.lower())) == Program(*program)


def test_a_language_of_a_row_is_known() -> None:
    with pytest.raises(ValueError, match="'brainfuck'"):
        program_of("x", "brainfuck", NAMES.get)


def read(truth: Any = None, **extra_info: Any) -> Tests:
    return rows.tests_of(RewardItem("i", "g", "s", "", "", truth, extra_info))


PAIRS = {"inputs": ["1\n"], "outputs": ["2\n"]}
CALL = {"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "f"}
FUNCTIONAL = [{"input": "[1]\n2", "output": "3", "testtype": "functional"}]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (read(PAIRS), Texts([("1\n", "2\n")])),
        (read(json.dumps(PAIRS)), Texts([("1\n", "2\n")])),
        (read(input_output=json.dumps(PAIRS)), Texts([("1\n", "2\n")])),
        (read("the reference solution", input_output=PAIRS), Texts([("1\n", "2\n")])),
        (read({"inputs": [["1", "2"]], "outputs": [["3"]]}), Texts([("1\n2", "3")])),
        (read(PAIRS, checker="exit()"), Texts([("1\n", "2\n")], "exit()")),
        (read(CALL), Calls("f", [([1, [2]], [3])], wrapped=True)),
        (read({"inputs": ["1\n[2]"], "outputs": ["3"], "fn_name": "f"}), Calls("f", [([1, [2]], 3)], wrapped=True)),
        (read([{"input": "1", "output": "2", "testtype": "stdin"}]), Texts([("1", "2")])),
        (read(FUNCTIONAL, metadata='{"func_name": "f"}'), Calls("f", [([[1], 2], 3)])),
        (
            read(public_test_cases=json.dumps(FUNCTIONAL), private_test_cases=FUNCTIONAL, fn_name="f"),
            Calls("f", [([[1], 2], 3), ([[1], 2], 3)]),
        ),
        (read(["assert f(1)", "assert f(2)"]), Script("", ["assert f(1)", "assert f(2)"])),
        (
            read(test_list=["assert f(1)"], test_setup_code="import re"),
            Script("import re", ["assert f(1)"]),
        ),
        (read({"assert_case": ["assert f(1)"]}), Script("", ["assert f(1)"])),
        (read(test="def check(c): ...", entry_point="f"), Script("", ["def check(c): ..."], "f")),
        (read("def test_f(): assert f()"), Script("", ["def test_f(): assert f()"])),
    ],
)
def test_the_forms_of_published_rows(found: Tests, expected: Tests) -> None:
    assert found == expected


PICKLED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(FUNCTIONAL)))).decode()


@pytest.mark.parametrize(
    ("truth", "extra_info", "message"),
    [
        (None, {}, "has no tests"),
        ("42", {}, "has no tests"),
        ({"inputs": ["1"], "outputs": []}, {}, "1 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, {}, "lists of arguments"),
        (FUNCTIONAL, {}, "function's name"),
        ([*FUNCTIONAL, {"input": "1", "output": "2", "testtype": "stdin"}], {}, "all are stdin"),
        ([{"input": "1"}], {}, "needs input and output"),
        (None, {"private_test_cases": PICKLED}, "pickled tests are not read"),
        (None, {"input_output": "{"}, "not JSON"),
        (PAIRS, {"checker": "#include <testlib.h>"}, "testlib"),
    ],
)
def test_rows_that_cannot_be_read_say_why(truth: Any, extra_info: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(truth, **extra_info)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3", "1  2 \r\n\n3\n", True),
        ("1\n2", "1 2", False),
        ("3.0", "3", True),
        ("3", "3.000", True),
        ("0.3333333", "0.33333332", True),
        ("0.3334", "0.3333", False),
        ("1000000007", "1000000006", False),
        ("007", "7", True),
        ("1e3", "1000.0", True),
        ("nan", "0.0", False),
        ("YES", "yes", False),
        ("9" * 10_000, "9" * 9_999 + "8", False),
        ("1e9999", "1.5", False),
        ("", "0", False),
    ],
)
def test_texts(found: str, expected: str, same: bool) -> None:
    assert same_text(found, expected) is same


DEEP: Any = json.loads("[" * 100 + "]" * 100)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1, [2.0]], [1, [2]], True),
        (0.1 + 0.2, 0.3, True),
        (1, 1.0000001, True),
        (2, 1, False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1], 1, False),
        (10**400, 0.5, False),
        (True, False, False),
        ("1", 1, False),
        (None, None, True),
        (DEEP, DEEP, True),
    ],
)
def test_values(found: Any, expected: Any, same: bool) -> None:
    assert same_value(found, expected) is same


def test_only_what_a_program_names_is_imported() -> None:
    assert with_imports("print(1)") == "print(1)"
    assert with_imports("x: List = heapq.nlargest") == (
        "from typing import List; import heapq; from heapq import nlargest\nx: List = heapq.nlargest"
    )
    future = "'''text'''\nfrom __future__ import annotations\nx = inf"
    assert with_imports(future) == "'''text'''\nfrom __future__ import annotations; from math import inf\nx = inf"


def test_limits_of_programs_count_where_programs_are_run() -> None:
    assert not [key for key in reward_measurement(RewardSection(), ["auto"]) if "code" in key]
    some, other = (RewardSection(code={"cases": cases}) for cases in (1, 2))  # type: ignore[arg-type]  # as of a file
    assert reward_measurement(some, ["code"]) != reward_measurement(other, ["code"])
    with pytest.raises(ValueError, match="deadlines must nest"):
        RewardSection(functions=["code"], scorer_timeout_s=4.0)
    with pytest.raises(ValueError, match="more than time_s"):
        RewardSection(code={"case_s": 5.0})  # type: ignore[arg-type]


def test_who_is_to_blame_for_an_end() -> None:
    assert trouble(Ran("exit", 0), 1.0) == ""
    assert "exit code 3" in trouble(Ran("exit", 3), 1.0)
    assert "waited" in trouble(Ran("wall", 9, cpu_s=0.01), 8.0)
    for stalled_s in (None, 3.0):
        with pytest.raises(SandboxError, match="too busy"):
            trouble(Ran("wall", 9, cpu_s=2.0, stalled_s=stalled_s), 8.0)
    # It sleeps and looks and sleeps, on a host that has processors for it.
    assert "waited" in trouble(Ran("wall", 9, cpu_s=2.0, stalled_s=0.3), 8.0)
    with pytest.raises(SandboxError, match="lost"):
        trouble(Ran("infrastructure", reason="lost"), 8.0)
