"""Names of the buffer's tables: groups to train, and groups of evaluation rounds."""

TRAIN = "train"
EVAL = "eval"
TABLES = (TRAIN, EVAL)
# Latest failed groups of a table in which the most frequent cause is counted.
FAILED_EXAMINED = 20
