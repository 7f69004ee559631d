"""The end of a run as far as it is known beforehand: what schedules of the learning rate end with."""

from __future__ import annotations

import math

from rollmesh.mesh.config import Config


def planned_end(config: Config, prompts: int | None, *, version: int = 0, used: int = 0) -> int:
    """The version with which a run ends at the latest: `learner.steps`, or the last batch of the data.

    It depends on what is trained so far only where the batches had another size then. A run whose groups are filtered
    or fail ends sooner.

    Args:
        config: of the run.
        prompts: of all passes over the data; None: there is no end of them.
        version: trained so far.
        used: groups trained so far, each as often as it was.
    """
    steps = config.learner.steps
    if prompts is None:
        return steps
    left = max(0, prompts * config.buffer.max_reuse - used)
    return min(steps, version + math.ceil(left / config.learner.batch.groups))
