"""Settings of a run: length, outputs, checkpoints and metric loggers."""

import math
from dataclasses import dataclass

from omegaconf import MISSING

from megatron_rl.config.checks import require, require_choice


@dataclass(kw_only=True, slots=True)
class RunSettings:
    """Length, limits and outputs of a run."""

    dir: str = MISSING
    """Run directory, which contains the resolved config, metrics, recorded rollouts, checkpoints
    and the final weights."""
    seed: int = 0
    """Random seed for the data order, sampling and the initialization of adapters; the same seed
    reproduces a run."""
    steps: int = 40
    """Number of training steps in stage=rl, unless run.epochs is set; stage=sft uses sft.steps."""
    epochs: float = 0.0
    """Number of passes over the training examples in stage=rl, e.g. 0.5 or 3: sets run.steps to
    epochs * examples / batch.prompts_per_step, rounded up. 0 uses run.steps."""
    eval_every: int = 0
    """Number of steps between evaluations; 0 evaluates once, at the end."""
    max_staleness: int = 0
    """Maximum staleness of a rollout's oldest token, in weight updates. With 0, a step waits for
    all its episodes. With 1 or more, a step ends when enough groups are complete, and unfinished
    episodes continue with the next weights."""
    max_failed_fraction: float = 0.1
    """Maximum fraction of the rollouts in a step or an evaluation that may fail due to
    infrastructure errors; if more rollouts fail, the run stops with an error."""
    max_logprob_abs_diff: float = 0.0
    """Maximum mean absolute difference between rollout and trainer logprobs, over tokens sampled
    from the current weights. Each attempt checks this difference once, before its first update,
    except in replay mode. 0 selects a limit of 0.001 in float32 and 0.05 in bfloat16."""
    outage_timeout_s: float = 600.0
    """Maximum time in seconds for retrying rollouts that failed because a service (e.g. the sandbox
    or the judge) was unavailable. Rollouts that are still failing after this time count as
    failed."""
    mode: str = "train"
    """Mode of stage=rl. train: train the policy. rollout_only: generate and save rollouts with the
    weights in model.path, without training. replay: train on saved rollouts, without an engine."""
    overwrite: bool = False
    """If run.dir contains a finished run or a run with other settings, move the old run to a backup
    directory and start a new run; false raises an error instead."""
    grace_s: float = 60.0
    """Grace period in seconds after a stop signal, during which the running rollouts of a step or
    an evaluation may finish. After the grace period, unfinished rollouts are cancelled."""
    require_improvement: bool = False
    """Exit with an error unless the mean return of the last 10 steps is above the mean return of
    the first 10."""
    trace: int = 0
    """Number of steps to trace at the start of each attempt. Spans, episodes and tool calls are
    written to RUN/trace in a format that Perfetto reads. 0 disables tracing."""

    def __post_init__(self) -> None:
        require_choice("run.mode", self.mode, ("train", "rollout_only", "replay"))
        require(self.max_staleness >= 0, "run.max_staleness", self.max_staleness, "must not be negative; 0 waits for every episode")
        remedy = "run.mode=rollout_only updates no weights, so no rollout gets stale: use run.max_staleness=0"
        require(self.mode != "rollout_only" or self.max_staleness == 0, "run.max_staleness", self.max_staleness, remedy)
        remedy = "a replay has no engine to evaluate with: use run.eval_every=0, and launch/evaluate.py on the trained model"
        require(self.mode != "replay" or self.eval_every == 0, "run.eval_every", self.eval_every, remedy)
        remedy = "requires training examples, which a replay does not read: use run.steps"
        require(self.mode != "replay" or self.epochs == 0, "run.epochs", self.epochs, remedy)
        require(self.steps >= 1, "run.steps", self.steps, "must be at least 1")
        remedy = "must be a finite, non-negative number; 0 uses run.steps"
        require(0 <= self.epochs < math.inf, "run.epochs", self.epochs, remedy)
        require(self.grace_s >= 0, "run.grace_s", self.grace_s, "must not be negative")
        require(
            0 <= self.max_failed_fraction < 1,
            "run.max_failed_fraction",
            self.max_failed_fraction,
            "must be in [0, 1), because each step requires scored rollouts",
        )
        remedy = "must not be negative; 0 uses the default of the dtype"
        require(self.max_logprob_abs_diff >= 0, "run.max_logprob_abs_diff", self.max_logprob_abs_diff, remedy)
        require(
            0 <= self.outage_timeout_s < math.inf,
            "run.outage_timeout_s",
            self.outage_timeout_s,
            "must be a finite, non-negative number of seconds; 0 disables retries",
        )
        for key in ("eval_every", "trace"):
            require(getattr(self, key) >= 0, f"run.{key}", getattr(self, key), "must not be negative")


