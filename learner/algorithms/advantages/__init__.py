"""Advantage estimators: from the rewards of a whole batch to the advantages of its tokens; importing enters them."""

from learner.algorithms.advantages import components as components
from learner.algorithms.advantages import critic as critic
from learner.algorithms.advantages import group_relative as group_relative
from learner.algorithms.advantages import process as process
from learner.algorithms.advantages import reinforce as reinforce
from learner.algorithms.advantages import token_baseline as token_baseline
from learner.algorithms.advantages import vtrace as vtrace
