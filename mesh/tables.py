"""Names of the buffer's tables: groups to train, and groups of evaluation rounds."""

TRAIN = "train"
EVAL = "eval"
TABLES = (TRAIN, EVAL)
