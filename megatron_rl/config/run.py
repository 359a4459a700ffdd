"""What a run is and leaves behind."""

import math
from dataclasses import dataclass

from omegaconf import MISSING

from megatron_rl.config.checks import require, require_choice


@dataclass(kw_only=True, slots=True)
class RunSettings:
    """How long a run takes, how it is watched, and where it is kept."""

    dir: str = MISSING
    """The run folder: resolved config, metrics, recorded rollouts, final checkpoint."""
    seed: int = 0
    """Decides what is dealt, what is sampled, and how adapters begin; the same seed repeats a run."""
    steps: int = 40
    """Steps of training in stage=rl; the warm start has sft.steps."""
    eval_every: int = 0
    """Steps from one evaluation to the next; 0 evaluates once, at the end."""
    max_staleness: int = 0
    """Updates that the weights may have made since a rollout's oldest token when it is trained on; 0 waits for every episode of a step.
    From 1 on a step ends when enough groups are played, and what is under way goes on with the next weights."""
    max_failed_fraction: float = 0.1
    """Fraction of a step's rollouts, or of an evaluation's, that may fail through our own fault; when more do, the run stops."""
    max_logprob_abs_diff: float = 0.0
    """Mean absolute difference of engine and trainer logprobs, over the tokens that the current weights sampled, above which a run ends
    before its first update; 0 takes 0.001 in float32 and 0.05 in bfloat16. Every attempt compares once; a replay does not."""
    outage_timeout_s: float = 600.0
    """Seconds for which rollouts that failed because something of ours was down (sandbox, judge) are played again before they count."""
    dry: bool = False
    """Build every rank's share without memory, print the plan of memory for a GPU, and stop."""
    gpu: str = "h200"
    """The GPU that the plan is for: l4 (24 GB), l40s (48 GB), a100 (80 GB), h100 (80 GB) or h200 (141 GB)."""
    world: int = 0
    """Processes that a dry run plans for, one a GPU; 0 takes as many as torchrun started."""
    host_gb: float = 0.0
    """Main memory of a node in GB: a plan that needs more is refused, by a dry run and, on GPUs, by the run itself. 0: the doctor
    compares with this machine's, and a dry run, which may be for another one, judges none."""
    overwrite: bool = False
    """Move a folder aside that holds a run with other settings, or a finished one, and begin anew; otherwise such a folder is refused."""
    grace_s: float = 60.0
    """Seconds that a step's rollouts, or an evaluation's, may still take when the run is asked to stop; then they are given up."""
    require_improvement: bool = False
    """End with an error unless the mean return of the last 10 steps is above that of the first 10."""
    record_best: int = 1
    """Rollouts of each step with the highest rewards to keep as jsonl and png."""
    record_worst: int = 1
    """Rollouts of each step with the lowest rewards to keep as jsonl and png."""
    record: str = "best"
    """Which rollouts are kept: best, so many of each step as record_best and record_worst say; or all, besides, in Parquet files."""
    record_gb: float = 50.0
    """What record=all may take on disk, in GB; the oldest steps make room for new ones."""
    trace: int = 0
    """Steps, from the first of this life on, whose spans, episodes and tool calls are written for Perfetto (RUN/trace)."""
    rollout_only: bool = False
    """Play and record the steps with the weights of model.path, and train nothing; every rollout is kept."""
    replay: str = ""
    """Folder of rollouts that a run has recorded with record=all (RUN/rollouts): they are trained on again, without an engine."""

    def __post_init__(self) -> None:
        require_choice("run.gpu", self.gpu, ("l4", "l40s", "a100", "h100", "h200"))
        require(self.max_staleness >= 0, "run.max_staleness", self.max_staleness, "must not be negative; 0 waits for every episode")
        require(self.world >= 0, "run.world", self.world, "must not be negative; 0 takes what torchrun started")
        require(0 <= self.host_gb < math.inf, "run.host_gb", self.host_gb, "must be a number of GB; 0 takes this machine's memory")
        require_choice("run.record", self.record, ("best", "all"))
        require(0 < self.record_gb < math.inf, "run.record_gb", self.record_gb, "must be a number of GB above 0")
        remedy = "rollouts that nobody trains on are for a record: use run.record=all, without run.replay"
        require(not self.rollout_only or (self.record == "all" and not self.replay), "run.rollout_only", self.rollout_only, remedy)
        remedy = "nothing is updated, so that nothing grows stale: use run.max_staleness=0"
        require(not self.rollout_only or self.max_staleness == 0, "run.max_staleness", self.max_staleness, remedy)
        remedy = "a replay has no engine to evaluate with: use run.eval_every=0, and launch/evaluate.py on what was trained"
        require(not self.replay or self.eval_every == 0, "run.eval_every", self.eval_every, remedy)
        require(self.steps >= 1, "run.steps", self.steps, "must be at least 1")
        require(self.grace_s >= 0, "run.grace_s", self.grace_s, "must not be negative")
        require(
            0 <= self.max_failed_fraction < 1,
            "run.max_failed_fraction",
            self.max_failed_fraction,
            "must lie in [0, 1): a step needs rollouts that were scored",
        )
        remedy = "must not be negative; 0 takes the bound of the precision"
        require(self.max_logprob_abs_diff >= 0, "run.max_logprob_abs_diff", self.max_logprob_abs_diff, remedy)
        require(
            0 <= self.outage_timeout_s < math.inf,
            "run.outage_timeout_s",
            self.outage_timeout_s,
            "must be a number of seconds; 0 waits for nothing",
        )
        for key in ("eval_every", "record_best", "record_worst", "trace"):
            require(getattr(self, key) >= 0, f"run.{key}", getattr(self, key), "must not be negative")
        remedy = "run.require_improvement compares the first with the last 10 steps: use at least 20"
        require(not self.require_improvement or self.steps >= 20, "run.steps", self.steps, remedy)


