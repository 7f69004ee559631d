"""The account of a run, its budget, and the page about all tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.repository import REPOSITORY
from tests.suite.budget import overspent, read_budget
from tests.suite.page import page
from tests.suite.results import Results, Usage, folder_of
from tests.suite.summary import account

_SLOW, _QUICK = "tests/buffer/test_a.py::test_slow", "tests/buffer/test_a.py::test_quick"
_FOUND = Results(
    outcomes=Counter(passed=2, skipped=1),
    skipped=Counter({"vllm is not installed": 1}),
    left_out=Counter({"need a CUDA device": 576}),
    folders={"tests/buffer": Usage(2, 31.0, 40.0)},
    tests={_SLOW: 30.0, _QUICK: 1.0},
    collection_cpu_s=4.0,
    seconds=90.0,
)


_BUDGET = {"tests/buffer": 40.0, "tests/mesh": 30.0, "tests/learner": 20.0, "tests/code": 2.0, "starts": 80.0}


@pytest.mark.parametrize(
    ("used", "overspending"),
    [
        ((40.0, 30.0, 20.0, 2.0), []),
        ((60.0, 45.0, 20.0, 12.0), []),
        ((61.0, 30.0, 20.0, 12.1), ["tests/buffer", "tests/code"]),
        # A machine that needs twice the time for everything, and one on which a folder needs four times as much.
        ((80.0, 60.0, 40.0, 4.0), []),
        ((80.0, 120.0, 40.0, 4.0), ["tests/mesh"]),
        ((20.0, 15.0, 31.0, 1.0), ["tests/learner"]),
    ],
)
def test_a_folder_may_use_half_as_much_again_as_its_budget(used: tuple[float, ...], overspending: list[str]) -> None:
    folders = [folder for folder in _BUDGET if folder != "starts"]
    found = Results(folders={folder: Usage(1, seconds, 0.0) for folder, seconds in zip(folders, used, strict=True)})
    assert [line.split()[0] for line in overspent(found, _BUDGET)] == overspending


def test_a_folder_without_a_budget_is_named() -> None:
    assert overspent(_FOUND, {"starts": 1.0}) == ["tests/buffer has no budget: it used 31.0 CPU s"]


def test_starts_of_what_tests_share_have_a_budget_too() -> None:
    (line,) = overspent(Results(starts_cpu_s=130.0), {"starts": 80.0})
    assert line == "starts used 130.0 CPU s, its budget is 80."


def test_the_slowest_tests_of_a_folder_that_overspends_are_named() -> None:
    first, *rest = overspent(_FOUND, {"tests/buffer": 5.0, "starts": 1.0})
    assert first.startswith("tests/buffer used 31.0 CPU s, its budget is 5.")
    assert [line.split()[-1] for line in rest] == [_SLOW, _QUICK]


def test_records_of_several_calls_are_added_up(tmp_path: Path) -> None:
    for name in ("mesh", "engines"):
        _FOUND.write(tmp_path / f"{name}.json")
    both = Results.read(sorted(tmp_path.iterdir()))
    assert both.folders == {"tests/buffer": Usage(4, 62.0, 80.0)}
    assert both.cpu_s == 70.0
    assert both.seconds == 90.0
    lines = list(account(both))
    assert "tests: 4 passed, 0 failed, 2 skipped" in lines
    assert "skipped: 2 (vllm is not installed)" in lines
    assert "not run: 1152 (need a CUDA device)" in lines


def test_every_folder_with_tests_has_a_budget() -> None:
    files = (str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert read_budget().keys() == {folder_of(file) for file in files} | {"starts"}


def test_the_page_names_commit_and_day() -> None:
    assert "has not passed as a whole yet" in page(Results(), commit="", day="")
    text = page(_FOUND, commit="Commit 1234abcd", day="2026-01-31")
    assert "Commit 1234abcd passed `make test-all` on 2026-01-31: 2 tests in 2 minutes and 35 CPU seconds" in text
    assert "- 1: vllm is not installed\n- 576: need a CUDA device" in text
    assert "| `tests/buffer` | 2 | 31 |" in text
