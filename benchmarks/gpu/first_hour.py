"""Tests and measurements for a new GPU model, in two parts.

    # Part 1, functional tests: engine and policy alternating, tests/gpu, GRPO with resume:
    python benchmarks/gpu/first_hour.py --part 1 --out $OUT
    # Part 2, measurements: kernels, MFU, engine and policy alternating with 7B shapes, profiles:
    python benchmarks/gpu/first_hour.py --part 2 --out $OUT
    # Only some steps:
    python benchmarks/gpu/first_hour.py --part 2 --out $OUT --only 'conv|profile'
    # Smoke test; also runs on a CPU:
    python benchmarks/gpu/first_hour.py --part 1 --out /tmp/hour --kit /tmp/kit --tiny

README.md in this folder lists the files to copy to the machine and the durations of the steps.
Every step is a command with its own time limit; --patience 8 multiplies the limits by eight, e.g.
for a busy CPU. If a step fails or times out, its partial output is deleted and the other steps
still run. The output of all steps is in OUT/partN.txt and OUT/partN_background.txt. The exit code
is 1 if any step failed.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from gauges import print_head, print_row

ROOT = Path(__file__).resolve().parents[2]
HERE = "benchmarks/gpu"
RUN = (f"{HERE}/older_torch.py",)
TINY_MFU = ("--sequences", "4", "--text", "16", "--image", "56", "--updates", "1")
TINY_RUNS = {
    "sft": ("sft.steps=[1,1]", "sft.num_demonstrations=8", "sft.batch_size=4", "task.eval_samples=1"),
    "grpo": ("batch.prompts_per_step=2", "batch.group_size=2", "task.max_turns=1"),
}


@dataclass(slots=True, frozen=True)
class Step:
    """A command of a part, with its time limit, input and output."""

    name: str
    limit_s: int
    words: tuple[str, ...]
    """Command-line arguments for `python`."""
    makes: Path | None = None
    """Path of the step's output; if it exists, the step is skipped."""
    needs: Path | None = None
    """Path of the step's input; if it is missing, the step is skipped.

    For example, the archive of packages is missing if the machine has the packages installed.
    """


@dataclass(slots=True, frozen=True)
class Stage:
    """Steps to run in order, and steps to run in the background at the same time."""

    steps: Sequence[Step]
    background: Sequence[Step] = ()

    def only(self, pattern: str) -> "Stage":
        """Return a stage with only those steps whose names match a regular expression."""
        steps, background = ([step for step in found if re.search(pattern, step.name)] for found in (self.steps, self.background))
        return Stage(steps, background)


@dataclass(slots=True, frozen=True)
class Folders:
    """Input and output folders of the steps."""

    kit: Path
    models: Path
    out: Path
    tiny: bool

    def model(self, size: str) -> Path:
        """Return the folder of a model: in `kit` for the nano model, in `models` for other models.

        If `tiny` is set, the nano model replaces all other models.
        """
        return self.kit / "nano" if self.tiny or size == "nano" else self.models / size


def make_models(folders: Folders) -> list[Step]:
    """Return steps that create models with random weights and the nano model's tokenizer."""
    sizes = {} if folders.tiny else {"3B18": (60, ("3B", "--layers", "18")), "7B": (120, ("7B",))}
    words = ("--words", str(folders.model("nano")))
    return [
        Step(f"make {name}", limit, ("tools/data/make_shapes.py", "--size", *how, *words, "--out", str(folders.model(name))),
             makes=folders.model(name))
        for name, (limit, how) in sizes.items()
    ]  # fmt: skip


def mfu(folders: Folders, size: str, *how: str, profiles: bool = False) -> Step:
    """Return a step that measures MFU; with `profiles`, it writes a trace of one update."""
    work = TINY_MFU if folders.tiny else ("--dtype", "bfloat16", "--sequences", "16", "--updates", "3")
    trace = ("--profile", "--trace", str(folders.out / f"trace_{size}.json.gz")) if profiles else ()
    words = (*RUN, "benchmarks/mfu.py", "--model", str(folders.model(size)), *work, *how, *trace)
    return Step(f"mfu {size} {' '.join(how)}{', profile' * profiles}", 90, words)


