"""The relay tree: each receiver has a parent, none waits for itself, failures end at the learner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.weights import relay_tree
from rollmesh.learner.weights.relay_tree import RelayTree, RelayTrees
from rollmesh.mesh.trajectory.versions import PolicyVersion


@dataclass
class Receiver:
    name: str
    relays: bool
    failed: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.name}:1" if self.relays else ""


def depth(parents: dict[str, str], name: str) -> int:
    """Steps to the learner; fails where there is no way."""
    steps = 1
    while parents[name]:
        name = parents[name].removesuffix(":1")
        steps += 1
        assert steps <= len(parents), "a cycle"
    return steps


@given(st.integers(1, 5), st.integers(1, 60))
def test_without_failures_the_levels_are_full(fanout: int, count: int) -> None:
    tree = RelayTree(fanout)
    parents = {f"g{i}": tree.route(f"g{i}", f"g{i}:1", []) for i in range(count)}
    children = list(parents.values())
    assert children.count("") == min(count, fanout)
    assert all(children.count(address) <= fanout for address in children)
    deepest = max(depth(parents, name) for name in parents)
    assert deepest <= (count if fanout == 1 else math.log(count, fanout) + 1)


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["come", "leaf", "fail", "again"]))))
def test_whatever_fails_everybody_gets_there(fanout: int, events: list[tuple[int, str]]) -> None:
    tree = RelayTree(fanout)
    receivers: dict[int, Receiver] = {}
    parents: dict[str, str] = {}
    for number, what in events:
        receiver = receivers.get(number)
        if receiver is None:
            receiver = receivers[number] = Receiver(f"g{number}", what != "leaf")
        elif what == "fail" and (parent := parents[receiver.name]):
            receiver.failed.append(parent)
        else:
            receiver.failed.clear()
        again = receiver.name in parents and not receiver.failed
        given_address = parents[receiver.name] = tree.route(receiver.name, receiver.address, receiver.failed)
        assert given_address not in receiver.failed
        assert given_address in {"", *(r.address for r in receivers.values() if r is not receiver)}
        assert not again or given_address == ""
        assert len(receiver.failed) < 2 or given_address == ""
        for name in parents:
            depth(parents, name)
        assert all(list(parents.values()).count(r.address) <= fanout for r in receivers.values() if r.relays)


def test_a_relay_that_failed_one_is_given_to_no_one_else() -> None:
    tree = RelayTree(1)
    assert tree.route("a", "a:1", []) == ""
    assert tree.route("b", "b:1", []) == "a:1"
    assert tree.route("c", "c:1", []) == "b:1"
    # b is below the one that failed, and c below b: neither serves the other's parent.
    assert tree.route("b", "b:1", ["a:1"]) == ""
    assert tree.route("d", "d:1", []) == "c:1"


def test_full_bytes_and_links_have_trees_of_their_own() -> None:
    trees = RelayTrees(1)
    one, two = PolicyVersion(1, 1), PolicyVersion(1, 2)
    assert trees.tree_of(two, None).route("a", "a:1", []) == ""
    assert trees.tree_of(two, one).route("b", "b:1", []) == ""
    assert trees.tree_of(two, None).route("c", "c:1", []) == "a:1"
    assert trees.tree_of(two, one).route("d", "d:1", []) == "b:1"


def test_the_trees_of_the_newest_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_tree, "_KEPT", 2)
    trees = RelayTrees(1)
    zero, one, two = (trees.tree_of(PolicyVersion(1, version), None) for version in (0, 1, 0))
    assert two is zero, "two have room"
    trees.tree_of(PolicyVersion(1, 2), None)
    assert trees.tree_of(PolicyVersion(1, 0), None) is zero, "requested after version 1"
    assert trees.tree_of(PolicyVersion(1, 1), None) is not one


def test_no_one_comes_below_itself_by_another_name() -> None:
    tree = RelayTree(1)
    assert tree.route("before", "a:1", []) == ""
    # The same receiver after a restart.
    assert tree.route("after", "a:1", []) == ""
    tree = RelayTree(1)
    assert tree.route("before", "a:1", []) == ""
    assert tree.route("b", "b:1", []) == "a:1"
    assert tree.route("after", "a:1", []) == ""


def test_a_tree_has_room_for_a_run_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_tree, "_NODES", 3)
    tree = RelayTree(1)
    given = [tree.route(f"g{i}", f"g{i}:1", []) for i in range(5)]
    assert given == ["", "g0:1", "g1:1", "", ""]
    assert len(tree._nodes) == 3
    # A receiver that has a place keeps it.
    assert tree.route("g1", "g1:1", ["g0:1"]) == ""


def test_placing_thousands_costs_each_its_way_to_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    walk = relay_tree._Node.path_to_root

    def counted(node: relay_tree._Node) -> Iterator[relay_tree._Node]:
        nonlocal steps
        for above in walk(node):
            steps += 1
            yield above

    monkeypatch.setattr(relay_tree._Node, "path_to_root", counted)
    tree, count = RelayTree(2), 5000
    parents = {f"g{i}": tree.route(f"g{i}", f"g{i}:1", []) for i in range(count)}
    deepest = max(depth(parents, f"g{i}") for i in range(count - 100, count))
    assert deepest <= math.log2(count) + 1
    assert steps <= 2 * count * deepest, "its own depth, and that of its parent"
