"""Datasets: reading rows, turning them into prompts, and the deterministic order in which they are rolled out."""

from rollmesh.learner.data.dataset import open_dataset
from rollmesh.learner.data.order import DataOrder
from rollmesh.learner.data.prompts import AgentPrompts, PromptEncoder
from rollmesh.learner.data.rows import Row, RowSource
from rollmesh.learner.data.stream import PromptStream

__all__ = ["AgentPrompts", "DataOrder", "PromptEncoder", "PromptStream", "Row", "RowSource", "open_dataset"]
