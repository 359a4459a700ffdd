"""A real two-node Slurm cluster on this machine, private to one test process: Debian's daemons with
their own folder, on the loopback interface.

All its processes, including jobs, live in a PID namespace whose first process dies with the process
that called `start_cluster`, so nothing outlives a test, not even one that was killed. The nodes n1
and n2 claim 16 processors and 8 GPUs each (with device files as stand-ins), so that requests for a
large cluster are granted.
"""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.run.shutdown import die_with_parent
from tests.support.free_port import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmdLogFile={folder}/slurmd_%n.log
SlurmdSpoolDir={folder}/spool_%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0,defer_batch
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=10
MinJobAge=3600
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=200000 Gres=gpu:8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory=200000 Gres=gpu:8
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=9
"""
CGROUP = "CgroupPlugin=autodetect\nConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\nConstrainSwapSpace=no\n"
INIT_SCRIPT = """
set -e
mount --bind {folder}/hosts /etc/hosts
export SLURM_CONF={folder}/slurm.conf
munged --foreground --force --key-file={folder}/munge.key --socket={folder}/munge.socket --pid-file={folder}/munged.pid \
    --log-file={folder}/munged.log --seed-file={folder}/munge.seed &
while [ ! -S {folder}/munge.socket ]; do sleep 0.05; done
slurmctld -D &
slurmd -D -N n1 &
slurmd -D -N n2 &
wait
"""
"""Script of the first process in the namespace."""
UNSHARE_COMMAND = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
FINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")


def find_missing() -> str:
    """Return the reason why no cluster can be started on this machine, or an empty string if one
    can.
    """
    if os.geteuid() != 0:
        return "needs root"
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        return f"without {', '.join(missing)}: bash launch/install_slurm.sh"
    alone = subprocess.run(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "true"], capture_output=True, text=True, check=False
    )
    return alone.stderr.strip()


@dataclass(slots=True, frozen=True)
class Job:
    """State of a job as reported by slurmctld."""

    state: str
    reason: str
    code: str
    restarts: int


@dataclass(slots=True, frozen=True)
class Cluster:
    folder: Path
    environment: Mapping[str, str]
    """Environment variables for commands that use the cluster."""
    init_process: subprocess.Popen

    def run(self, *words: str, cwd: Path, check: bool = True) -> str:
        """Run a command in the cluster's environment and return its output.

        It must exit with code 0 if `check` is True.
        """
        done = subprocess.run(
            words, cwd=cwd, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{self.read_logs()}"
        return done.stdout

    def read_jobs(self) -> dict[str, Job]:
        """Return {job id, or ARRAY_TASK: state of the job}."""
        told = self.run("scontrol", "show", "job", "--oneliner", cwd=self.folder)
        found = {}
        for line in told.splitlines():
            values = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
            if "JobState" in values:
                name = f"{values['ArrayJobId']}_{values['ArrayTaskId']}" if "ArrayJobId" in values else values["JobId"]
                found[name] = Job(values["JobState"], values["Reason"], values["ExitCode"], int(values["Restarts"]))
        return found

    def wait_for_jobs(self, *names: str, states: Sequence[str] = FINAL_STATES, timeout_s: float = 240) -> dict[str, Job]:
        """Wait until all these jobs are in one of the states, and return them."""
        deadline = time.monotonic() + timeout_s
        while True:
            jobs = self.read_jobs()
            if all(name in jobs and jobs[name].state in states for name in names):
                return {name: jobs[name] for name in names}
            assert time.monotonic() < deadline, f"{names} are not {states}: {jobs}\n{self.read_logs()}"
            time.sleep(0.3)

    def read_logs(self) -> str:
        return "\n".join(f"{path.name}: {line}" for path in self.folder.glob("*.log") for line in path.read_text().splitlines()[-15:])

    def list_processes(self) -> list[int]:
        """Return the ids of all daemons and jobs of the cluster, found by the PID namespace of its
        first process.
        """
        namespace = _namespace(_children(self.init_process.pid)[0]) if self.init_process.poll() is None else None
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if namespace and _namespace(pid) == namespace]

    def stop(self) -> None:
        """Kill the first process, which ends all other processes of its namespace."""
        pids = self.list_processes()
        self.init_process.kill()
        self.init_process.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.02)


@contextmanager
def start_cluster() -> Iterator[Cluster]:
    """Start a cluster with two idle nodes and stop it at the end of the block."""
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="slurm_", dir="/tmp")))
        _write(folder)
        log = closing.enter_context((folder / "first.log").open("wb"))
        first = subprocess.Popen(
            [*UNSHARE_COMMAND, "bash", str(folder / "first.sh")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )
        environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        found = Cluster(folder, environment, first)
        closing.callback(found.stop)
        deadline = time.monotonic() + 60
        while found.run("sinfo", "--noheader", "--Node", "--partition=all", "--format=%N %T", cwd=folder, check=False).split() != [
            "n1", "idle", "n2", "idle",
        ]:  # fmt: skip
            assert time.monotonic() < deadline and first.poll() is None, found.read_logs()
            time.sleep(0.2)
        yield found


def _write(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "state").mkdir()
    host = socket.gethostname()
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder, ports=[free_port() for _ in range(3)]))
    (folder / "cgroup.conf").write_text(CGROUP)
    devices = [folder / f"gpu{number}" for number in range(8)]
    for device in devices:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # same device as /dev/null
    (folder / "gres.conf").write_text(f"NodeName=n1,n2 Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "hosts").write_text(f"127.0.0.1 localhost n1 n2 {host}\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "first.sh").write_text(INIT_SCRIPT.format(folder=folder))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # the process has ended
        return ""
