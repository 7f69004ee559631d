"""The configuration model: one YAML, one documented field each, unknown keys refused.

Import cost matters (`rollmesh --help`): nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from rollmesh.mesh.config.base import (
    DeviceName,
    DeviceNumbers,
    ModelPath,
    PositiveFloat,
    PositiveInt,
    Section,
    Temperature,
)
from rollmesh.mesh.config.no_secrets import refuse_secrets
from rollmesh.mesh.config.redis_url import RedisOptions, parse_redis_url
from rollmesh.mesh.config.rollout import RolloutSection
from rollmesh.mesh.errors import ConfigError


class RunSection(Section):
    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", description="Name of the run; also its folder below `dir`."
    )
    dir: Path = Field(Path("runs"), description="Folder that holds run folders.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initialization.")

    @property
    def folder(self) -> Path:
        """Folder of this run: configuration, metrics, samples, checkpoints, report."""
        return self.dir / self.name


class ModelSection(Section):
    path: ModelPath = Field(description="Local Hugging Face folder, or a hub id (`org/name`).")
    revision: str | None = Field(None, description="Commit or tag of the hub id; pin it for reproducible runs.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Data type in which generators compute and in which weights travel."
    )


class DataSection(Section):
    train: Path = Field(description="Parquet or JSONL with verl's fields (prompt, data_source, reward_model, ...).")
    eval: Path | None = Field(None, description="Held-out file of the same form.")
    prompt_key: str = Field(
        "prompt", description="Field with the prompt: a string, or a list of chat messages. Images: see engines.md."
    )
    shuffle: bool = Field(True, description="Shuffle the rows of each epoch by `run.seed`.")
    epochs: PositiveInt | None = Field(None, description="Passes over the data; none: until `learner.steps` are done.")
    on_long_prompt: Literal["skip", "refuse"] = Field(
        "skip", description="Prompts over `rollout.max_prompt_tokens`: skip and count them, or refuse to start."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the tokenizer's `apply_chat_template`."
    )


class AlgorithmSection(Section):
    """The algorithm by name; every further key is a setting of its own, checked by the algorithm itself.

    Here such keys are only carried: which there are depends on the name, and a user's class has its own.
    """

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        "grpo",
        description="Registered name (`rollmesh config algorithms`), or `package.module:Class` / `file.py:Class` of "
        "your own. Other keys are the algorithm's settings, as `loss.clip_high` or `kl.where`: docs/algorithms.md.",
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


class RewardSection(Section):
    functions: list[str] = Field(
        default_factory=lambda: ["auto"],
        description="Scorers, summed: registered names (auto, arithmetic, environment, exact_match, gsm8k, "
        "gsm8k_strict, gsm8k_flexible, math, math_string, math_dapo, qa), or `module:function` / `file.py:function` "
        "with verl's or TRL's signature. `auto` takes the reward that an episode brings, else picks by data_source.",
    )
    by_data_source: dict[str, list[str]] = Field(
        default_factory=dict,
        description="data_source -> scorer names or `grpc://host:port` endpoints that go before the above.",
    )
    endpoints: list[str] = Field(
        default_factory=list, description="`grpc://host:port` of reward services; none: one is started here."
    )
    key_files: dict[str, Path] = Field(
        default_factory=dict,
        description="By endpoint, as it stands above: a file with the key that is sent to it as a bearer token. It has "
        "to be on each generator's host.",
    )
    timeout_s: PositiveFloat = Field(
        20.0,
        description="Deadline of one Score call, in seconds. Items that cannot be begun in time to get their "
        "`scorer_timeout_s` come back and wait for their turn, which is no failure.",
    )
    scorer_timeout_s: PositiveFloat = Field(
        8.0, description="Seconds that one scorer call may take; then its worker process is ended and replaced."
    )
    attempts: PositiveInt = Field(3, description="Tries of an item whose error is retryable.")
    in_process: bool = Field(
        False, description="Score next to the generators, in workers of theirs (small runs); no service is started."
    )
    workers: PositiveInt | None = Field(
        None,
        description="Most processes that run scorers, started as they are needed; none: as many as there are cores (4 "
        "to 16) for functions that compute, and 32 for those that wait for something.",
    )
    python: Path | None = Field(None, description="Interpreter of the reward service; none: that of `rollmesh`.")


class OptimizerSection(Section):
    lr: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW betas.")
    eps: PositiveFloat = Field(1e-8, description="AdamW epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="Course after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient norm to clip to.")


class RoleSection(Section):
    path: ModelPath | None = Field(
        None, description="Local Hugging Face folder, or a hub id; none: the actor's initial weights."
    )
    revision: str | None = Field(None, description="Commit or tag of the hub id.")
    optimizer: OptimizerSection | None = Field(
        None, description="Keys as in `learner.optimizer`, for a role that is trained; none: `learner.optimizer`."
    )
    offload: bool = Field(False, description="Keep a role that is not trained in host memory between its uses.")


class BatchSection(Section):
    groups: PositiveInt = Field(32, description="Groups per optimizer batch (B): one published version per batch.")
    minibatches: PositiveInt = Field(1, description="Optimizer steps into which a batch is divided.")
    epochs: PositiveInt = Field(1, description="Passes over a batch.")
    tokens_per_micro_batch: PositiveInt = Field(16384, description="Token budget of one packed forward pass.")


class LearnerSection(Section):
    engine: Literal["fsdp2"] = Field("fsdp2", description="Training engine.")
    device: DeviceName = Field("auto", description="Device of the learner; auto: cuda where there is one.")
    devices: DeviceNumbers | None = Field(
        None, description="CUDA devices of the ranks that `rollmesh run` starts, by number; none: the first free ones."
    )
    ranks: PositiveInt = Field(1, description="Data-parallel ranks of the learner, one process each, on one machine.")
    python: Path | None = Field(None, description="Interpreter of the learner; none: that of `rollmesh`.")
    steps: PositiveInt = Field(100, description="Batches to train; the run ends after them.")
    param_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Compute dtype; masters stay float32. None: bfloat16 on CUDA, float32 on a CPU."
    )
    activation_checkpointing: bool | None = Field(
        None, description="Recompute activations in the backward pass. None: on CUDA."
    )
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="AdamW and its schedule.")
    max_skipped: PositiveInt = Field(
        10,
        description="Batches in a row of which no step was taken, because the gradient was not finite, that the run "
        "outlives; with one more it ends (exit code 14).",
    )
    batch: BatchSection = Field(default_factory=BatchSection, description="Batch sizes.")
    roles: dict[str, RoleSection] = Field(
        default_factory=dict,
        description="Models that the algorithm needs in addition to the actor, by role: `critic`, `reference`, "
        "`teacher`, ... (`rollmesh config explain` says which).",
    )

    def compute_on(self, device: Literal["cpu", "cuda"]) -> tuple[Literal["float32", "bfloat16"], bool]:
        """Compute dtype, and whether activations are recomputed: as configured, else what suits the device.

        On CUDA a model of several billion parameters needs both; on a CPU, bfloat16 is slow and memory plenty.
        """
        cuda = device == "cuda"
        recompute = self.activation_checkpointing
        return self.param_dtype or ("bfloat16" if cuda else "float32"), cuda if recompute is None else recompute


# Orders of sampling by name.
ORDERS = ("in_order", "fifo", "freshest", "priority")


class BufferSection(Section):
    redis: str | None = Field(
        None,
        description="Redis URL (`redis://`, `rediss://`, `unix://`, `redis-cluster://`, `rediss-cluster://`); it "
        "may name a user, but no password. None: a redis-server is started in the run folder.",
    )
    redis_password_file: Path | None = Field(None, description="File whose first line is Redis' password.")
    redis_tls_ca: Path | None = Field(None, description="PEM authorities of Redis' certificate; none: the system's.")
    redis_tls_cert: Path | None = Field(None, description="PEM certificate that is shown to Redis.")
    redis_tls_key: Path | None = Field(None, description="PEM key of `redis_tls_cert`.")
    redis_tls_check_hostname: bool = Field(True, description="Redis' certificate must name the host of the URL.")
    python: Path | None = Field(None, description="Interpreter of the fronts; none: that of `rollmesh`.")
    fronts: PositiveInt = Field(1, description="Fronts that `rollmesh run` starts; all serve the same Redis.")
    durability: Literal["always", "everysec", "none"] = Field(
        "always",
        description="What survives the end of the embedded Redis. `always`: every acknowledged write, also where the "
        "machine ends. `everysec`: all but up to about two seconds of them, at a power cut or with a slow disk. "
        "`none`: nothing (benchmarks, throw-away runs). What is lost is made up for: finished responses are sampled "
        "again, uses are told again by the learner. Nothing hangs, and nothing is trained twice.",
    )
    max_staleness: int = Field(4, ge=0, description="No trained token is older than this many versions (S).")
    commit: Literal["checkpoint", "step"] = Field(
        "checkpoint", description="When use counts as trained: with the checkpoint, or at once (at-most-once)."
    )
    order: str = Field(
        "in_order",
        description="Which ready groups train first. in_order: as admitted, waiting for stragglers rather than "
        "dropping them; fifo: as sealed; freshest: newest tokens first; priority: drawn in proportion to priorities; "
        "`module:function` / `file.py:function`: highest score first, by a function of your own "
        "(rollmesh.buffer.policy.batch_selection.GroupFacts -> float).",
    )
    max_reuse: PositiveInt = Field(
        1, description="Uses of a group at most (R), one per version; at most `max_staleness` + 1."
    )
    samples_per_insert: PositiveInt | None = Field(
        None, description="Uses per group that the gate counts on, with `max_reuse` above 1; none: all R."
    )
    priority: str = Field(
        "uniform",
        description="Priority of a group after a use, with `order: priority` (new groups have 1): uniform; "
        "reward_std; or `module:function` / `file.py:function` of your own "
        "(rollmesh.learner.algorithms.types.Group -> float).",
    )
    priority_exponent: float = Field(
        1.0, ge=0, description="Weight of a draw = priority to this power, with `order: priority`; 0: uniform."
    )
    min_members: PositiveInt = Field(2, description="Scored members below which a sealed group fails.")
    max_bytes: PositiveInt = Field(1 << 30, description="Payload bytes above which nothing more is admitted.")
    lease_s: PositiveFloat = Field(15.0, description="Lease term in seconds; heartbeats renew it.")
    reconnect_grace_s: PositiveFloat = Field(3.0, description="What is left of a lease when its stream breaks.")
    stall_s: PositiveFloat = Field(
        60.0,
        description="Seconds for which the learner waits and nothing moves until the log, `rollmesh status` and the "
        "report name who holds what since when.",
    )
    stall_limit_s: float = Field(
        1800.0,
        ge=0,
        description="Seconds after which such a run ends with a named error (exit code 12); 0: never. Time in which a "
        "first generator loads its model does not count.",
    )
    seed_ahead: PositiveInt = Field(4, description="Prompt tasks kept ready, in batches.")
    compression: Literal["none", "zstd"] = Field(
        "none", description="How generators pack token ids and log-probs; zstd is 1.2 to 2 times smaller."
    )
    compression_level: int = Field(1, ge=1, le=19, description="Level of zstd; above 1 little is won.")
    side_dir: Path | None = Field(
        None,
        description="Folder for large data outside the payloads (routed experts, images), the same for all fronts; "
        "none: `side` in the run folder.",
    )
    side_max_bytes: PositiveInt = Field(1 << 30, description="Bytes of one object of side data at most.")

    @property
    def redis_options(self) -> RedisOptions:
        """Settings of Redis in addition to its URL."""
        return RedisOptions(
            tls_ca=self.redis_tls_ca,
            tls_cert=self.redis_tls_cert,
            tls_key=self.redis_tls_key,
            check_hostname=self.redis_tls_check_hostname,
            password_file=self.redis_password_file,
        )

    @model_validator(mode="after")
    def _redis_can_be(self) -> BufferSection:
        try:
            if self.redis is not None:
                address = parse_redis_url(self.redis, self.redis_options)
                if address.password:
                    raise ConfigError(
                        "buffer.redis: it holds a password",
                        hint="write it into a file for you alone, and name that in buffer.redis_password_file",
                    )
            elif self.redis_options != RedisOptions():
                raise ConfigError("buffer.redis_* without buffer.redis", hint="they are for a Redis of your own")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _reuse_fits(self) -> BufferSection:
        if ":" not in self.order and self.order not in ORDERS:
            raise ValueError(f"order: expected one of {', '.join(ORDERS)} or a path with `:`, got {self.order!r}")
        if self.max_reuse > self.max_staleness + 1:
            raise ValueError(
                f"max_reuse ({self.max_reuse}) exceeds max_staleness + 1 ({self.max_staleness + 1}): a group is used "
                "at most once per version, and ends with the bound"
            )
        if ":" not in self.priority and self.priority not in ("uniform", "reward_std"):
            raise ValueError(f"priority: expected uniform, reward_std or a path with `:`, got {self.priority!r}")
        if self.samples_per_insert is not None and not self.samples_per_insert <= self.max_reuse > 1:
            raise ValueError("samples_per_insert goes with max_reuse above 1, and is at most that")
        return self


TransportName = Literal["auto", "grpc", "shm", "gloo", "nccl", "disk"]
EncodingName = Literal["auto", "full", "delta"]


class WeightsSection(Section):
    transport: TransportName = Field(
        "auto",
        description="auto: shm on the same host, else grpc; shm, grpc: that one only; "
        "gloo, nccl (broadcast), disk: that one, and grpc where it fails.",
    )
    dir: Path | None = Field(None, description="Folder for transport disk; shared by all hosts of the run.")
    encoding: EncodingName = Field(
        "auto",
        description="full: all bytes of a version; delta: lossless differences wherever they are fewer; "
        "auto: differences for receivers whose network makes them faster.",
    )
    chain: PositiveInt = Field(4, description="Differences kept for receivers of earlier versions.")
    kv: Literal["auto", "keep", "recompute", "interrupt"] = Field(
        "auto",
        description="Running sequences at a swap: keep their KV cache; recompute it, all at once; or interrupt them: "
        "they continue from their tokens, prefilled again over several steps. auto: keep; with sglang recompute, since "
        "keep costs its scheduler the overlap with the device.",
    )
    bucket_bytes: PositiveInt = Field(64 << 20, description="Bytes per bucket.")
    keep_versions: PositiveInt = Field(
        2, description="Published versions that stay fetchable; one that is being fetched over grpc stays besides."
    )
    streams: PositiveInt = Field(2, description="Buckets that come over grpc at once, each on its own connection.")
    fanout: PositiveInt = Field(
        2, description="To how many generators the learner, and each of these in turn, sends a version over grpc."
    )
    timeout_s: PositiveFloat = Field(
        120.0, description="Seconds without a byte after which a transfer has failed; a slow one may take longer."
    )

    @model_validator(mode="after")
    def _disk_has_a_folder(self) -> WeightsSection:
        if self.transport == "disk" and self.dir is None:
            raise ValueError("transport disk needs dir, a folder that learner and generators share")
        return self

    @model_validator(mode="after")
    def _differences_have_a_way(self) -> WeightsSection:
        if self.transport == "shm" and self.encoding == "delta":
            raise ValueError("encoding delta travels over grpc, which transport shm rules out; take auto for either")
        return self


class CheckpointSection(Section):
    every_steps: PositiveInt | None = Field(None, description="Steps between checkpoints.")
    every_s: PositiveFloat | None = Field(60.0, description="Seconds between checkpoints (whichever comes first).")
    keep: PositiveInt = Field(2, description="Checkpoints kept, besides the best one and those being evaluated.")
    best: bool = Field(
        True,
        description="Write a checkpoint of every version that is evaluated, and keep that of the best one "
        "(`eval.metric`).",
    )


class EvalSection(Section):
    every_steps: PositiveInt | None = Field(None, description="Steps between evaluations; first and last are always.")
    rows: PositiveInt | None = Field(None, description="Rows of `data.eval` used; none: all.")
    n: PositiveInt = Field(1, description="Responses per held-out prompt.")
    temperature: Temperature = Field(0.0, description="Temperature of held-out responses: 0, or 0.01 and above.")
    stop_at: float | None = Field(None, description="End the run once the held-out reward reaches this.")
    metric: str = Field(
        "reward",
        pattern=r"^(reward(/.+)?|(mean|maj|pass)@[1-9][0-9]*)$",
        description="What makes a version the best: `reward`, `reward/DATA_SOURCE`; with n above 1 also `mean@N`, "
        "`maj@N`, and `pass@K` for K = 1, 2, 4, ... up to n. Of equals the earliest stays.",
    )
    direction: Literal["max", "min"] = Field("max", description="Whether more or less of the metric is better.")
    right_at: float = Field(1.0, description="Reward from which a response is right, for `pass@K`.")
    keep_rows: int = Field(
        200, ge=0, description="Prompts of a round that are kept with their responses and rewards, in RUN/eval."
    )
    timeout_s: PositiveFloat = Field(60.0, description="Seconds an evaluation round may take before it is given up.")

    @model_validator(mode="after")
    def _metric_can_be(self) -> EvalSection:
        name, at, number = self.metric.partition("@")
        if at and not self.metric.startswith("reward/"):
            found = [1 << power for power in range(self.n.bit_length()) if 1 << power < self.n] + [self.n]
            if self.n == 1 or int(number) not in (found if name == "pass" else [self.n]):
                raise ValueError(f"eval.metric: {self.metric} is not measured with eval.n: {self.n}")
        return self


class LoggingSection(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of the services' logs.")
    console_every_steps: PositiveInt = Field(10, description="Steps between plain log lines without a terminal.")
    tensorboard: bool = Field(False, description="Write TensorBoard events into the run folder.")
    wandb: bool = Field(False, description="Log to Weights & Biases (WANDB_MODE=offline works).")
    wandb_project: str = Field("rollmesh", description="W&B project.")
    record: bool = Field(
        False, description="Keep every claimed batch with its payloads in RUN/recording, for `rollmesh replay`."
    )
    record_max_bytes: PositiveInt = Field(
        4 << 30, description="Bytes of the recording; the oldest batches are deleted beyond."
    )
    samples_per_step: int = Field(4, ge=0, description="Trained samples kept per step.")


class NetworkSection(Section):
    host: str = Field("127.0.0.1", description="Address that services bind.")
    port: int = Field(0, ge=0, le=65535, description="Port of the buffer (the mesh address); 0 picks a free one.")
    advertise: str | None = Field(None, description="Host under which others reach this machine, if not `host`.")
    metrics: bool = Field(True, description="Serve Prometheus metrics over HTTP, on a port of each service.")
    metrics_host: str = Field(
        "127.0.0.1", description="Address that metrics bind, whatever `host` is; off loopback they need a key."
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of the metrics, where each service has a host of its own; 0: a free one."
    )
    max_message_mb: PositiveInt = Field(64, description="Largest RPC message, in MiB.")
    rpc_timeout_s: PositiveFloat = Field(15.0, description="Deadline of a unary call, in seconds.")
    retry_s: PositiveFloat = Field(60.0, description="Seconds for which a service retries a lost peer before it exits.")


class SecuritySection(Section):
    token_file: Path | None = Field(
        None,
        description="File with the mesh's token, or with a grant of it (`rollmesh token`); none: `rollmesh run` makes "
        "one in the run folder.",
    )
    endpoint_key_file: Path | None = Field(
        None,
        description="File with the API key of the generators' HTTP endpoints; none: `rollmesh run` makes one in the "
        "run folder.",
    )
    metrics_key_file: Path | None = Field(
        None,
        description="File with the key (bearer token) of the services' metrics; none: `rollmesh run` makes one in the "
        "run folder.",
    )
    tls_cert: Path | None = Field(None, description="PEM certificate of the services; needs `tls_key`.")
    tls_key: Path | None = Field(None, description="PEM key of the services.")
    tls_ca: Path | None = Field(None, description="PEM certificate authority of the services that clients trust.")
    tls_client_ca: Path | None = Field(
        None, description="PEM certificate authority whose certificates clients must show; none: they need none."
    )
    allow_insecure: bool = Field(
        False,
        description="Allow what others on the network could reach unprotected, each refused otherwise: off loopback "
        "services without a token, metrics and endpoints without a key, and broadcasts of weights (`gloo`, `nccl`, "
        "SGLang's `distributed`); on all addresses the ranks that torchrun starts, and SGLang's `data_parallel`.",
    )

    @model_validator(mode="after")
    def _whole_tls(self) -> SecuritySection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: one of them alone encrypts nothing")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: clients' certificates come with TLS alone")
        return self


class ResourcesSection(Section):
    learner_threads: PositiveInt | None = Field(None, description="Compute threads of a learner rank; none: derived.")
    generator_threads: PositiveInt | None = Field(None, description="Compute threads of a generator; none: derived.")
    max_restarts: int = Field(
        5,
        ge=0,
        description="Restarts of one service before the run ends: within ten minutes of one that ends, and within a "
        "day of one that hangs.",
    )
    frozen_after_s: float = Field(
        20.0,
        ge=0.0,
        description="Seconds after which `rollmesh run` kills and restarts a service that is stopped by a signal, or "
        "that received so much processor time without answering its health check; three times as long for one that "
        "sleeps. The same for the embedded Redis. A generator whose engine does not answer ends itself: after as long "
        "where the engine is stopped, 30 times as much processor time, 9 times as long asleep. So does a learner "
        "that hangs in a step; its first one may take `buffer.stall_limit_s`. What waits for a processor is busy, and "
        "never killed. 0: never.",
    )


class Config(Section):
    """The whole configuration of a run."""

    run: RunSection = Field(default_factory=RunSection, description="The run's name, folder and seed.")
    model: ModelSection = Field(description="The model to train.")
    data: DataSection = Field(description="Prompts.")
    algorithm: AlgorithmSection = Field(
        default_factory=AlgorithmSection,
        description="The algorithm and its settings; a name alone will do (`algorithm: dapo`). Which settings there "
        "are depends on the name: see docs/algorithms.md; `rollmesh config explain FILE` prints them all with their "
        "values, and a run checks them before anything starts.",
    )
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="How responses are generated.")
    reward: RewardSection = Field(default_factory=RewardSection, description="How responses are scored.")
    learner: LearnerSection = Field(default_factory=LearnerSection, description="How the model is trained.")
    buffer: BufferSection = Field(default_factory=BufferSection, description="The replay buffer.")
    weights: WeightsSection = Field(default_factory=WeightsSection, description="How weights reach generators.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="Checkpoints.")
    eval: EvalSection = Field(default_factory=EvalSection, description="Evaluation on held-out prompts.")
    logging: LoggingSection = Field(default_factory=LoggingSection, description="Metrics and logs.")
    network: NetworkSection = Field(default_factory=NetworkSection, description="Addresses and deadlines.")
    security: SecuritySection = Field(default_factory=SecuritySection, description="Tokens and TLS.")
    resources: ResourcesSection = Field(default_factory=ResourcesSection, description="Threads and restarts.")

    @model_validator(mode="before")
    @classmethod
    def _algorithm_shorthand(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("algorithm"), str):
            return {**values, "algorithm": {"name": values["algorithm"]}}
        return values

    @model_validator(mode="after")
    def _no_secrets(self) -> Config:
        refuse_secrets(self.model_dump())
        return self

    @model_validator(mode="after")
    def _deadlines_nest(self) -> Config:
        if not self.reward.scorer_timeout_s < self.reward.timeout_s < self.rollout.reward_wait_s:
            raise ValueError(
                "deadlines must nest: reward.scorer_timeout_s < reward.timeout_s < rollout.reward_wait_s, got "
                f"{self.reward.scorer_timeout_s} / {self.reward.timeout_s} / {self.rollout.reward_wait_s}"
            )
        self._check_stall_limit()
        if self.rollout.top_p != 1.0 or self.rollout.top_k != 0:
            raise ValueError(
                "rollout.top_p and rollout.top_k must be off in training: the learner could not recompute the "
                "distribution sampled from"
            )
        if self.buffer.min_members > self.rollout.n:
            raise ValueError(
                f"buffer.min_members ({self.buffer.min_members}) exceeds rollout.n ({self.rollout.n}): set "
                f"buffer.min_members={self.rollout.n}"
            )
        return self

    def _check_stall_limit(self) -> None:
        """What may take its time in silence must end before the run does."""
        agent, limit_s = self.rollout.agent, self.buffer.stall_limit_s
        inner = {"buffer.stall_s": self.buffer.stall_s, "rollout.reward_wait_s": self.rollout.reward_wait_s}
        if agent.kind != "none":
            inner["rollout.agent.episode_timeout_s"] = agent.episode_timeout_s
        for name, seconds in inner.items():
            if limit_s and limit_s <= seconds:
                raise ValueError(
                    f"deadlines must nest: {name} < buffer.stall_limit_s, got {seconds:g} / {limit_s:g} (0: no limit)"
                )
