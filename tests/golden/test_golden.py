"""Every recorded case, at its own tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.case import Case, read_manifest
from tests.golden.compare import check, read_exceptions

CASES = read_manifest(Path(__file__).parent / "data" / "manifest.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_agrees_with_the_recorded_numbers(case: Case):
    verdict = check(case, read_exceptions())
    assert not verdict.mismatches, verdict.mismatches