@dataclass(kw_only=True, slots=True)
class CheckpointSettings:
    """Complete training states under run.dir/checkpoints: weights, optimizer, schedule, generators, the run's own memory."""

    every: int = 0
    """Steps between checkpoints; 0 leaves them to checkpoint.every_s."""
    every_s: float = 1800.0
    """Seconds after which the first step that ends writes a checkpoint, counted from the last one; 0 sets no such limit."""
    keep_last: int = 2
    """Newest checkpoints that are kept when older ones are removed."""
    keep_best: int = 1
    """Checkpoints with the highest held-out greedy success that are kept besides the newest; those without an evaluation do not count."""
    save_last: bool = True
    """Write one of the run's last step, so that a finished run can be made longer; costs the disk of one checkpoint beside RUN/final."""
    allow_repeat: bool = False
    """Go on from the newest checkpoint although a run that ended in order has done later steps: these are done again, and what they
    left is kept in RUN/superseded. Without it that is refused. After a crash the steps since the newest checkpoint are always repeated."""
    background: bool = True
    """Write while training goes on; the folder appears when it is complete."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", self.every, "must not be negative; 0 leaves it to checkpoint.every_s")
        require(self.every_s >= 0, "checkpoint.every_s", self.every_s, "must not be negative; 0 sets no such limit")
        require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "must be at least 1")
        require(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "must not be negative")


@dataclass(kw_only=True, slots=True)
class WandbSettings:
    """Metrics in Weights & Biases, beside metrics.jsonl and TensorBoard."""

    mode: str = "disabled"
    """What W&B gets: nothing (disabled), files in the run folder (offline), or all of it at once (online)."""
    project: str = "megatron-rl"
    """The W&B project that the run belongs to."""

    def __post_init__(self) -> None:
        require_choice("wandb.mode", self.mode, ("disabled", "offline", "online"))


@dataclass(kw_only=True, slots=True)
class TrackioSettings:
    """Metrics in trackio, whose page is on this machine (trackio show), beside metrics.jsonl and TensorBoard."""

    mode: str = "disabled"
    """What trackio gets: nothing (disabled), or all of it in its own folder on this machine (local; TRACKIO_DIR, else in HF_HOME)."""
    project: str = "megatron-rl"
    """The trackio project that the run belongs to."""

    def __post_init__(self) -> None:
        require_choice("trackio.mode", self.mode, ("disabled", "local"))
