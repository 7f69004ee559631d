"""Policy losses per token, before importance weights and aggregation; importing this enters all of them by name."""

from rollmesh.learner.algorithms.losses.covariance import clip_cov, kl_cov
from rollmesh.learner.algorithms.losses.divergence import dppo_kl, dppo_tv, probability_band
from rollmesh.learner.algorithms.losses.ppo import ppo
from rollmesh.learner.algorithms.losses.reinforce import dro, reinforce
from rollmesh.learner.algorithms.losses.sequence_ratio import gmpo, gspo
from rollmesh.learner.algorithms.losses.soft import cispo, sapo, vespo

__all__ = [
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gmpo",
    "gspo",
    "kl_cov",
    "ppo",
    "probability_band",
    "reinforce",
    "sapo",
    "vespo",
]
