"""Each rule of the contract taken away in turn: something must notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import buffer.redis_access
from buffer.scripts import Script, load_scripts
from mesh.errors import StoreError
from tests.buffer.both_machines import BothMachines
from tests.buffer.rules import COMPARED, Rule, documented, without
from tests.buffer.walks import random_walk

# Walks after which a missing rule would have gone unnoticed. Most are seen in the first.
WALKS = 40


@pytest.mark.parametrize("rule", COMPARED, ids=lambda rule: rule.name.replace(" ", "_"))
def test_scripts_without_a_rule_differ_from_the_machine(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    def loaded(*arguments: Any, **options: Any) -> dict[str, Script]:
        return without(rule, load_scripts(*arguments, **options))

    monkeypatch.setattr(buffer.redis_access, "load_scripts", loaded)
    BothMachines.url = redis_url
    for seed in range(WALKS):
        try:
            random_walk(seed, 150, compare_every=6)
        except (AssertionError, StoreError, LookupError, TypeError):
            return
    pytest.fail(f"nothing noticed that this rule was missing: {rule.name}")


def test_the_rules_are_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "buffer.md").read_text(encoding="utf-8")
    assert documented() in page, f"put this between the marks of docs/buffer.md:\n{documented()}"
