"""Advantage estimators: from the rewards of a whole batch to the advantages of its tokens; importing enters them."""

from rollmesh.learner.algorithms.advantages import components as components
from rollmesh.learner.algorithms.advantages import critic as critic
from rollmesh.learner.algorithms.advantages import group_relative as group_relative
from rollmesh.learner.algorithms.advantages import process as process
from rollmesh.learner.algorithms.advantages import reinforce as reinforce
from rollmesh.learner.algorithms.advantages import token_baseline as token_baseline
from rollmesh.learner.algorithms.advantages import vtrace as vtrace
