"""What a run leaves behind for its reader: metrics, summary, report."""
