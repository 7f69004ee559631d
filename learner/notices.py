"""Sentences about valid settings that have no effect in a run, or hardly the wanted one, for its start."""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.model_files.adapter_checks import describe_other_base
from rollmesh.mesh.config.learner import LearnerSection
from rollmesh.mesh.config.models import Config


def notices(config: Config, algorithm: Algorithm) -> list[str]:
    """All of them: of the algorithm, of the run's length, of the engines."""
    learner = config.learner
    other_base = describe_other_base(learner.lora, config.model.path) if learner.lora is not None else None
    found = [*algorithm.notices(), *_beyond_the_end(learner), *_of_other_engines(learner)]
    return [*found, other_base] if other_base is not None else found


def _beyond_the_end(learner: LearnerSection) -> Iterator[str]:
    if beyond := [str(step) for step in learner.profile.steps if step > learner.steps]:
        yield (
            f"without effect: learner.profile.steps {', '.join(beyond)}. "
            f"The run ends after step {learner.steps} (learner.steps)"
        )


def _of_other_engines(learner: LearnerSection) -> Iterator[str]:
    if set(learner.engines) != {"megatron"}:
        return
    if learner.gradient_sync != "micro_batch":
        yield (
            f"without effect: learner.gradient_sync {learner.gradient_sync}. "
            "Under engine megatron ranks add up gradients once per step"
        )
    if not learner.memory.reshard_after_forward:
        yield (
            "without effect: learner.memory.reshard_after_forward false. "
            "Under engine megatron no layers are gathered from ranks"
        )
