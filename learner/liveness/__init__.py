"""Whether a run stands still, who is told, and what ends a learner that hangs."""
