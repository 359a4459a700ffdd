"""Settings of the Slurm job that launch/submit.py submits."""

from dataclasses import dataclass, field

from megatron_rl.config.checks import require


@dataclass(kw_only=True, slots=True)
class SlurmSettings:
    """Resources of a run's Slurm job; only launch/submit.py reads these settings."""

    nodes: int = 1
    """Number of nodes of the job; one launcher runs on each node."""
    gpus: int = 0
    """Number of GPUs per node that the job requests (sbatch --gpus-per-node); 0 requests none."""
    processes: int = 0
    """Number of processes per node; 0 starts one process per GPU that Slurm assigns to the
    node, or a single process if Slurm assigns no GPU."""
    time: str = ""
    """Time limit of the job in sbatch's format, e.g. 8:00:00 or 2-0; empty uses the limit of the
    partition."""
    signal_s: int = 300
    """Time in seconds between the stop signal and the job's time limit; run.grace_s, one step's
    update and a checkpoint must fit into this time."""
    requeue: bool = False
    """Requeue the job if its time limit expires before the run is finished; the requeued job
    resumes in the same run directory."""
    sbatch: list[str] = field(default_factory=list)
    """Additional sbatch options, e.g. --account=NAME and --partition=NAME."""

    def __post_init__(self) -> None:
        require(self.nodes >= 1, "slurm.nodes", self.nodes, "must be at least 1")
        require(self.gpus >= 0, "slurm.gpus", self.gpus, "must not be negative; 0 requests none")
        require(
            self.processes >= 0,
            "slurm.processes",
            self.processes,
            "must not be negative; 0 starts one process per GPU, or a single process without GPUs",
        )
        require(self.signal_s >= 0, "slurm.signal_s", self.signal_s, "must not be negative")
        for word in self.sbatch:
            remedy = f"{word} is not an option of sbatch; write --KEY=VALUE"
            require(word.startswith("-") and "\n" not in word, "slurm.sbatch", self.sbatch, remedy)
