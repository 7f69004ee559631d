"""The results of a run for its reader: metrics, summary, report."""
