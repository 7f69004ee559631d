"""Verdicts on generators' weights, compared with the learner's published ones. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollmesh.mesh.trajectory.versions import PolicyVersion

Outcome = Literal["agrees", "differs", "not compared"]

# Largest difference of a log-prob, in nats, that another order of additions explains, by the dtype of the weights.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
# For dtypes narrower than these.
_WIDEST_TOLERANCE = 0.5
# Share of the distance to the policy below which the distance to its base says that the adapter is missing.
_MUCH_NEARER = 0.5
# Tensors named in a verdict.
_NAMED = 2


@dataclass(frozen=True, slots=True)
class GeneratorAnswer:
    """The answer of one generator.

    Attributes:
        member_id: of the generator.
        policy: version in service.
        announced: manifest digest under which it came.
        found: manifest digest of the engine's tensors; empty where it is not known.
        not_comparable: why it is not known.
        differing: names of tensors that differ from the announced ones.
        log_probs: nats, of the probe prompt's tokens from the second on.
    """

    member_id: str
    policy: PolicyVersion
    announced: str
    found: str
    not_comparable: str
    differing: Sequence[str]
    log_probs: Sequence[float]


@dataclass(frozen=True, slots=True)
class LearnerReference:
    """The learner's reference for one version.

    Attributes:
        policy: the version.
        digest: of its manifest.
        log_probs: of the probe prompt, from the bytes that the learner serves.
        tolerance: largest difference of a log-prob that counts as equal, in nats.
        base_log_probs: of the base alone, where the version is an adapter.
    """

    policy: PolicyVersion
    digest: str
    log_probs: Sequence[float]
    tolerance: float
    base_log_probs: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict: one line of the outcome.

    Attributes:
        member_id: the generator.
        outcome: `agrees`, `differs`, or `not compared`.
        why: the difference, or why nothing was compared; with `agrees`, the parts that could not be compared, if any.
        policy: version in service; None where it did not answer.
        digest: of the engine's tensors; where that is not known, of the announced ones.
        largest_difference: of a log-prob, in nats; None where there was no reference.
    """

    member_id: str
    outcome: Outcome
    why: str = ""
    policy: PolicyVersion | None = None
    digest: str = ""
    largest_difference: float | None = None


def judge(answer: GeneratorAnswer, reference: LearnerReference) -> Verdict:
    """Compares an answer with the reference of the same version."""
    digest = answer.found or answer.announced
    differences = [abs(mine - theirs) for mine, theirs in zip(answer.log_probs, reference.log_probs, strict=False)]
    # A NaN is greater than nothing: it must not pass for agreement.
    largest = max(differences, key=lambda value: value if value == value else float("inf"), default=0.0)
    wrong = []
    if answer.announced != reference.digest:
        wrong.append(f"it was announced as {answer.announced}, the learner has {reference.digest}")
    if answer.found and answer.found != reference.digest:
        named = f" (first: {', '.join(answer.differing[:_NAMED])})" if answer.differing else ""
        wrong.append(f"other bytes than the learner's{named}")
    if len(answer.log_probs) != len(reference.log_probs):
        wrong.append(f"{len(answer.log_probs)} log-probs, {len(reference.log_probs)} were asked for")
    if not largest <= reference.tolerance:
        wrong.append(f"log-probs differ by up to {largest:.3g} nats, at most {reference.tolerance:g} is expected")
    if _is_of_base(answer.log_probs, reference):
        wrong.append("its log-probs are those of the base: the adapter is lost")
    if wrong:
        return Verdict(answer.member_id, "differs", "; ".join(wrong), answer.policy, digest, largest)
    why = f"only by log-probs: {answer.not_comparable}" if answer.not_comparable else ""
    return Verdict(answer.member_id, "agrees", why, answer.policy, digest, largest)


def _is_of_base(found: Sequence[float], reference: LearnerReference) -> bool:
    """True where log-probs are much nearer to those of the base than to those of the adapted policy.

    It finds a lost adapter whose effect is smaller than the tolerance. Rounding alone moves an answer away from both.
    """
    base = reference.base_log_probs
    if base is None or len(found) != len(base):
        return False
    return _distance(found, base) < _MUCH_NEARER * _distance(found, reference.log_probs)


def _distance(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(one - other) for one, other in zip(mine, theirs, strict=False))


def tolerance_for(dtypes: Sequence[str]) -> float:
    """The tolerance for weights of these dtypes: that of the narrowest."""
    return max((TOLERANCES.get(dtype, _WIDEST_TOLERANCE) for dtype in dtypes), default=TOLERANCES["float32"])
