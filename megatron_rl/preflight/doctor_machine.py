"""What the doctor says of a machine: processors, memory, the run folder's disk, GPUs and what drives them, and whether the plan fits."""

import os
import re
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from megatron_rl.config import Settings
from megatron_rl.distributed.world import max_open_files, raise_file_limit, read_world
from megatron_rl.models.hf_config import read_spec
from megatron_rl.preflight import gpus
from megatron_rl.preflight.check_report import Report
from megatron_rl.preflight.settings import check_sizes
from megatron_rl.registry import Plugins, has_critic, uses_sandbox

GIB = 1 << 30
LOCKS = Path(__file__).resolve().parents[2] / "requirements"
"""In a checkout; a wheel brings none."""
COMPILERS = ("cc", "gcc", "clang")
WRITTEN_BYTES = 64 << 20
STATE_BYTES = 7
"""Of a checkpoint for each byte of the weights in bfloat16: main weights and both moments in float32, and the weights."""


def look_at_machine(settings: Settings, report: Report) -> None:
    """Processors, memory, disk, GPUs."""
    memory, folder = psutil.virtual_memory(), Path(settings.run.dir).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    report.say("machine", f"{os.cpu_count()} cores, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB memory free")
    look_at_files(report)
    needed = sum(path.stat().st_size for path in Path(settings.model.path).glob("*.safetensors"))
    free = shutil.disk_usage(there).free
    report.say("run.dir", f"{folder}, {free / GIB:.1f} GiB free{look_at_disk(settings, there, report, weights=needed)}")
    if free < needed:
        report.errors.append(f"run.dir={settings.run.dir}: the final weights take {needed / GIB:.1f} GiB; choose another disk")
    if memory.available < needed:
        report.warnings.append(f"model.path={settings.model.path}: its weights ({needed / GIB:.1f} GiB) exceed the memory that is free")
    look_at_gpus(settings, report)
    look_at_kernels(settings, report)
    look_at_versions([LOCKS / "torch.txt", LOCKS / ("gpu.txt" if torch.version.cuda else "cpu.txt")], report)


def look_at_files(report: Report) -> None:
    """Report how many files a process of the run may open."""
    try:
        raise_file_limit()
    except ValueError as error:
        report.fail("open files", str(error))
    else:
        report.say("open files", f"up to {max_open_files()} a process")


def look_at_disk(settings: Settings, there: Path, report: Report, *, weights: int) -> str:
    """How fast it takes what is flushed to it, as words for its row; '' where it cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor_") as file:
            began = time.perf_counter()
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
            speed = WRITTEN_BYTES / (time.perf_counter() - began)
    except PermissionError:
        report.errors.append(f"run.dir={settings.run.dir}: {there} cannot be written; choose another folder")
        return ""
    except OSError as full:
        report.errors.append(f"run.dir={settings.run.dir}: {there}: {full.strerror}; choose another disk")
        return ""
    takes = STATE_BYTES * weights / speed
    if takes > settings.parallel.straggler_timeout_s:
        hours = f"up to {takes / 3600:.1f} hours"
        remedy = f"at {speed / 1e6:.0f} MB/s a checkpoint takes {hours}; choose another disk, or raise parallel.straggler_timeout_s"
        report.warnings.append(f"run.dir={settings.run.dir}: {remedy}")
    return f", {speed / 1e6:.0f} MB/s"


def look_at_gpus(settings: Settings, report: Report) -> None:
    """Those that torch sees, and what keeps it from seeing them."""
    devices = gpus.visible_gpus()
    report.say("GPUs", ", ".join(f"{device.name} {device.memory / GIB:.0f} GiB" for device in devices) or "none")
    driver = gpus.read_driver_version(gpus.DRIVER)
    if settings.engine.device == "cuda" and not devices:
        report.errors.append("engine.device=cuda: this machine has no usable GPU; use engine.device=auto")
    if not driver:
        return
    built, nccl = torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version())) if devices else "unknown"
    report.say("CUDA", f"driver {driver}, torch for CUDA {built}, NCCL {nccl}")
    report.errors += [line for line in [gpus.driver_error(driver, built, num_devices=len(devices))] if line]
    if built and not any(map(shutil.which, COMPILERS)):
        report.errors.append(f"PATH: has no {' or '.join(COMPILERS)}, with which Triton builds its launchers (Debian: apt-get install gcc)")
    if built and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        package = f"python{sysconfig.get_python_version()}-dev"
        report.errors.append(f"{sysconfig.get_path('include')}: has no Python.h, which Triton needs (Debian: apt-get install {package})")
    if devices:
        look_at_job(settings, devices, report)


def look_at_job(settings: Settings, devices: Sequence[gpus.Gpu], report: Report) -> None:
    """Whether the GPUs of this node go together, and have room to talk. Outside of a job: as many of them as run.world says, or all."""
    here, room = read_world(), shutil.disk_usage(gpus.SHARED_MEMORY).free
    size = here.size if here.size > 1 else settings.run.world or len(devices)
    mine = devices[: here.local_size if here.size > 1 else size]
    refused, doubted = (gpus.shared_memory_error(room, len(mine), each=each) for each in (gpus.MIN_SHARED_BYTES, gpus.SHARED_BYTES))
    report.errors += gpus.find_mismatches(settings, mine, num_ranks=size) + ([refused] if refused else [])
    report.warnings += [doubted] if doubted and not refused else []


def look_at_kernels(settings: Settings, report: Report) -> None:
    """Which ones run, from which package."""
    from megatron_rl.policy.kernels import apex_error, kernels, transformer_engine_error  # brings Megatron

    report.say("kernels", ", ".join(f"{what}: {whose}" for what, whose in kernels(settings.lora).items()))
    report.warnings += [line for line in (transformer_engine_error(), apex_error()) if line]


def look_at_versions(locks: Sequence[Path], report: Report) -> None:
    """Compare the installed versions with those of the lock files."""
    if not all(lock.is_file() for lock in locks):
        report.say("versions", "no lock beside this package")
        return
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", "".join(lock.read_text() for lock in locks), re.MULTILINE))
    others, names = others_of(pinned), " and ".join(f"{lock.parent.name}/{lock.name}" for lock in locks)
    report.say("versions", f"{len(pinned) - len(others)} of {len(pinned)} as in {names}")
    if others:
        told = "; ".join(f"{name} {found or 'is not installed'}, not {pinned[name]}" for name, found in [*others.items()][:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        report.warnings.append(f"{names}: {told}{more}; bash launch/install.sh")


def others_of(pinned: Mapping[str, str]) -> dict[str, str]:
    """{package: the version that is installed instead}; '' of one that is not. A build's own suffix (+cpu) is no difference."""
    found = {}
    for name, wanted in pinned.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = ""
        if installed.partition("+")[0] != wanted.partition("+")[0]:
            found[name] = installed
    return found


