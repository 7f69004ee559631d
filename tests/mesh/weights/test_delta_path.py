"""Links or all bytes: a way without a gap, from exactly what is there to exactly what is announced, and shorter."""

from __future__ import annotations

import pytest

from rollmesh.mesh.weights.delta_path import delta_path, same_layout
from rollmesh.protos import trajectory_pb2, weights_pb2


def policy(version: int) -> trajectory_pb2.PolicyVersion:
    return trajectory_pb2.PolicyVersion(incarnation=1, version=version)


def manifest(version: int, rows: int = 100) -> weights_pb2.Manifest:
    """One tensor in one bucket."""
    found = weights_pb2.Manifest(policy=policy(version), digest=f"d{version}")
    found.tensors.add(name="w", dtype="bfloat16", shape=[rows], nbytes=2 * rows)
    found.buckets.add(nbytes=2 * rows)
    return found


def announced(version: int, links: list[tuple[int, int, int]]) -> weights_pb2.Manifest:
    """A manifest with links (base, version, bytes)."""
    found = manifest(version)
    for base, to, nbytes in links:
        found.deltas.add(
            base=policy(base),
            policy=policy(to),
            base_digest=f"d{base}",
            digest=f"d{to}",
            buckets=[weights_pb2.BucketEntry(nbytes=nbytes)],
        )
    return found


CHAIN = [(1, 2, 50), (2, 4, 50), (4, 5, 50)]


@pytest.mark.parametrize(
    ("base", "links", "taken"),
    [
        (1, CHAIN, [2, 4, 5]),
        (2, CHAIN, [4, 5]),
        (4, CHAIN, [5]),
        (0, CHAIN, []),  # away for longer than the chain reaches
        (3, CHAIN, []),  # a version that no link begins at
        (5, CHAIN, []),
        (4, [], []),
        (2, [(2, 4, 50)], []),  # the last link is not there
        (1, [(1, 2, 50), (4, 5, 50)], []),  # a gap
        (4, [(4, 5, 199)], [5]),
        (4, [(4, 5, 200)], []),  # no shorter
        (1, [(1, 2, 100), (2, 5, 100)], []),
    ],
)
def test_the_way(base: int, links: list[tuple[int, int, int]], taken: list[int]) -> None:
    found = delta_path(manifest(base), announced(5, links))
    assert [link.policy.version for link in found] == taken


def test_a_version_of_other_bytes_is_no_base() -> None:
    target = announced(5, CHAIN)
    other = manifest(4)
    other.digest = "another"
    assert not delta_path(other, target)


def test_a_version_of_equal_bytes_is_a_base_and_an_end() -> None:
    """The weights of version 4 under another number, and those of 5 announced once more."""
    held, target = manifest(4), announced(5, CHAIN)
    held.policy.incarnation, target.policy.version = 2, 6
    assert [link.policy.version for link in delta_path(held, target)] == [5]


def test_links_lead_to_the_announced_bytes_only() -> None:
    target = announced(5, CHAIN)
    target.digest = "another"
    assert not delta_path(manifest(4), target)
    split = announced(5, CHAIN)
    split.deltas[-1].buckets.add(nbytes=1)
    assert not delta_path(manifest(4), split)


def test_another_layout_is_fetched_in_full() -> None:
    assert same_layout(manifest(1), manifest(2))
    assert not delta_path(manifest(4, rows=99), announced(5, CHAIN))
    renamed = manifest(4)
    renamed.tensors[0].name = "v"
    assert not delta_path(renamed, announced(5, CHAIN))
    recast = manifest(4)
    recast.tensors[0].dtype = "float16"
    assert not same_layout(recast, manifest(4))
