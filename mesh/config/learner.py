"""The configuration of training: algorithm, learner, optimizer, batches, models by role."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeInt, model_validator

from rollmesh.mesh.addresses import split_address
from rollmesh.mesh.config.base import DeviceName, ModelPath, PositiveFloat, PositiveInt, Section
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.config.parallel import MegatronSection, ParallelSection, RouterSection
from rollmesh.mesh.errors import ConfigError

Beta = Annotated[float, Field(ge=0, lt=1)]


class AlgorithmSection(Section):
    """The algorithm by name; every further key is a setting of its own, checked by the algorithm itself.

    Here such keys are only carried: which there are depends on the name, and a user's class has its own.
    """

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        "grpo",
        description="Registered name (`rollmesh config algorithms`), or `package.module:Class` / "
        "`file.py:Class` of your own. Other keys are the algorithm's settings, for example "
        "`loss.clip_high` or `kl.where`: docs/algorithms.md.",
    )

    @property
    def params(self) -> dict[str, Any]:
        """The settings given next to the name, in the form of the configuration."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "params" in values:
            raise ValueError("the settings stand next to `name`: move what is below `params` one level up")
        return values


class OptimizerSection(Section):
    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="`muon`: orthogonalized momentum for the matrices of the layers, scaled to AdamW's "
        "learning rates, and AdamW for everything else.",
    )
    lr: float = Field(
        1e-6, ge=0, description="Peak learning rate. 0 trains nothing, and shows how far rollouts and training agree."
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW's two betas, each at least 0 and below 1.")
    eps: PositiveFloat = Field(1e-8, description="AdamW epsilon.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum (Nesterov).")
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay of matrices; norms, biases and other vectors have none."
    )
    state_dtype: Literal["float32", "bfloat16", "8bit"] = Field(
        "float32",
        description="Form in which AdamW's two moments are stored; only with `name: adamw`. Rounded stochastically, "
        "bfloat16 takes 4 bytes per parameter less, `8bit` (codes and scales by blocks of 256) 6 bytes less.",
    )
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        "constant",
        description="Learning rate after the warm-up. `wsd`: constant, then linear in the last `decay_ratio`.",
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps of linear warm-up. All optimizer steps of a step of the run have one rate."
    )
    warmup_ratio: float = Field(
        0.0, ge=0, le=1, description="The same as a share of the run's steps; `warmup_steps` is 0 then."
    )
    decay_ratio: float = Field(0.1, gt=0, le=1, description="Share of the run's steps in which `wsd` decays.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient norm to clip to.")

    @model_validator(mode="after")
    def _agrees(self) -> OptimizerSection:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio both set the warm-up: leave one of them out")
        if self.name == "muon" and self.state_dtype != "float32":
            raise ValueError("state_dtype is AdamW's: leave it out, or set name: adamw")
        return self


class RoleSection(Section):
    path: ModelPath | None = Field(
        None, description="Local Hugging Face folder, or a hub id; none: the actor's initial weights."
    )
    revision: str | None = Field(None, description="Commit or tag of the hub id.")
    optimizer: OptimizerSection | None = Field(
        None, description="Keys as in `learner.optimizer`, for a role that is trained; none: `learner.optimizer`."
    )
    offload: bool = Field(False, description="Keep a role that is not trained in host memory between its uses.")
    at: Literal["learner", "own", "elsewhere"] = Field(
        "learner",
        description="Processes that hold the model. `learner`: the learner's. `own`: others on this machine, which "
        "`rollmesh run` starts. `elsewhere`: those that `rollmesh role NAME` starts on any machine (docs/roles.md).",
    )
    ranks: PositiveInt | None = Field(
        None, description="Processes of the role, where they are not the learner's; none: one."
    )
    engine: str | None = Field(None, description="Training engine of the role; none: `learner.engine`.")
    parallel: ParallelSection | None = Field(
        None,
        description="Keys as in `learner.parallel`, for this role. None: `learner.parallel`, or no division but the "
        "engine's own where `engine` is another than the learner's or `at` is not `learner`.",
    )

    @model_validator(mode="after")
    def _has_ranks_of_its_own(self) -> RoleSection:
        if self.ranks is not None and self.at == "learner":
            raise ValueError(
                "ranks is for a role with processes of its own: set at to own or elsewhere, or leave it out"
            )
        return self


class BatchSection(Section):
    groups: PositiveInt = Field(32, description="Groups per optimizer batch (B): one published version per batch.")
    minibatches: PositiveInt = Field(1, description="Optimizer steps into which a batch is divided.")
    epochs: PositiveInt = Field(1, description="Passes over a batch.")
    tokens_per_micro_batch: PositiveInt = Field(16384, description="Token budget of one packed forward pass.")