def look_at_plan(settings: Settings, report: Report, own: Plugins) -> None:
    """Whether a node's main memory holds what its ranks may need; and the GPUs, where there are any or run.world plans for some:
    what fits, and the seconds that are expected."""
    from megatron_rl.memory_plan.gpu_memory import plan, require_fit  # brings Megatron
    from megatron_rl.memory_plan.gpu_specs import at_hand, in_gb
    from megatron_rl.memory_plan.host_memory import host_misfit, plan_host
    from megatron_rl.memory_plan.rank_shares import shares
    from megatron_rl.memory_plan.step_time import case_of, in_words

    model, parallel = read_spec(settings.model.path), settings.parallel
    size, has_values = (
        settings.run.world or max(read_world().size, parallel.tp * parallel.pp, settings.engine.tp),
        has_critic(settings, own),
    )
    try:
        check_sizes(settings, model, size, own)
    except ValueError as error:
        report.fail("layout", str(error))
        return
    found = shares(model, settings, world_size=size, has_values=has_values)
    host = plan_host(found, model, settings, world_size=size, has_boxes=uses_sandbox(settings, own))
    misfit = host_misfit(host, settings, world_size=size)
    report.say("host", f"{size} processes" + (" may not fit" if misfit else " fit"))
    report.warnings += [misfit] if misfit else []
    if not (settings.run.world or torch.cuda.device_count()):
        return
    try:
        memory = 0 if settings.run.world else min(gpu.memory for gpu in gpus.visible_gpus())  # of the GPUs that are here
        at = settings if not memory else replace(settings, run=replace(settings.run, gpu=at_hand(memory, named=settings.run.gpu)))
        planned = plan(model, at, world_size=size, has_values=has_values, memory=memory)
        report.say("plan", require_fit(planned))
        if settings.stage == "rl":
            report.say("seconds", in_words(case_of(model, settings, planned)))
    except ValueError as error:
        report.fail("plan", str(error))
        return
    if torch.cuda.device_count() and (small := gpus.find_too_small(settings, gpus.visible_gpus(), needed=planned.peak)):
        report.errors.append(small)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        if free < planned.peak:
            remedy = f"{in_gb(free)} of its {in_gb(total)} are free, and the plan needs {in_gb(planned.peak)}"
            report.errors.append(f"GPU {index}: {remedy}; end what else runs on it (nvidia-smi), or plan for it by run.gpu")
