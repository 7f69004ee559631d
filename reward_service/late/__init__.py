"""Rewards that are known only later: `later` promises one, `deliver` brings it."""

from rollmesh.reward_service.late.store import Arrival as Arrival
from rollmesh.reward_service.late.store import Delivery as Delivery
from rollmesh.reward_service.late.store import deliver as deliver
from rollmesh.reward_service.outcomes import later as later
