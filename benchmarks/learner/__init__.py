"""Parts of the learner alone: losses, estimators, ranks, architectures."""