class MemorySection(Section):
    """Switches between memory and time; none of them changes what is computed."""

    logits_mib: int = Field(
        1024,
        ge=0,
        description="Logits of a micro-batch up to this size (tokens x vocabulary x 4 bytes, MiB) are kept for the "
        "backward pass. Larger ones are computed tile by tile, and again in the backward pass. On CUDA that takes "
        "768 MiB for tiles, and 4 bytes x width x (tokens + 8,192): 1.1 GiB for 16,384 tokens of 7B.",
    )
    offload_activations: bool = Field(
        False,
        description="The inputs of the layers, which `learner.activation_checkpointing: true` keeps, are "
        "moved to pinned host memory until the backward pass. For long sequences.",
    )
    offload_params: bool = Field(
        False,
        description="Keep the parameters of models that are trained in (pinned) host memory between uses, "
        "while other roles compute. `learner.roles.NAME.offload` is the same for a role that is "
        "not trained.",
    )
    offload_gradients: bool = Field(
        False,
        description="The same for gradients, between the passes of all roles and the optimizers' steps.",
    )
    offload_optimizer: bool = Field(
        False,
        description="The same for the optimizers' states. A step of the optimizer takes them to the device in "
        "pieces: a layer's, two at a time. Only a checkpoint, and loading one, needs all of them there.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Layers that were gathered from the ranks are gathered again for the backward pass. If "
        "false, the layers of a trained model stay gathered until then, and memory holds all of "
        "it in `param_dtype`.",
    )


class MismatchSection(Section):
    warn: PositiveFloat | None = Field(
        0.1,
        description="Mean absolute difference, in nats per token, of the log-probs that learner and generators compute "
        "at the same version. Above it the console warns; none: never.",
    )
    stop: PositiveFloat | None = Field(1.0, description="The same; above it the run ends (exit code 15).")
    warn_kl: PositiveFloat | None = Field(
        0.05, description="k3 estimate of KL(generator || learner) at the same version, in nats per token, as `warn`."
    )
    stop_kl: PositiveFloat | None = Field(
        None, description="The same, as `stop`. A few very unlikely tokens can exceed any bound."
    )


AttentionName = Literal["auto", "flash_attention_2", "flash_attention_3", "torch_varlen", "flex", "exact"]


class ProfileSection(Section):
    steps: tuple[PositiveInt, ...] = Field(
        (), description="Steps that torch's profiler records, by their number in the metrics; each makes a file."
    )
    ranks: tuple[NonNegativeInt, ...] = Field((0,), description="Ranks that record.")
    memory: bool = Field(
        False, description="Record also where each block of device memory was allocated. CUDA only; refused elsewhere."
    )
    shapes: bool = Field(False, description="Record the shapes of operators' inputs.")
    stack: bool = Field(False, description="Record the Python lines that call operators; slow.")
    dir: Path | None = Field(None, description="Folder of the files; none: `profile` in the run's folder.")


class DistributedSection(Section):
    timeout_s: PositiveFloat = Field(
        600.0,
        description="Longest wait for one rank in an exchange, such as that of gradients. Then all ranks end, "
        "and the log names the rank (exit code 13). Loading and writing may differ by as much "
        "between ranks.",
    )
    order_timeout_s: PositiveFloat = Field(
        1800.0,
        ge=10.0,
        description="Longest wait of the other ranks for rank 0, which may read a checkpoint or write one "
        "meanwhile. While rank 0 waits for groups or for a disk, it reports this to them every 30 "
        "s, or three times within this time.",
    )
    nodes: PositiveInt = Field(
        1,
        description="Machines over which `ranks` are divided evenly. `rollmesh learner --node N` is started on each, "
        "N from 0 on. All see the same `run.dir`.",
    )
    rendezvous: str | None = Field(
        None,
        description="Address of node 0 at which ranks of several nodes meet, `HOST:PORT`. Node 0 listens there and at "
        "no other address.",
    )
    interface: str | None = Field(
        None,
        description="Network interface of the ranks' connections, for gloo and NCCL. None: loopback for one node; for "
        "several, that of the route to `rendezvous`.",
    )

    @model_validator(mode="after")
    def _meets(self) -> DistributedSection:
        if self.nodes > 1 and self.rendezvous is None:
            raise ValueError("nodes is more than 1: set rendezvous to HOST:PORT of node 0")
        if self.rendezvous is not None:
            try:
                split_address(self.rendezvous, "rendezvous")
            except ConfigError as error:
                raise ValueError(error.message) from error
        return self


