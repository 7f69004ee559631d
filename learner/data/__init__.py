"""Datasets: reading rows, turning them into prompts, and the deterministic order in which they are rolled out."""

from learner.data.dataset import open_dataset
from learner.data.order import DataOrder
from learner.data.prompts import AgentPrompts, PromptEncoder
from learner.data.rows import Row, RowSource
from learner.data.stream import PromptStream

__all__ = ["AgentPrompts", "DataOrder", "PromptEncoder", "PromptStream", "Row", "RowSource", "open_dataset"]
