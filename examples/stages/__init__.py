"""From a model that knows nothing to one trained by a reward model: `sft`, `rm`, `run`, `eval`, one after another."""
