"""The configuration of the trainers: `rollmesh sft`, `rollmesh rm` and `rollmesh dpo`."""
