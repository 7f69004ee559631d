"""Summary and report of a training on data: `rollmesh sft`, `rm` and `dpo`."""
