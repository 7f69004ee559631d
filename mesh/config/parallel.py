"""The configuration of training engines: divisions over ranks, routers of experts, what Megatron-Core alone has."""

from __future__ import annotations

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section


class ParallelSection(Section):
    """The division of a model and of its batches; an engine refuses what another one has."""

    shards: PositiveInt | None = Field(
        None,
        description="fsdp2: ranks over which parameters, gradients and optimizer state are divided (HSDP); none: "
        "all. Every group of this many consecutive ranks has a copy of the model. If it is the "
        "number of a machine's ranks, only sums of gradients travel between machines. It divides "
        "`ranks`; `sp` is independent of it.",
    )
    sp: PositiveInt | None = Field(
        None,
        description="fsdp2: ranks that compute each micro-batch together, for sequences too long for one device "
        "(Ulysses); none: 1. Each has a consecutive part of the tokens and, in attention, a part of the "
        "heads. It divides `ranks` and the model's heads; `ranks` / `sp` are data-parallel. With megatron it is "
        "sequence parallelism, `tp` or 1; none: `tp`. Ranks that divide matrices then also divide the tokens outside "
        "of them. Models with experts need it.",
    )
    dp: PositiveInt | None = Field(
        None,
        description="Data-parallel ranks; none: those that the other keys leave. Another number than that is refused.",
    )
    tp: PositiveInt = Field(
        1,
        description="megatron: ranks over which each matrix is divided (tensor parallelism). It divides the model's "
        "heads, its groups of keys and values, and the width of its MLPs.",
    )
    pp: PositiveInt = Field(
        1, description="megatron: stages of consecutive layers, each on ranks of its own (pipeline parallelism)."
    )
    vpp: PositiveInt = Field(
        1,
        description="megatron: parts of the layers that each stage has (interleaved stages); more than 1 only with "
        "`pp`. Stages wait less, and activations travel `vpp` times as often.",
    )
    layers: tuple[PositiveInt, ...] | None = Field(
        None,
        description="megatron: layers of each part of the model, in the order in which tokens pass them: `pp` x `vpp` "
        "numbers. None: as even as possible. The first and the last part, which also have the embedding and the "
        "output layer, get the fewer ones.",
    )
    cp: PositiveInt = Field(
        1,
        description="megatron: ranks over which the tokens of each sequence are divided (context parallelism), for "
        "sequences too long for one device.",
    )
    ep: PositiveInt = Field(
        1,
        description="Ranks over which the experts of a layer are divided (expert parallelism). With fsdp2 it divides "
        "the experts and `shards`; ranks with the same experts share each of them by rows.",
    )
    etp: PositiveInt | None = Field(
        None,
        description="megatron: ranks over which each expert's matrices are divided; none: `tp` where `ep` is 1, else "
        "1. Another number than `tp` needs `ep`. `etp` x `ep` x `pp` divides `ranks`.",
    )


class RouterSection(Section):
    """Settings of the routers of models with experts."""

    replay: bool = Field(
        False,
        description="Compute each token with the experts that its generator has chosen, weighted by the learner's own "
        "router (router replay). Generators record them with `rollout.hf.routed_experts` or "
        "`rollout.vllm.routed_experts`.",
    )
    load_balance_coeff: PositiveFloat | None = Field(
        None,
        description="Weight of a loss that gives all experts tokens (Switch Transformers). It is over all tokens of a "
        "step, by the loads of the last one. None: there is none.",
    )
    z_loss_coeff: PositiveFloat | None = Field(
        None,
        description="Weight of a loss that keeps the routers' logits small (ST-MoE), over all tokens of a step; none: "
        "there is none.",
    )
    bias_update_rate: PositiveFloat | None = Field(
        None,
        description="fsdp2: change, at each step, of the bias with which experts are chosen (DeepSeek-V3). It goes up "
        "for those with less than the mean load, down for those with more. Only for architectures with such a bias; "
        "none: it stays as it is.",
    )


class MegatronSection(Section):
    """Settings of Megatron-Core that no other engine has."""

    overlap_grad_reduce: bool = Field(
        False, description="Gradients travel between data-parallel ranks during the backward pass."
    )
    overlap_param_gather: bool = Field(
        False,
        description="Parameters travel between data-parallel ranks during the next forward pass; only with "
        "`overlap_grad_reduce`.",
    )

    @model_validator(mode="after")
    def _overlaps_both(self) -> MegatronSection:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("overlap_param_gather needs overlap_grad_reduce: set learner.megatron.overlap_grad_reduce")
        return self
