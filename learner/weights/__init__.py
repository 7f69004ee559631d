"""Publishing the policy: versions in memory, announced and served to generators."""

from learner.weights.bundle import read_model_bundle
from learner.weights.publisher import WeightPublisher
from learner.weights.pushes import PushStatistics
from learner.weights.service import WeightsService

__all__ = ["PushStatistics", "WeightPublisher", "WeightsService", "read_model_bundle"]
