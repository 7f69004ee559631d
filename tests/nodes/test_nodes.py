"""A mesh of nodes trains through what happens to nodes, with every group accounted for."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rollmesh.learner.recovery.consumption_log import LOG_NAME, read_log, surviving_uses
from rollmesh.protos import membership_pb2
from tests.demo_data import prepared, shared_folder
from tests.nodes import reward
from tests.nodes.world import (
    FRONTS,
    GENERATORS,
    LEARNER,
    LEASE_S,
    NAME,
    NEW_NUMBER,
    PORT,
    REWARD,
    NodeMesh,
    NodeSettings,
    faketime_library,
)

# Nearly ten minutes apart.
AHEAD_S, BEHIND_S = 295, -295
SLOW_LINK = 4e6
SKEWED, REACHED_BY_IPV6, LATE = GENERATORS


@pytest.fixture
def mesh(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[NodeMesh]:
    data = prepared(shared_folder(tmp_path_factory, worker_id))
    clocks = faketime_library() is not None
    settings = {
        # By its TLS too it is another time, at which the certificates are not yet made. It is the cheapest to execute.
        REWARD: NodeSettings(clock_s=BEHIND_S if clocks else 0, executed=clocks),
        SKEWED: NodeSettings(clock_s=AHEAD_S, mesh=f"{NAME}:{PORT}"),
        REACHED_BY_IPV6: NodeSettings(ipv6=True),
    }
    # No faster than the test looks at it: steps would be most of its time.
    slowly = {
        "reward": {"functions": [f"{reward.__file__}:{reward.score_at_leisure.__name__}"]},
        "learner": {"device": "cpu", "steps": 1_000_000, "batch": {"groups": 4}},
    }
    with closing(NodeMesh(tmp_path, data, settings, slowly)) as mesh:
        yield mesh


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and iproute2")
def test_a_mesh_of_nodes_trains_through_all_that_happens_to_nodes(mesh: NodeMesh) -> None:
    """Clocks ten minutes apart, a cut link, a late node on a slow one, services killed, changed addresses."""
    # One generator knows the fronts by a name alone, with an address that is not there before that of a front.
    mesh.name_fronts(SKEWED, mesh.hosts[LATE].address, mesh.hosts[FRONTS[1]].address)
    mesh.start(FRONTS[0])
    mesh.start(FRONTS[1], REWARD, LEARNER, SKEWED, REACHED_BY_IPV6)
    mesh.wait_for_steps(2)
    mesh.wait_until(lambda: families(mesh) == {True, False}, "generator of each family")
    mesh.wait_until(lambda: mesh.stored_tokens(SKEWED) > 0, "first responses of the node whose clock is ahead")

    # Longer than a lease: what the node held is generated elsewhere, and the node is back afterwards.
    mesh.hosts[REACHED_BY_IPV6].cut()
    mesh.note(f"link of {REACHED_BY_IPV6} cut")
    mesh.wait_until(lambda: len(generators(mesh)) == 1, "end of the node's membership", 60 * LEASE_S)
    mesh.wait_for_steps(1)
    mesh.hosts[REACHED_BY_IPV6].restore()
    mesh.note(f"link of {REACHED_BY_IPV6} restored")
    mesh.wait_until(lambda: len(generators(mesh)) == 2, "return of the node")

    # A node that comes late, on a slow link, with its join string alone.
    mesh.hosts[LATE].shape(SLOW_LINK)
    mesh.start(LATE)
    mesh.wait_until(lambda: mesh.stored_tokens(LATE) > 0, "first responses of the late node")

    # That a killed reward service is followed by another: tests/faults/test_chaos.py.
    mesh.kill(REACHED_BY_IPV6)
    mesh.wait_for_steps(1)

    # The learner returns at another address, and so does the front with its Redis.
    mesh.hosts[LEARNER].move(NEW_NUMBER[LEARNER])
    mesh.note(f"{LEARNER} has the address {mesh.hosts[LEARNER].address}")
    mesh.kill(LEARNER)
    mesh.wait_for_steps(1)
    mesh.hosts[FRONTS[0]].move(NEW_NUMBER[FRONTS[0]])
    mesh.note(f"{FRONTS[0]} has the address {mesh.hosts[FRONTS[0]].address}")
    mesh.name_fronts(SKEWED, mesh.hosts[FRONTS[0]].address)
    mesh.kill(FRONTS[0])
    mesh.wait_for_steps(1)
    # Only the new address of the first front is left; all find it.
    mesh.supervisor.retire(FRONTS[1], 60)
    mesh.note(f"{FRONTS[1]} ended for good")
    mesh.wait_for_steps(1)

    mesh.supervisor.retire(LEARNER, 120)
    ledger = mesh.ledger()
    assert not ledger.discrepancies
    counts = ledger.counters
    mesh.note(f"{LEARNER} ended; ledger balances: {counts.admitted} admitted, {counts.trained} trained")
    assert counts.trained > 0
    counted = Counter(
        (group.group_id, group.use)
        for step in surviving_uses(list(read_log(mesh.run / LOG_NAME)))
        for group in step.groups
    )
    assert max(counted.values()) == 1
    (mesh.folder / "events.log").write_text("\n".join(mesh.events))


def generators(mesh: NodeMesh) -> list[membership_pb2.Member]:
    return mesh.members(membership_pb2.ROLE_GENERATOR)


def families(mesh: NodeMesh) -> set[bool]:
    """True if a generator is reached by IPv6, and False if one is not; each of them once."""
    return {member.address.startswith("[fd14::") for member in generators(mesh)}
