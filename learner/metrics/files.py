"""Names of the files below the run folder into which a learner writes its records."""

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