def prepare(folders: Folders) -> Stage:
    """Return a stage that unpacks the kit's packages, if any, and creates the nano model."""
    archive, site, nano = folders.kit / "site.tar.xz", folders.kit / "site", folders.model("nano")
    return Stage([
        Step("unpack", 60, ("-m", "tarfile", "-e", str(archive), str(folders.kit)), makes=site, needs=archive),
        Step("compile", 60, ("-m", "compileall", "-q", "-j", "0", str(site)), needs=archive),
        Step("make nano", 60, ("tools/data/make_tiny_qwen2_5_vl.py", "--preset", "nano", "--out", str(nano)), makes=nano),
    ])  # fmt: skip


def check(folders: Folders) -> list[Stage]:
    """Return the stages of part 1, which tests engine, policy and training on the device."""
    kit, tiny = folders.kit, folders.tiny
    nano, sft, dtype = folders.model("nano"), kit / "sft", "float32" if tiny else "bfloat16"
    train = (*RUN, "launch/train.py", f"model.dtype={dtype}", f"engine.dtype={dtype}", "parallel.offload_params=true")
    warm = (*train, "experiment=numberline_sft_cpu", f"model.path={nano}", f"run.dir={sft}", *(TINY_RUNS["sft"] if tiny else ()))
    learn = (
        *train, "experiment=numberline_grpo_cpu", f"model.path={sft / 'final'}", "checkpoint.every=4", "task.eval_samples=1",
        "algo.rollout_correction=token_tis", *(TINY_RUNS["grpo"] if tiny else ()),
    )  # fmt: skip
    on_device = (*learn, f"run.dir={kit / 'grpo'}")
    distill = (*learn, f"run.dir={kit / 'distill'}", f"distill.teacher={sft / 'final'}", "distill.coef=0.1")
    on_host = (*learn, f"run.dir={kit / 'grpo_host'}", "parallel.offload_optimizer=true")
    steps = [
        Step("cycle nano, eager", 180, (*RUN, f"{HERE}/cycle.py", "--model", str(nano), "--eager", *("--tiny",) * tiny)),
        Step("tests/gpu", 240, (*RUN, "-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider", "--timeout", "120")),
        Step("warm start", 160, warm, makes=sft / "final"),
        Step("GRPO, 8 steps", 240, (*on_device, "run.steps=8")),
        Step("GRPO, resume to 10", 180, (*on_device, "run.steps=10")),
        Step("GRPO, optimizer on the host, 4 steps", 180, (*on_host, "run.steps=4")),
        Step("GRPO, optimizer on the host, resume to 5", 180, (*on_host, "run.steps=5")),
        Step("GRPO with a teacher, 3 steps", 300, (*distill, "run.steps=3")),
    ]
    return [prepare(folders), Stage(steps, background=make_models(folders))]


def measure(folders: Folders) -> list[Stage]:
    """Return the stages of part 2, which runs the measurements in order of importance."""
    small, lora = ("--tiny",) * folders.tiny, ("--lora-rank", "4" if folders.tiny else "64")
    group = (*lora, "--recompute", "none", "--group", "2" if folders.tiny else "8")
    large = ("--micro-batch-tokens", "16384")
    real = () if folders.tiny else (*lora, "--image", "560", "--max-model-len", "4096", "--turns", "3")
    kernels = [Step(name, 45, (*RUN, f"{HERE}/{name}.py", *small)) for name in ("conv", "varlen", "swiglu")]
    steps = [
        mfu(folders, "3B18", "--recompute", "none", profiles=True),
        mfu(folders, "3B18", "--recompute", "none", *large),
        mfu(folders, "7B", *lora, "--recompute", "none", profiles=True),
        mfu(folders, "7B", *lora, "--recompute", "none", *large),
        Step("cycle 7B", 300, (*RUN, f"{HERE}/cycle.py", "--model", str(folders.model("7B")), *real, *small)),
        mfu(folders, "7B", *group),
        mfu(folders, "7B", *group, "--unshared"),
        mfu(folders, "3B18", "--recompute", "vision", *large),
        mfu(folders, "3B18", "--recompute", "full", *large),
        mfu(folders, "7B", *lora, "--recompute", "full", *large),
    ]
    return [prepare(folders), Stage(kernels, background=make_models(folders)), Stage(steps)]


PARTS = {1: check, 2: measure}
RESULTS = {1: ["grpo/metrics.jsonl"]}
"""Maps a part to the files in the kit folder that are copied to OUT as results."""


