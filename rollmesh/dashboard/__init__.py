"""The page of runs: live, of finished runs, of several side by side; and the same page as one file, the report."""
