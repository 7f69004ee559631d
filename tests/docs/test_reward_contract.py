"""The page about the reward contract has each field of it, with the version that it came with."""

from __future__ import annotations

import re

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.function_kind import WANTS, FunctionKind
from rollmesh.reward_service.loading import load_function
from rollmesh.reward_service.outcomes import RewardItem, Scored
from rollmesh.reward_service.server.stream import MOST_OPEN
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "reward-contract.md").read_text()
# A message's name at the beginning of a row, and the table after it.
TABLES = {
    name: re.findall(r"^\| `(\w+)` \| (1\.\d) \|", table, re.MULTILINE)
    for name, table in re.findall(r"^`(\w+)`[^\n]*:\n\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
}
# Fields of 1.0 by message; all others came with 1.1.
FIRST = {
    "ScoreRequest": 1,
    "ScoreItem": 8,
    "ScoreResponse": 1,
    "ScoreResult": 4,
    "Scored": 3,
    "Unscorable": 1,
    "Error": 3,
    "InfoResponse": 3,
}


def test_each_message_has_its_table_with_all_fields_in_their_order() -> None:
    messages = {
        name: message for name, message in reward_pb2.DESCRIPTOR.message_types_by_name.items() if message.fields
    }
    assert TABLES.keys() == messages.keys()
    for name, message in messages.items():
        fields = sorted(message.fields, key=lambda field: field.number)
        expected = [(field.name, "1.0" if field.number <= FIRST.get(name, 0) else "1.1") for field in fields]
        assert TABLES[name] == expected, name


def test_the_list_of_changes_names_what_came_with_1_1() -> None:
    changes = PAGE[PAGE.index("\n## Changes") :]
    for name in ("ScoreItem", "Scored", "Error", "InfoResponse"):
        for field, version in TABLES[name]:
            assert (f"`{field}`" in changes) == (version == "1.1"), field


def test_all_calls_are_named() -> None:
    calls = re.findall(r"^\| `(\w+)` \| (?!1\.)", PAGE, re.MULTILINE)
    assert set(calls) == {method.name for method in reward_pb2.DESCRIPTOR.services_by_name["Reward"].methods}
    assert f"{MOST_OPEN:,} items" in PAGE


def test_the_example_is_a_function_as_the_page_says() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)  # the page's own example
    function = load_function(names["steps"])  # type: ignore[arg-type]
    assert function.kind == FunctionKind(True, False, (), deterministic=True, needs_group=False)
    item = RewardItem("i", "g", "", "", "One.\nand\nTwo.")
    assert function.score([item]) == [Scored(0.0, spans=[(0, 5, 0.1), (9, 13, 0.1)], evidence="2 lines")]
    assert all(f'"{want}"' in code for want in WANTS)
