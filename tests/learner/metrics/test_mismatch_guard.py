"""The alarm on log-probs that differ at the same version: bounds, repetitions, batches too small to judge."""

from __future__ import annotations

import logging

import pytest

from rollmesh.learner.distributed.mismatch import Mismatch
from rollmesh.learner.metrics.mismatch_guard import MismatchGuard, can_be_judged
from rollmesh.mesh.config.learner import MismatchSection
from rollmesh.mesh.errors import PERMANENT, MismatchError
from rollmesh.mesh.trajectory.episode_metrics import CALLS_CONSTRAINED
from rollmesh.protos import trajectory_pb2

BOUNDS = MismatchSection(warn=0.1, stop=1.0, warn_kl=0.5, stop_kl=2.0)


def batch(difference: float, k3: float = 0.0, tokens: int = 1000) -> Mismatch:
    """A batch with these means."""
    return Mismatch(tokens, difference * tokens, k3 * tokens)


def test_it_warns_when_a_bound_is_exceeded_and_when_the_excess_has_doubled() -> None:
    guard = MismatchGuard(BOUNDS)
    differences = [0.01, 0.2, 0.3, 0.39, 0.41, 0.05, 0.11]
    warned = [bool(guard.check(version, batch(value))) for version, value in enumerate(differences)]
    assert warned == [False, True, False, False, True, False, True]
    text = MismatchGuard(BOUNDS).check(7, batch(0.2))
    assert "both of version 7, differ by 0.2 nats per token" in text
    assert "over learner.mismatch.warn (0.1); compare the weights with `rollmesh weights verify`" in text
    assert "over learner.mismatch.warn_kl (0.5)" in MismatchGuard(BOUNDS).check(7, batch(0.05, 0.6))


@pytest.mark.parametrize(("found", "key"), [(batch(1.1), "stop .1."), (batch(0.05, 2.5), "stop_kl .2.")])
def test_it_ends_the_run(found: Mismatch, key: str) -> None:
    with pytest.raises(MismatchError, match=f"differ by .* over learner.mismatch.{key}"):
        MismatchGuard(BOUNDS).check(3, found)
    assert MismatchError.exit_code in PERMANENT


def test_a_batch_with_required_calls_is_not_judged() -> None:
    """Their log-probs are of the allowed tokens alone, and differ from the learner's by right."""
    plain, free = trajectory_pb2.MemberMeta(), trajectory_pb2.MemberMeta(metrics={"turns": 2, CALLS_CONSTRAINED: 0})
    assert can_be_judged([plain, free])
    assert not can_be_judged([plain, trajectory_pb2.MemberMeta(metrics={CALLS_CONSTRAINED: 1})])
    assert not MismatchGuard(BOUNDS).check(3, None)


def test_a_bound_of_none_does_neither() -> None:
    guard = MismatchGuard(MismatchSection(warn=None, stop=None, warn_kl=None))
    assert guard.check(0, batch(9.0, 1e6)) == ""


def test_small_batches_are_judged_together() -> None:
    guard = MismatchGuard(BOUNDS)
    assert guard.check(0, batch(5.0, tokens=6)) == ""
    assert guard.check(1, batch(0.0, tokens=100)) == ""
    assert "nats per token on average (k3 KL 0, 306 tokens)" in guard.check(2, batch(0.2, tokens=200))


def test_it_says_once_that_there_is_nothing_to_compare(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    guard = MismatchGuard(BOUNDS)
    for version in range(50):
        assert guard.check(version, None) == ""
    assert not caplog.messages
    for version in range(50):
        assert guard.check(version, Mismatch()) == ""
    assert len(caplog.messages) == 1
    assert "could not be compared in the first 20 batches" in caplog.messages[0]
