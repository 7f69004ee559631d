"""The part of the reward service that other services import: items on their way to endpoints, and results back."""
