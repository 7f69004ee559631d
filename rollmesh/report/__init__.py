"""What a run leaves for its reader: metrics, summary, report."""
