"""The tests of a row, in the forms of published datasets. Pure.

They stand in the ground truth or in `extra_info`, as JSON or as its text:

* verl, PRIME, APPS, TACO: `{"inputs": [...], "outputs": [...], "fn_name"}`, also in `input_output`;
* LiveCodeBench: `[{"input", "output", "testtype"}]`, also as `public_test_cases` and `private_test_cases`;
* MBPP and others: `test_list` with `test_setup_code`, `assert_case`, or a list of assertions;
* HumanEval: `test` with `entry_point`; KodCode: a file for pytest in `test`, `test_code` or the ground truth.

Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.reward_service.outcomes import RewardItem

_SCRIPTS = ("test", "test_code", "tests_code")
_LISTS = ("test_list", "assert_case", "asserts")
_CASES = ("test_cases", "tests")


@dataclass(frozen=True, slots=True)
class Texts:
    """Standard input and expected standard output of each case; `checker`: source of a program that judges instead."""

    cases: Sequence[tuple[str, str]]
    checker: str = ""
    checker_language: str = ""


@dataclass(frozen=True, slots=True)
class Calls:
    """Arguments and expected result of each call of a function.

    Attributes:
        function: its name; a method of `Solution` where the program has such a class.
        cases: arguments, and the result.
        wrapped: an expected list may also hold the result as its only entry (APPS).
    """

    function: str
    cases: Sequence[tuple[Sequence[Any], Any]]
    wrapped: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """Python code that tests the program.

    Attributes:
        setup: runs first.
        parts: sources; each of several is a case of its own. One alone is a file with one case for each of its
            assertions and test functions.
        entry_point: name of the function that `check` gets; empty without such a function.
    """

    setup: str
    parts: Sequence[str]
    entry_point: str = ""


Tests = Texts | Calls | Script


def tests_of(item: RewardItem) -> Tests:
    """The tests of an item's row.

    Raises:
        ValueError: it has none that can be read; the message is for people.
    """
    truth, info = item.ground_truth, item.extra_info
    if isinstance(truth, str):
        truth = _json(truth, truth)
    for fields in (truth, info):
        if isinstance(fields, Mapping) and (found := _of_fields(fields, {**info, **fields})) is not None:
            return found
    if isinstance(truth, list) and truth:
        return _of_list(truth, info)
    if isinstance(truth, str) and ("assert" in truth or "def test" in truth or "def check" in truth):
        return Script(_setup(info), [truth], str(info.get("entry_point") or ""))
    raise ValueError(
        "the row has no tests: give inputs and outputs, input_output, test_cases, test_list, or test with entry_point"
    )


def _of_fields(fields: Mapping[str, Any], all_fields: Mapping[str, Any]) -> Tests | None:
    if (nested := fields.get("input_output")) not in (None, ""):
        nested = _json(nested) if isinstance(nested, str) else nested
        if not isinstance(nested, Mapping):
            raise ValueError("input_output is no object")
        return _of_fields(nested, {**all_fields, **nested})
    inputs, outputs = fields.get("inputs", fields.get("input")), fields.get("outputs", fields.get("output"))
    if isinstance(inputs, list) and isinstance(outputs, list):
        return _of_pairs(inputs, outputs, all_fields)
    lists = [_listed(fields[name], name) for name in ("public_test_cases", "private_test_cases") if fields.get(name)]
    lists = lists or [_listed(fields[name], name) for name in _CASES if fields.get(name)]
    if lists:
        return _of_list([case for cases in lists for case in cases], all_fields)
    for name in _LISTS:
        if fields.get(name):
            return _of_list(_listed(fields[name], name), all_fields)
    for name in _SCRIPTS:
        if isinstance(fields.get(name), str) and fields[name].strip():
            return Script(_setup(all_fields), [fields[name]], str(all_fields.get("entry_point") or ""))
    return None


def _of_pairs(inputs: list[Any], outputs: list[Any], fields: Mapping[str, Any]) -> Tests:
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs: as many of both are needed, one at least")
    function = _function(fields)
    if not function:
        return _texts(zip(inputs, outputs, strict=True), fields)
    calls = []
    for given, expected in zip(inputs, outputs, strict=True):
        if isinstance(given, str):
            calls.append((_json_rows(given), _json(expected) if isinstance(expected, str) else expected))
        elif isinstance(given, list):
            calls.append((given, expected))
        else:
            raise ValueError("the inputs of a function are lists of arguments, or rows of JSON")
    return Calls(function, calls, wrapped=True)


def _of_list(cases: list[Any], fields: Mapping[str, Any]) -> Tests:
    if all(isinstance(case, str) for case in cases):
        if not cases:
            raise ValueError("the list of tests is empty")
        return Script(_setup(fields), cases, str(fields.get("entry_point") or ""))
    if not all(isinstance(case, Mapping) and "input" in case and "output" in case for case in cases):
        raise ValueError("each test case needs input and output, or is an assertion")
    kinds = {str(case.get("testtype", case.get("type", "stdin"))) for case in cases}
    if kinds <= {"stdin", "stdin_stdout"}:
        return _texts(((case["input"], case["output"]) for case in cases), fields)
    if not kinds <= {"functional", "function_call"}:
        raise ValueError(f"test cases of kinds {', '.join(sorted(kinds))}: all are stdin, or all are functional")
    function = _function({**fields, **cases[0]})
    if not function:
        raise ValueError("functional test cases need the function's name: fn_name, or func_name in metadata")
    calls = []
    for case in cases:
        given, expected = case["input"], case["output"]
        arguments = _json_rows(given) if isinstance(given, str) else given
        if not isinstance(arguments, list):
            raise ValueError("the input of a functional test case is a list of arguments, or rows of JSON")
        calls.append((arguments, _json(expected) if isinstance(expected, str) else expected))
    return Calls(function, calls)


def _texts(pairs: Iterable[tuple[Any, Any]], fields: Mapping[str, Any]) -> Texts:
    cases = [(_text(given), _text(expected)) for given, expected in pairs]
    checker = fields.get("checker") or ""
    if not isinstance(checker, str):
        raise ValueError("checker is the source of a program")
    if "testlib.h" in checker:
        raise ValueError("the checker needs testlib.h, which is not here: give one that includes standard headers")
    return Texts(cases, checker, str(fields.get("checker_language") or ""))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _function(fields: Mapping[str, Any]) -> str:
    metadata = fields.get("metadata")
    if isinstance(metadata, str) and metadata:
        metadata = _json(metadata, None)
    named = fields.get("fn_name") or fields.get("func_name")
    return str(named or (metadata.get("func_name") if isinstance(metadata, Mapping) else None) or "")


def _setup(fields: Mapping[str, Any]) -> str:
    imports = fields.get("test_imports") or []
    lines = [imports] if isinstance(imports, str) else [str(line) for line in imports]
    return "\n".join(filter(None, [*lines, str(fields.get("test_setup_code") or "")]))


def _listed(value: Any, name: str) -> list[Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON; compressed or pickled tests are not read: {error}") from error
    if not isinstance(found, list):
        raise ValueError(f"{name} is no list")
    return found


_NEEDED = object()


def _json(text: str, otherwise: Any = _NEEDED) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if otherwise is not _NEEDED:
            return otherwise
        raise ValueError(f"{text[:80]!r} is not JSON: {error}") from error


def _json_rows(text: str) -> list[Any]:
    return [_json(row) for row in text.split("\n") if row.strip()]
