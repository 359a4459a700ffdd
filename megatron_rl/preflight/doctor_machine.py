"""The doctor's checks of a machine: CPU, memory, disk, GPUs, packages and memory plan."""

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
import torch.cuda.nccl

from megatron_rl.config import Settings
from megatron_rl.distributed.world import max_open_files, raise_file_limit, read_world
from megatron_rl.models.hf_config import read_spec
from megatron_rl.preflight import gpus
from megatron_rl.preflight.check_report import CheckReport
from megatron_rl.preflight.settings import check_sizes
from megatron_rl.registry import Plugins, has_critic, uses_sandbox

GIB = 1 << 30
LOCK_FOLDER = Path(__file__).resolve().parents[2] / "requirements"
"""Directory of the lock files in a checkout; a wheel contains no lock files."""
COMPILERS = ("cc", "gcc", "clang")
DISK_TEST_BYTES = 64 << 20
CHECKPOINT_BYTES_PER_WEIGHT_BYTE = 7
"""Number of checkpoint bytes per byte of bfloat16 weights: 6 for the float32 main weights and the
optimizer's two moments, and 1 for the bfloat16 weights.
"""


def check_machine(settings: Settings, report: CheckReport) -> None:
    """Check CPU, memory, disk, GPUs, kernels and package versions."""
    memory, folder = psutil.virtual_memory(), Path(settings.run.dir).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    report.add_finding("machine", f"{os.cpu_count()} cores, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB memory free")
    check_open_files(report)
    needed = sum(path.stat().st_size for path in Path(settings.model.path).glob("*.safetensors"))
    free = shutil.disk_usage(there).free
    report.add_finding("run.dir", f"{folder}, {free / GIB:.1f} GiB free{check_disk_speed(settings, there, report, weight_bytes=needed)}")
    if free < needed:
        report.errors.append(f"run.dir={settings.run.dir}: the final weights take {needed / GIB:.1f} GiB; choose another disk")
    if memory.available < needed:
        report.warnings.append(f"model.path={settings.model.path}: its weights ({needed / GIB:.1f} GiB) exceed the free memory")
    check_visible_gpus(settings, report)
    check_kernels(settings, report)
    check_versions([LOCK_FOLDER / "torch.txt", LOCK_FOLDER / ("gpu.txt" if torch.version.cuda else "cpu.txt")], report)


def check_open_files(report: CheckReport) -> None:
    """Raise the limit on open files, and report the new limit."""
    try:
        raise_file_limit()
    except ValueError as error:
        report.add_failure("open files", str(error))
    else:
        report.add_finding("open files", f"up to {max_open_files()} per process")