@dataclass(kw_only=True, slots=True)
class PlanSettings:
    """Settings of the memory plan, including the hardware to plan for."""

    only: bool = False
    """Print the memory plan for GPUs and host, then exit without allocating the planned
    memory."""
    gpu: str = "h200"
    """GPU model to plan for: l4 (24 GB), l40s (48 GB), a100 (80 GB), h100 (80 GB) or h200 (141
    GB)."""
    world_size: int = 0
    """Number of processes to plan for, one per GPU; 0 uses the number of processes that torchrun
    started."""
    host_gb: float = 0.0
    """Host memory of a node in GB. If the memory plan exceeds this value, a run on GPUs or with
    plan.only=true stops with an error. With 0, only the doctor command checks the plan, using the
    host memory of the current machine."""

    def __post_init__(self) -> None:
        require_choice("plan.gpu", self.gpu, ("l4", "l40s", "a100", "h100", "h200"))
        require(
            self.world_size >= 0,
            "plan.world_size",
            self.world_size,
            "must not be negative; 0 uses the number of processes started by torchrun",
        )
        require(
            0 <= self.host_gb < math.inf,
            "plan.host_gb",
            self.host_gb,
            "must be a finite, non-negative number of GB; 0 uses this machine's memory",
        )


@dataclass(kw_only=True, slots=True)
class RolloutStoreSettings:
    """Settings for saving rollouts and for replaying saved rollouts."""

    save: str = "best"
    """Rollouts to save. best: the highest- and lowest-reward rollouts of each step (keep_best,
    keep_worst). all: the same rollouts and, in Parquet files, every rollout."""
    max_gb: float = 50.0
    """Maximum disk space in GB for the Parquet files of rollouts.save=all; the oldest steps are
    deleted when new steps need the space."""
    keep_best: int = 1
    """Number of highest-reward rollouts per step to save as JSONL and PNG."""
    keep_worst: int = 1
    """Number of lowest-reward rollouts per step to save as JSONL and PNG."""
    replay_from: str = ""
    """Directory of saved rollouts (RUN/rollouts of a run with rollouts.save=all), for
    run.mode=replay and launch/rescore.py."""

    def __post_init__(self) -> None:
        require_choice("rollouts.save", self.save, ("best", "all"))
        require(0 < self.max_gb < math.inf, "rollouts.max_gb", self.max_gb, "must be a positive, finite number of GB")
        for key in ("keep_best", "keep_worst"):
            require(getattr(self, key) >= 0, f"rollouts.{key}", getattr(self, key), "must not be negative")


@dataclass(kw_only=True, slots=True)
class CheckpointSettings:
    """Checkpoints in run.dir/checkpoints: weights, optimizer, learning rate, RNG and run state."""

    every: int = 0
    """Number of steps between checkpoints; with 0, only checkpoint.every_s determines the
    interval."""
    every_s: float = 1800.0
    """Maximum time in seconds between checkpoints: when this time has passed since the start of the
    last save, a checkpoint is written at the end of the current step. 0 disables time-based
    checkpoints."""
    keep_last: int = 2
    """Number of newest checkpoints to keep; older checkpoints are deleted."""
    keep_best: int = 1
    """Number of best checkpoints to keep in addition to the newest checkpoints. Checkpoints are
    ranked by greedy success rate on held-out data; checkpoints without an evaluation are not
    ranked."""
    save_last: bool = True
    """Write a checkpoint at the last step, so that a finished run can be extended. The checkpoint
    takes disk space in addition to RUN/final."""
    allow_repeat: bool = False
    """Allow a run that ended cleanly to resume from a checkpoint that is older than the last step
    of the run; false raises an error instead. The steps after the checkpoint are repeated, and
    their old records are moved to RUN/superseded. After a crash, the steps after the newest
    checkpoint are always repeated."""
    background: bool = True
    """Write checkpoints in the background while training continues; the checkpoint directory
    appears once it is complete."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", self.every, "must not be negative; 0 uses only checkpoint.every_s")
        require(self.every_s >= 0, "checkpoint.every_s", self.every_s, "must not be negative; 0 disables time-based checkpoints")
        require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "must be at least 1")
        require(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "must not be negative")


@dataclass(kw_only=True, slots=True)
class WandbSettings:
    """Settings for logging to Weights & Biases, in addition to metrics.jsonl and TensorBoard."""

    mode: str = "disabled"
    """W&B mode: disabled, offline (files in the run directory) or online (upload during the
    run)."""
    project: str = "megatron-rl"
    """Name of the run's W&B project."""

    def __post_init__(self) -> None:
        require_choice("wandb.mode", self.mode, ("disabled", "offline", "online"))


@dataclass(kw_only=True, slots=True)
class TrackioSettings:
    """Settings for local logging with Trackio, in addition to metrics.jsonl and TensorBoard."""

    mode: str = "disabled"
    """Trackio mode: disabled, or local (write to a local directory; view the metrics with trackio
    show). The directory is given by the environment variable TRACKIO_DIR; if TRACKIO_DIR is not
    set, a directory in HF_HOME is used."""
    project: str = "megatron-rl"
    """Name of the run's Trackio project."""

    def __post_init__(self) -> None:
        require_choice("trackio.mode", self.mode, ("disabled", "local"))
