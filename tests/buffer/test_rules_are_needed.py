"""Each rule of the contract taken away in turn: something must notice."""

from __future__ import annotations

from typing import Any

import pytest

import buffer.redis_access
from buffer.scripts import Script, load_scripts
from mesh.errors import StoreError
from tests.buffer.rules import COMPARED, Rule, without
from tests.buffer.test_machine_against_lua import BothMachines, random_walk

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
            random_walk(seed, 150)
        except (AssertionError, StoreError):
            return
    pytest.fail(f"nothing noticed that this rule was missing: {rule.name}")
