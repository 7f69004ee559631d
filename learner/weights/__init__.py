"""Publishing the policy: versions in memory, announced and served to generators."""

from rollmesh.learner.weights.model_bundle import read_model_bundle
from rollmesh.learner.weights.publish_rules import PublishRules
from rollmesh.learner.weights.publisher import WeightPublisher
from rollmesh.learner.weights.push_statistics import PushStatistics
from rollmesh.learner.weights.service import WeightsService

__all__ = ["PublishRules", "PushStatistics", "WeightPublisher", "WeightsService", "read_model_bundle"]
