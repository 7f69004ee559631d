"""The objective of each command."""

from __future__ import annotations

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.trainers.objectives.interface import Objective
from rollmesh.learner.trainers.objectives.preference import PreferenceObjective
from rollmesh.learner.trainers.objectives.reward_model import RewardModelObjective
from rollmesh.learner.trainers.objectives.supervised import SupervisedObjective
from rollmesh.mesh.config.trainers.configs import DpoConfig, RewardModelConfig, SftConfig, TrainerConfig


def build_objective(config: TrainerConfig, chat: ChatEncoder) -> Objective:
    """The objective that a configuration asks for.

    Args:
        config: of a command.
        chat: encodes conversations.
    """
    match config:
        case SftConfig():
            return SupervisedObjective(chat, config.data)
        case RewardModelConfig():
            return RewardModelObjective(chat, config)
        case DpoConfig():
            return PreferenceObjective(chat, config)
    raise TypeError(f"{type(config).__name__} is no configuration of a trainer")