class EngineSection(Section):
    """The training of one model, whatever it is trained on: its engine, its ranks and its optimizer."""

    engine: str = Field(
        "fsdp2",
        description="Training engine: `fsdp2`, `megatron` (Megatron-Core: the extra `megatron`), or one that another "
        "package provides (docs/training-engines.md).",
    )
    device: DeviceName = Field("auto", description="Device of the learner; auto: cuda where there is one.")
    ranks: PositiveInt = Field(
        1,
        description="Ranks of the learner, one process each, over all nodes. They are data-parallel, unless "
        "`parallel` says otherwise.",
    )
    distributed: DistributedSection = Field(
        default_factory=DistributedSection, description="How ranks meet, and how long they wait for one another."
    )
    parallel: ParallelSection = Field(
        default_factory=ParallelSection, description="Division of a batch, and of models, over ranks."
    )
    router: RouterSection = Field(
        default_factory=RouterSection, description="Routers of models with experts: replay, and balance of the experts."
    )
    megatron: MegatronSection = Field(
        default_factory=MegatronSection, description="Settings of `engine: megatron` alone."
    )
    param_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Compute dtype; masters stay float32. None: bfloat16 on CUDA, float32 on a CPU."
    )
    float32_logits: bool = Field(
        True,
        description="Logits are float32: products of hidden states and weights in `param_dtype`, summed in "
        "float32 and not rounded. The weights are not: generators have them in `model.dtype`. false: logits are "
        "rounded to `param_dtype`, as in transformers.",
    )
    attention: AttentionName = Field(
        "auto",
        description="Kernel of packed attention. `auto`: the first of `flash_attention_3`, "
        "`flash_attention_2`, `torch_varlen` and `exact` that can run; `flash_attention_3` is "
        "only for Hopper. `exact`: padded calls with masks, up to 16,384 tokens. `flex`: compiled "
        "at the start, and in float32 too.",
    )
    activation_checkpointing: bool | Literal["selective"] | None = Field(
        None,
        description="Recompute activations in the backward pass. `selective`: all but the outputs of matrix "
        "products and of attention, which cost the most time. None: true on CUDA, false on a CPU.",
    )
    deterministic: bool = Field(
        False,
        description="The same batches give the same bits, also on CUDA and after a resumption on as many "
        "ranks. It costs time, and an operation without a deterministic form ends the run with an "
        "error that names it. A CPU is deterministic in any case.",
    )
    compile: bool = Field(
        False,
        description="Compile each layer with `torch.compile`, which fuses the operations between matrix "
        "products; a run starts later. Attention is not compiled, nor are models with attention "
        "of their own; the log then warns at the start.",
    )
    gradient_sync: Literal["micro_batch", "step"] = Field(
        "micro_batch",
        description="When ranks add up their gradients. `micro_batch`: after each, so that a device keeps "
        "only its shard. `step`: once, which sends less and keeps 4 bytes per parameter on every "
        "device (7B: 28 GB).",
    )
    frozen: list[str] = Field(
        [],
        description="Parts of the model that are not trained, by the last parts of their names in transformers: for "
        "example `[vision_tower]`, or `[vision_tower, multi_modal_projector]` (engine fsdp2). See vision.md.",
    )
    lora: LoraSection | None = Field(
        None,
        description="Train a low-rank adapter of the policy instead of all its weights; `{}` for the defaults. The "
        "reference policy is then the model without the adapter, and takes no memory.",
    )
    memory: MemorySection = Field(default_factory=MemorySection, description="Memory against time.")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="Optimizer and schedule.")
    max_skipped: PositiveInt = Field(
        10,
        description="Batches in a row without a step, because the gradient was not finite, that the run "
        "tolerates. With one more it ends (exit code 14).",
    )
    device_peak_tflops: PositiveFloat | None = Field(
        None,
        description="Dense peak of a device in the compute dtype, TFLOP/s: the denominator of MFU. None: that of the "
        "data sheet for bfloat16 on a known CUDA device; elsewhere no MFU is reported.",
    )

    @model_validator(mode="after")
    def _divides_ranks(self) -> Self:
        if self.ranks % self.distributed.nodes:
            raise ValueError(f"ranks: {self.ranks} cannot be divided evenly over {self.distributed.nodes} nodes")
        return self

    @model_validator(mode="after")
    def _freezes_parts(self) -> Self:
        if self.frozen and self.engine == "megatron":
            raise ValueError("frozen: engine megatron trains all parts: set engine: fsdp2, or leave frozen out")
        if self.frozen and self.lora is not None:
            raise ValueError("frozen: with lora nothing but the adapter is trained: leave frozen or lora out")
        return self

    @model_validator(mode="after")
    def _offloads_what_is_kept(self) -> Self:
        if self.memory.offload_activations and self.activation_checkpointing not in (True, None):
            raise ValueError(
                "memory.offload_activations moves what activation_checkpointing: true keeps, and this is "
                f"{str(self.activation_checkpointing).lower()}: set it to true"
            )
        if self.compile and self.activation_checkpointing == "selective":
            raise ValueError(
                "compile: true fuses the operations among which activation_checkpointing: selective chooses: set that "
                "to true or false"
            )
        return self

    @property
    def pushed_adapter(self) -> LoraSection | None:
        """The adapter where versions of the policy are adapters alone; None where they are whole."""
        return self.lora if self.lora is not None and self.lora.push != "full" else None

    @property
    def served_adapter(self) -> LoraSection | None:
        """The adapter where inference engines compute with it; None where they get whole weights."""
        return self.lora if self.lora is not None and self.lora.push == "served" else None

    @property
    def has_readable_checkpoints(self) -> bool:
        """True where the actor's checkpoints are read without their engine."""
        return self.engine in ("fsdp2", "megatron")

    def compute_on(
        self, device: Literal["cpu", "cuda"]
    ) -> tuple[Literal["float32", "bfloat16"], bool | Literal["selective"]]:
        """Compute dtype, and the activations that are recomputed: as configured, else as suits the device.

        On CUDA a model of several billion parameters needs both; on a CPU, bfloat16 is slow and memory plenty.
        """
        cuda = device == "cuda"
        recompute = self.activation_checkpointing
        return self.param_dtype or ("bfloat16" if cuda else "float32"), cuda if recompute is None else recompute


