"""CPU time of tests by folder."""

from __future__ import annotations

import pytest

from tests.cpu_time import folder_of


@pytest.mark.parametrize(
    ("nodeid", "folder"),
    [
        ("tests/learner/engines/megatron/test_a.py::test_x[a/b]", "tests/learner/engines"),
        ("tests/buffer/test_a.py::TestY::test_x", "tests/buffer"),
        ("tests/test_a.py::test_x", "tests"),
    ],
)
def test_a_test_counts_for_the_folder_of_its_package(nodeid: str, folder: str) -> None:
    assert folder_of(nodeid) == folder
