"""The work of `rollmesh plan`: reads models, plans, tries switches and layouts."""

from __future__ import annotations

import logging
from pathlib import Path

from rollmesh.learner.builders import build_algorithm
from rollmesh.learner.model_files.checks import check_context, declared_context, read_model_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.cluster import Cluster
from rollmesh.planning.fsdp_memory import FsdpSetup
from rollmesh.planning.measured import compare, read_measured
from rollmesh.planning.models import RunModels
from rollmesh.planning.plan import MEGATRON, Plan, make_plan
from rollmesh.planning.proposal import choices, propose
from rollmesh.planning.report import Findings
from rollmesh.planning.switches import savings
from rollmesh.planning.topologies.both import topologies


def plan_run(config: Config, cluster: Cluster, *, trace: bool = False, run: Path | None = None) -> Findings:
    """Plans a run.

    Args:
        config: of the run.
        cluster: its devices, as `cluster.parse_devices` reads them.
        trace: follow a step of each language model that FSDP2 trains with torch's tracker too.
        run: folder of an ended run, to show what it took.

    Raises:
        ConfigError: a configuration that contradicts itself, or names an engine of another package.
        DataError: a model's configuration cannot be read; a run folder without a summary.
    """
    engines = {"learner.engine": config.learner.engine}
    for name in config.learner.roles:
        engines[f"learner.roles.{name}.engine"] = config.learner.engine_of(name)
    for key, engine in engines.items():
        if engine not in ("fsdp2", MEGATRON):
            raise ConfigError(
                f"the formulas are those of fsdp2 and megatron, and {key} is {engine}",
                hint=f"for a plan of the run with one of these add --{key}=fsdp2 or --{key}=megatron",
            )
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if (folder := Path(config.model.path)).is_dir():
        check_context(declared_context(read_model_config(folder, "model.path")), config.rollout.context_tokens)
    measured = None if run is None else read_measured(run)
    roles = build_algorithm(config).needs.roles
    models = RunModels(config)

    def planner(changed: Config) -> Plan:
        return make_plan(changed, cluster, roles, models)

    plan = planner(config)
    search = propose(config, cluster, planner)
    traced = {}
    if trace:
        from rollmesh.planning.trace import trace_step

        for role in plan.roles:
            if isinstance(role.setup, FsdpSetup) and role.setup.trained and role.setup.shape.output:
                name = role.setup.name
                traced[name] = trace_step(models.config(name), role.setup, models.adapter(name))
    compared = None if measured is None else compare(measured, config, plan)
    smallest = None if search.proposal is None else search.proposal.settings
    divisions = choices(config, smallest, planner)
    both = topologies(config, plan, planner, smallest)
    return Findings(plan, list(savings(config, plan, planner)), search, divisions, both, traced, compared)