class LearnerSection(EngineSection):
    steps: PositiveInt = Field(100, description="Batches to train; the run ends after them.")
    batch: BatchSection = Field(default_factory=BatchSection, description="Batch sizes.")
    roles: dict[str, RoleSection] = Field(
        default_factory=dict,
        description="Models that the algorithm needs in addition to the actor, by role: `critic`, `reference`, "
        "`teacher`, ... (`rollmesh config explain` says which).",
    )
    mismatch: MismatchSection = Field(
        default_factory=MismatchSection, description="Bounds on the difference of learner and generators."
    )
    profile: ProfileSection = Field(default_factory=ProfileSection, description="Traces of chosen steps.")
    python: Path | None = Field(None, description="Interpreter of the learner; none: that of `rollmesh`.")

    @model_validator(mode="after")
    def _profiles_ranks(self) -> LearnerSection:
        if self.profile.steps and (absent := [rank for rank in self.profile.ranks if rank >= self.ranks]):
            raise ValueError(f"profile.ranks names rank {absent[0]}, and ranks is {self.ranks}: they count from 0")
        return self

    @property
    def engines(self) -> set[str]:
        """Backends of all roles, the actor's among them."""
        return {self.engine, *map(self.engine_of, self.roles)}

    def engine_of(self, role: str) -> str:
        """Backend of a role's engine."""
        own = self.roles.get(role)
        return self.engine if own is None or own.engine is None else own.engine

    def engine_key(self, role: str) -> str:
        """Key of the backend of a role's engine."""
        own = self.roles.get(role)
        return "learner.engine" if own is None or own.engine is None else f"learner.roles.{role}.engine"

    def describe_engine(self, role: str) -> str:
        """A role's engine and the division of its model, in words."""
        default = ParallelSection()
        keys = [f"{name} {value}" for name, value in self.parallel_of(role) if value != getattr(default, name)]
        count = self.ranks_of(role)
        ranks = f"{count} rank{'s' * (count > 1)}"
        return f"{self.engine_of(role)} on {ranks}" + (f": {', '.join(keys)}" if keys else "")

    def parallel_of(self, role: str) -> ParallelSection:
        """Division of a role: its own, else the learner's, which belongs to the learner's engine alone."""
        own = self.roles.get(role)
        if own is not None and own.parallel is not None:
            return own.parallel
        shares = self.engine_of(role) == self.engine and not self.is_apart(role)
        return self.parallel if shares else ParallelSection()

    def is_apart(self, role: str) -> bool:
        """True if the role's model has processes of its own."""
        own = self.roles.get(role)
        return own is not None and own.at != "learner"

    def ranks_of(self, role: str) -> int:
        """Processes that hold a role's model."""
        return (self.roles[role].ranks or 1) if self.is_apart(role) else self.ranks

    def with_all_roles_here(self) -> LearnerSection:
        """The same with all models in the learner's processes, divided as theirs by default."""
        here = {"at": "learner", "ranks": None, "parallel": None}
        roles = {
            name: role if role.at == "learner" else role.model_copy(update=here) for name, role in self.roles.items()
        }
        return self.model_copy(update={"roles": roles})

    @property
    def own_roles(self) -> list[str]:
        """Roles whose processes `rollmesh run` starts on this machine."""
        return [name for name, role in self.roles.items() if role.at == "own"]

    def parallel_key(self, role: str) -> str:
        """Key of a role's division."""
        own = self.roles.get(role)
        return "learner.parallel" if own is None or own.parallel is None else f"learner.roles.{role}.parallel"