def check_disk_speed(settings: Settings, existing_folder: Path, report: CheckReport, *, weight_bytes: int) -> str:
    """Measure the disk's write speed, including the flush to disk.

    Return the speed as text for the report, or an empty string if the directory is not writable.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=existing_folder, prefix=".doctor_") as file:
            began = time.perf_counter()
            file.write(bytes(DISK_TEST_BYTES))
            file.flush()
            os.fsync(file.fileno())
            speed = DISK_TEST_BYTES / (time.perf_counter() - began)
    except PermissionError:
        report.errors.append(f"run.dir={settings.run.dir}: {existing_folder} cannot be written; choose another folder")
        return ""
    except OSError as full:
        report.errors.append(f"run.dir={settings.run.dir}: {existing_folder}: {full.strerror}; choose another disk")
        return ""
    takes = CHECKPOINT_BYTES_PER_WEIGHT_BYTE * weight_bytes / speed
    if takes > settings.parallel.straggler_timeout_s:
        hours = f"up to {takes / 3600:.1f} hours"
        remedy = f"at {speed / 1e6:.0f} MB/s a checkpoint takes {hours}; choose another disk, or raise parallel.straggler_timeout_s"
        report.warnings.append(f"run.dir={settings.run.dir}: {remedy}")
    return f", {speed / 1e6:.0f} MB/s"


def check_visible_gpus(settings: Settings, report: CheckReport) -> None:
    """Check the GPUs that torch finds, the driver, and the compiler that Triton requires."""
    devices = gpus.visible_gpus()
    report.add_finding("GPUs", ", ".join(f"{device.name} {device.memory_bytes / GIB:.0f} GiB" for device in devices) or "none")
    driver = gpus.read_driver_version(gpus.DRIVER)
    if settings.engine.device == "cuda" and not devices:
        report.errors.append("engine.device=cuda: this machine has no usable GPU; use engine.device=auto")
    if not driver:
        return
    built, nccl = torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version())) if devices else "unknown"
    report.add_finding("CUDA", f"driver {driver}, torch for CUDA {built}, NCCL {nccl}")
    report.errors += [line for line in [gpus.driver_error(driver, built, num_devices=len(devices))] if line]
    if built and not any(map(shutil.which, COMPILERS)):
        report.errors.append(
            f"PATH: contains no {' or '.join(COMPILERS)}, which Triton needs to build its launchers (Debian: apt-get install gcc)"
        )
    if built and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        package = f"python{sysconfig.get_python_version()}-dev"
        report.errors.append(
            f"{sysconfig.get_path('include')}: contains no Python.h, which Triton needs (Debian: apt-get install {package})"
        )
    if devices:
        check_job_gpus(settings, devices, report)


def check_job_gpus(settings: Settings, devices: Sequence[gpus.Gpu], report: CheckReport) -> None:
    """Check that the job's GPUs on this node have the same type and enough shared memory.

    Outside of a job, the first plan.world_size GPUs of the machine are checked, or all GPUs if
    plan.world_size is 0.
    """
    here, free_bytes = read_world(), shutil.disk_usage(gpus.SHARED_MEMORY).free
    size = here.size if here.size > 1 else settings.plan.world_size or len(devices)
    mine = devices[: here.local_size if here.size > 1 else size]
    refused, doubted = (
        gpus.shared_memory_error(free_bytes, len(mine), bytes_per_rank=each) for each in (gpus.MIN_SHARED_BYTES, gpus.SHARED_BYTES)
    )
    report.errors += gpus.find_mismatches(settings, mine, num_ranks=size) + ([refused] if refused else [])
    report.warnings += [doubted] if doubted and not refused else []


def check_kernels(settings: Settings, report: CheckReport) -> None:
    """Report which implementation is used for each kernel."""
    from megatron_rl.policy.kernels import apex_error, describe_kernels, transformer_engine_error  # imports Megatron

    report.add_finding("kernels", ", ".join(f"{what}: {whose}" for what, whose in describe_kernels(settings.lora).items()))
    report.warnings += [line for line in (transformer_engine_error(), apex_error()) if line]


def check_versions(locks: Sequence[Path], report: CheckReport) -> None:
    """Compare the installed package versions with the versions in the lock files."""
    if not all(lock.is_file() for lock in locks):
        report.add_finding("versions", "no lock file next to this package")
        return
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", "".join(lock.read_text() for lock in locks), re.MULTILINE))
    others, names = find_version_mismatches(pinned), " and ".join(f"{lock.parent.name}/{lock.name}" for lock in locks)
    report.add_finding("versions", f"{len(pinned) - len(others)} of {len(pinned)} match {names}")
    if others:
        told = "; ".join(f"{name} {found or 'is not installed'}, not {pinned[name]}" for name, found in [*others.items()][:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        report.warnings.append(f"{names}: {told}{more}; bash launch/install.sh")


def find_version_mismatches(pinned: Mapping[str, str]) -> dict[str, str]:
    """Return {package: installed version} for the packages that differ from the lock files.

    The version is empty if the package is not installed. Local version suffixes (+cpu) are ignored.
    """
    found = {}
    for name, wanted in pinned.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = ""
        if installed.partition("+")[0] != wanted.partition("+")[0]:
            found[name] = installed
    return found


def check_memory_plan(settings: Settings, report: CheckReport, plugins: Plugins) -> None:
    """Check that the memory plan fits into host memory and, if there are GPUs, into GPU memory.

    If plan.world_size is set, GPU memory is planned even on a machine without GPUs. The report
    includes the expected time per step.
    """
    from megatron_rl.memory_plan.gpu_memory import plan_gpu_memory, require_fit  # imports Megatron
    from megatron_rl.memory_plan.gpu_specs import closest_gpu_name, format_gb
    from megatron_rl.memory_plan.host_memory import host_memory_error, plan_host_memory
    from megatron_rl.memory_plan.rank_shares import compute_model_shares
    from megatron_rl.memory_plan.step_time import describe_step_time, make_step_time_inputs

    model, parallel = read_spec(settings.model.path), settings.parallel
    size, has_values = (
        settings.plan.world_size or max(read_world().size, parallel.tp * parallel.pp, settings.engine.tp),
        has_critic(settings, plugins),
    )
    try:
        check_sizes(settings, model, size, plugins)
    except ValueError as error:
        report.add_failure("layout", str(error))
        return
    found = compute_model_shares(model, settings, world_size=size, has_values=has_values)
    host = plan_host_memory(found, model, settings, world_size=size, uses_sandbox=uses_sandbox(settings, plugins))
    misfit = host_memory_error(host, settings, world_size=size)
    report.add_finding("host", f"{size} processes" + (" may not fit" if misfit else " fit"))
    report.warnings += [misfit] if misfit else []
    if not (settings.plan.world_size or torch.cuda.device_count()):
        return
    try:
        memory = 0 if settings.plan.world_size else min(gpu.memory_bytes for gpu in gpus.visible_gpus())  # 0: use the memory of plan.gpu
        at = (
            settings
            if not memory
            else replace(settings, plan=replace(settings.plan, gpu=closest_gpu_name(memory, preferred=settings.plan.gpu)))
        )
        planned = plan_gpu_memory(model, at, world_size=size, has_values=has_values, memory=memory)
        report.add_finding("plan", require_fit(planned))
        if settings.stage == "rl":
            report.add_finding("seconds", describe_step_time(make_step_time_inputs(model, settings, planned)))
    except ValueError as error:
        report.add_failure("plan", str(error))
        return
    if torch.cuda.device_count() and (small := gpus.find_too_small(settings, gpus.visible_gpus(), needed=planned.peak_bytes)):
        report.errors.append(small)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        if free < planned.peak_bytes:
            remedy = f"{format_gb(free)} of its {format_gb(total)} are free, but the plan needs {format_gb(planned.peak_bytes)}"
            report.errors.append(f"GPU {index}: {remedy}; stop other processes on it (nvidia-smi), or set plan.gpu to its type")
