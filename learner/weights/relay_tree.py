"""The relay tree, along which receivers fetch a version from one another; its root is the learner.

Invariants:

- Following parents leads from every receiver to the learner: there are no cycles, whichever receivers fail or move.
- While no receiver fails, the learner and each relay have at most `fanout` children. Receivers that all relay lie in
  full levels: n of them are no deeper than log_fanout(n) + 1.
- A receiver comes to the learner itself after `_PATIENCE` parents that failed it, or when it starts again, whatever
  room there is. Failures cost the learner's link, never the version.
- A receiver is placed in O(log n), and moves, after a failure, at the cost of those below it.

Pure: no clock, no I/O; one caller at a time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from rollmesh.mesh.trajectory.versions import PolicyVersion

# Parents that may fail a receiver before it is sent to the learner.
_PATIENCE = 2
# Trees kept: those of the newest requests.
_KEPT = 64
# Receivers of a tree, twice the members that a run may have: some start again. Further ones come to the learner.
_NODES = 12288


@dataclass(slots=True, eq=False)
class _Node:
    """A receiver; `parent` None is the learner. Older ones have smaller numbers."""

    number: int
    address: str
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)
    failed: bool = False

    def with_all_below(self) -> Iterator[_Node]:
        """Itself, its children, and so on down to the last ones."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            waiting += node.children
            yield node

    def path_to_root(self) -> Iterator[_Node]:
        """Itself, its parent, and so on up to a child of the learner."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent


class RelayTree:
    """The receivers of one set of bytes.

    Args:
        fanout: children that the learner, and each relay, should have at most.
    """

    def __init__(self, fanout: int) -> None:
        self._fanout = fanout
        # Receivers that were sent to the learner itself.
        self._uploads = 0
        self._nodes: dict[str, _Node] = {}
        self._by_address: defaultdict[str, list[_Node]] = defaultdict(list)
        # Relays with room, as (depth, number, relay). Some have none any more, or are at another depth by now.
        self._places: list[tuple[int, int, _Node]] = []

    def route(self, member_id: str, address: str, failed: Collection[str]) -> str:
        """Gives a receiver its parent.

        Args:
            member_id: of the receiver.
            address: where it serves others; empty where it does not.
            failed: addresses that failed it.

        Returns:
            The parent's address; empty for the learner.
        """
        for broken in failed:
            for node in self._by_address.get(broken, ()):
                node.failed = True
        known = self._nodes.get(member_id)
        if known is None and len(self._nodes) >= _NODES:
            self._uploads += 1
            return ""
        if known is None:
            node = self._nodes[member_id] = _Node(len(self._nodes), address, None)
            self._by_address[address].append(node)
            exhausted = len(failed) >= _PATIENCE
        else:
            node = known
            # A receiver that names no failure starts again: its former parent did not help it.
            exhausted = len(failed) >= _PATIENCE or not failed
            self._detach(node)
            self._by_address[node.address].remove(node)
            self._by_address[address].append(node)
            node.address = address
        parent = None if exhausted else self._find_parent(node, failed)
        node.parent = parent
        if parent is None:
            self._uploads += 1
        else:
            parent.children.append(node)
        for moved in node.with_all_below():
            self._offer(moved)
        return "" if parent is None else parent.address

    def _detach(self, node: _Node) -> None:
        if node.parent is not None:
            node.parent.children.remove(node)
            self._offer(node.parent)
            node.parent = None

    def _find_parent(self, node: _Node, failed: Collection[str]) -> _Node | None:
        """The highest place with room, the oldest of equals; None for the learner."""
        if self._uploads < self._fanout:
            return None
        passed, found = [], None
        while self._places and found is None:
            place = heapq.heappop(self._places)
            depth, _, other = place
            if not self._has_room(other) or depth != len(path := list(other.path_to_root())):
                continue
            passed.append(place)
            # A receiver that has started again may stand there by its former name, at the same address.
            below = node in path or (node.address and node.address in [above.address for above in path])
            if not below and other.address not in failed:
                found = other
        for place in passed:
            heapq.heappush(self._places, place)
        return found

    def _has_room(self, node: _Node) -> bool:
        return bool(node.address) and not node.failed and len(node.children) < self._fanout

    def _offer(self, node: _Node) -> None:
        """Adds the room of a relay, at its depth."""
        if self._has_room(node):
            depth = sum(1 for _ in node.path_to_root())
            heapq.heappush(self._places, (depth, node.number, node))


class RelayTrees:
    """A tree for each set of bytes that is fetched: a version in full, or one link of deltas.

    Args:
        fanout: see `RelayTree`.
    """

    def __init__(self, fanout: int) -> None:
        self._fanout = fanout
        self._trees: OrderedDict[tuple[PolicyVersion, PolicyVersion | None], RelayTree] = OrderedDict()

    def tree_of(self, policy: PolicyVersion, base: PolicyVersion | None) -> RelayTree:
        """The tree of a version, or of the link that leads to it from `base`."""
        key = (policy, base)
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = RelayTree(self._fanout)
            if len(self._trees) > _KEPT:
                self._trees.popitem(last=False)
        self._trees.move_to_end(key)
        return tree
