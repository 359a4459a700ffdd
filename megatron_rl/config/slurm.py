"""The job that launch/submit.py asks Slurm for."""

from dataclasses import dataclass, field

from megatron_rl.config.checks import require


@dataclass(kw_only=True, slots=True)
class SlurmSettings:
    """What a job of this run asks for; read by launch/submit.py alone."""

    nodes: int = 1
    """Nodes of the job, with one launcher on each."""
    gpus: int = 0
    """GPUs of every node that the job asks for (sbatch --gpus-per-node); 0 asks for none."""
    processes: int = 0
    """Processes on every node; 0 starts one for each GPU that Slurm gives the node, else one."""
    time: str = ""
    """The job's time limit as sbatch takes it, 8:00:00 or 2-0; without one it is the partition's."""
    signal_s: int = 300
    """Seconds before the time limit at which the run is asked to stop: run.grace_s, a step's update and a checkpoint must fit."""
    requeue: bool = False
    """Put the job back into the queue when its time is over before the run is finished; it goes on in the same folder."""
    sbatch: list[str] = field(default_factory=list)
    """Further words for sbatch, --account=NAME and --partition=NAME say."""

    def __post_init__(self) -> None:
        require(self.nodes >= 1, "slurm.nodes", self.nodes, "must be at least 1")
        require(self.gpus >= 0, "slurm.gpus", self.gpus, "must not be negative; 0 asks for none")
        require(self.processes >= 0, "slurm.processes", self.processes, "must not be negative; 0 starts one for each GPU, else one")
        require(self.signal_s >= 0, "slurm.signal_s", self.signal_s, "must not be negative")
        for word in self.sbatch:
            remedy = f"{word} is no option of sbatch; write --KEY=VALUE"
            require(word.startswith("-") and "\n" not in word, "slurm.sbatch", self.sbatch, remedy)