def play(step: Step, log: TextIO, environment: dict[str, str]) -> tuple[float, str]:
    """Run a step and return its seconds and its outcome; kill its processes if it times out."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *step.words], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )  # fmt: skip
    try:
        code = process.wait(timeout=step.limit_s)
        how = "well" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        how = f"timed out after {step.limit_s} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return time.perf_counter() - started, how


def environment_of(kit: Path) -> dict[str, str]:
    """Return the environment variables for a step."""
    paths = [str(path) for path in (kit / "site", ROOT) if path.exists()]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    return {"OMP_NUM_THREADS": "8", "VLLM_LOGGING_LEVEL": "INFO", **os.environ, **own}


def gpus() -> str:
    """Return nvidia-smi's lines with the name, driver version and memory of each GPU.

    nvidia-smi is used because it leaves no CUDA context on the device.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi not found\n"
    return subprocess.run([tool, "--query-gpu=name,driver_version,memory.total", "--format=csv"], capture_output=True, text=True).stdout


def is_due(step: Step) -> bool:
    """Return True if the step's input exists and its output does not."""
    return (step.needs is None or step.needs.exists()) and (step.makes is None or not step.makes.exists())


def run_steps(steps: Sequence[Step], *, log: Path, kit: Path, patience: float) -> list[tuple[object, ...]]:
    """Run the steps that are due, in order, and return one summary row for each of them."""
    rows: list[tuple[object, ...]] = []
    for step in (replace(step, limit_s=round(patience * step.limit_s)) for step in steps):
        if not is_due(step):
            continue
        with log.open("a+") as file:
            print(f"\n== {step.name}: {' '.join(step.words)[:300]}", file=file, flush=True)
            begins = file.tell()
            seconds, how = play(step, file, environment_of(kit))
        said = log.read_bytes()[begins:].decode(errors="replace").splitlines()
        # Otherwise the next part would treat a partial model as complete.
        if how != "well" and step.makes is not None:
            shutil.rmtree(step.makes, ignore_errors=True)
        print(f"\n{step.name}: result: {how}; {seconds:.1f} s", *(tables(said) if how == "well" else said[-15:]), sep="\n", flush=True)
        rows.append((step.name, f"{seconds:.1f}", step.limit_s, how))
    return rows


def hour(part: int, stages: list[Stage], *, kit: Path, out: Path, patience: float = 1.0) -> bool:
    """Run the stages of a part and return True if all steps succeeded."""
    kit.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    ended, log, other_log = [], out / f"part{part}.txt", out / f"part{part}_background.txt"
    log.write_text(gpus())
    run = partial(run_steps, kit=kit, patience=patience)
    with ThreadPoolExecutor(1) as pool:
        for stage in stages:
            background = pool.submit(run, stage.background, log=other_log)
            ended += [*run(stage.steps, log=log), *background.result()]
    print_head("step", "s", "limit s", "ended")
    for row in ended:
        print_row(*row)
    for name in RESULTS.get(part, []):
        if (kit / name).exists():
            shutil.copy(kit / name, out)
    return all(how == "well" for *_, how in ended)


def tables(said: list[str]) -> list[str]:
    """Return the Markdown tables in the output, or its last lines if it contains no table."""
    found: list[str] = []
    for line, after in pairwise([*said, ""]):
        if line.startswith("|"):
            found += [""] * after.startswith("|---") + [line]
    return found or said[-5:]


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=list(PARTS), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--kit",
        type=Path,
        default=ROOT / ".gpu",
        metavar="DIR",
        help="folder of the files copied to the machine; also the output folder of the steps",
    )
    parser.add_argument("--models", type=Path, metavar="DIR", help="folder for models of released sizes, 21 GB; default: --kit")
    parser.add_argument("--only", default="", metavar="REGEX", help="run only the steps whose name matches, such as 'GRPO|varlen'")
    parser.add_argument("--tiny", action="store_true", help="smoke test: only the nano model, with the smallest sizes")
    parser.add_argument("--patience", type=float, default=1.0, help="factor by which all time limits are multiplied")
    given = parser.parse_args()
    folders = Folders(given.kit.resolve(), (given.models or given.kit).resolve(), given.out.resolve(), given.tiny)
    stages = [stage.only(given.only) for stage in PARTS[given.part](folders)]
    sys.exit(0 if hour(given.part, stages, kit=folders.kit, out=given.out, patience=given.patience) else 1)


if __name__ == "__main__":
    main()
