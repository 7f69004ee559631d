"""Places of ready groups in the orders that need more than the order of admission."""

from __future__ import annotations

import hashlib
import math

from rollmesh.buffer.policy.draw_weights import WEIGHT_UNIT

_DIGITS = 13


def freshest_key(seal: int, deadline: int) -> float:
    """Place in the order `freshest`: newest tokens first, those sealed first among equals."""
    return seal / 2.0**32 - deadline


def draw_key(group_id: str, draws: int, seed: int, weight: int, race: float) -> float:
    """A group's key in the race (`buffer.policy.draw_weights`).

    It can be reproduced from the group's id, the number of its entries and the run's seed.
    """
    digest = hashlib.sha1(f"{group_id}:{draws}:{seed}".encode(), usedforsecurity=False).hexdigest()
    uniform = (int(digest[:_DIGITS], 16) + 0.5) / 16.0**_DIGITS
    return race - math.log(uniform) / weight * WEIGHT_UNIT
