"""Tests for the first hour on a new kind of GPU, in four parts of less than ten minutes each.

    # The trainer: kernels, tests/gpu, MFU at half of 3B:
    python benchmarks/gpu/first_hour.py --part 1 --out $OUT
    # MFU at 7B with adapters, with shared and separate prompts; a profile:
    python benchmarks/gpu/first_hour.py --part 2 --out $OUT
    # Engine and policy alternating: nano, then 7B:
    python benchmarks/gpu/first_hour.py --part 3 --out $OUT
    # Whole runs in bfloat16, with a resume:
    python benchmarks/gpu/first_hour.py --part 4 --out $OUT
    # Smoke test, on a CPU too:
    python benchmarks/gpu/first_hour.py --part 4 --out /tmp/hour --kit /tmp/kit --tiny

README.md in this folder lists the files to carry. Every step is a command with its own time limit
(--patience 8: eight times as long, for a busy CPU). A step that fails or times out does not stop
the others, and its partial output is deleted. All output is in OUT/partN.txt. The exit code is 1 if
a step failed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
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
    "grpo": ("batch.prompts_per_step=2", "batch.group_size=2", "task.eval_samples=1", "task.max_turns=1"),
}
KERNELS = """
import torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
found = [name for name in ("rms_norm", "silu_and_mul") if hasattr(torch.ops._C, name)]
print(vllm.__version__, torch.__version__, current_platform.get_device_name(), found)
assert len(found) == 2, "vLLM's kernels are not there"
"""


@dataclass(slots=True, frozen=True)
class Step:
    """One command of a part."""

    name: str
    limit_s: int
    words: tuple[str, ...]
    """Arguments of `python`."""
    makes: Path | None = None
    """Output of the step, which is skipped if it exists."""
    needs: Path | None = None
    """Input of the step, which is skipped if it is missing.

    Nothing is carried to a machine that has everything installed.
    """


def models(kit: Path, *sizes: str) -> list[Step]:
    """Return steps that make folders of random weights.

    Those of a released size have the tokenizer of the nano model.
    """
    tools, words = "tools/data/", ("--words", str(kit / "nano"))
    known = {
        "nano": (20, (f"{tools}make_tiny_qwen2_5_vl.py", "--preset", "nano")),
        "3B18": (50, (f"{tools}make_shapes.py", "--size", "3B", "--layers", "18", *words)),
        "7B": (110, (f"{tools}make_shapes.py", "--size", "7B", *words)),
    }
    steps = ((size, *known[size]) for size in ("nano", *sizes))
    return [Step(f"make {size}", limit, (*how, "--out", str(kit / size)), makes=kit / size) for size, limit, how in steps]


def mfu(kit: Path, size: str, limit_s: int, *how: str, tiny: bool) -> Step:
    """Return a step that measures MFU."""
    real = ("--dtype", "bfloat16", "--sequences", "16", "--updates", "3")
    model = kit / ("nano" if tiny else size)
    return Step(
        f"mfu {size} {' '.join(how)}", limit_s, (*RUN, "benchmarks/mfu.py", "--model", str(model), *(TINY_MFU if tiny else real), *how)
    )


def first(kit: Path, *, tiny: bool) -> list[Step]:
    """Return the steps of part 1."""
    site, wheels, small = kit / "site", kit / "whl", ("--tiny",) * tiny
    pip = ("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site))
    fa3 = [] if tiny else [Step("FA3", 30, (*RUN, f"{HERE}/varlen.py", "--implementation", "FA3"))]
    return [
        Step("wheels", 60, (*pip, *map(str, sorted(wheels.glob("*.whl")))), needs=wheels),
        Step("conv", 45, (*RUN, f"{HERE}/conv.py", *small)),
        Step("varlen", 45, (*RUN, f"{HERE}/varlen.py", *small)),
        *fa3,
        *models(kit, *([] if tiny else ["3B18"])),
        Step("tests/gpu", 160, (*RUN, "-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider", "--timeout", "120")),
        *(mfu(kit, "3B18", 60, "--recompute", how, tiny=tiny) for how in ("none", "vision", "full")),
    ]


def second(kit: Path, *, tiny: bool) -> list[Step]:
    """Return the steps of part 2."""
    lora = ("--lora-rank", "4" if tiny else "64")
    group = (*lora, "--recompute", "none", "--group", "2" if tiny else "8")
    return [
        unzipped(kit, kit / "a" / "vllm_a.zip"),
        *models(kit, *([] if tiny else ["7B"])),
        mfu(kit, "7B", 90, *lora, "--recompute", "none", tiny=tiny),
        mfu(kit, "7B", 90, *lora, "--recompute", "full", "--micro-batch-tokens", "16384", tiny=tiny),
        mfu(kit, "7B", 90, *group, tiny=tiny),
        mfu(kit, "7B", 90, *group, "--unshared", tiny=tiny),
        mfu(kit, "3B18", 60, "--recompute", "full", "--updates", "1", "--profile", tiny=tiny),
    ]


def third(kit: Path, *, tiny: bool) -> list[Step]:
    """Return the steps of part 3."""
    cycle, nano, small = (*RUN, f"{HERE}/cycle.py", "--model"), str(kit / "nano"), ("--tiny",) * tiny
    large = (*cycle, nano, *small) if tiny else (*cycle, str(kit / "7B"), "--lora-rank", "64", "--image", "560", "--max-model-len", "4096")
    return [
        unzipped(kit, kit / "b" / "vllm_b.zip"),
        *models(kit, *([] if tiny else ["7B"])),
        *([] if tiny else [Step("vLLM's kernels", 40, ("-c", KERNELS))]),
        Step("cycle nano, eager", 130, (*cycle, nano, "--eager", *small)),
        Step("cycle 7B", 260, large),
    ]


def fourth(kit: Path, *, tiny: bool) -> list[Step]:
    """Return the steps of part 4."""
    sft, grpo, dtype = kit / "sft", kit / "grpo", "float32" if tiny else "bfloat16"
    train = (*RUN, "launch/train.py", f"model.dtype={dtype}", f"engine.dtype={dtype}", "parallel.offload_params=true")
    warm = (*train, "experiment=numberline_sft_cpu", f"model.path={kit / 'nano'}", f"run.dir={sft}")
    learn = (*train, "experiment=numberline_grpo_cpu", f"model.path={sft / 'final'}", f"run.dir={grpo}", "checkpoint.every=4",
             "parallel.offload_optimizer=true", "algo.rollout_correction=token_tis", *(TINY_RUNS["grpo"] if tiny else ()))  # fmt: skip
    return [
        *models(kit),
        Step("warm start", 160, (*warm, *(TINY_RUNS["sft"] if tiny else ())), makes=sft / "final"),
        Step("GRPO, 8 steps", 220, (*learn, "run.steps=8")),
        Step("goes on to 10", 150, (*learn, "run.steps=10")),
    ]


def unzipped(kit: Path, archive: Path) -> Step:
    """Return a step that unpacks an archive, if it was carried."""
    return Step(f"unzip {archive.name}", 30, ("-m", "zipfile", "-e", str(archive), str(kit / "site")), needs=archive)


PARTS = {1: first, 2: second, 3: third, 4: fourth}
BROUGHT = {4: ["grpo/metrics.jsonl"]}
"""Part -> files of the kit that are results."""


def play(step: Step, log: TextIO, environment: dict[str, str]) -> tuple[float, str]:
    """Run a step and return its seconds and its outcome; no process of it is left running."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *step.words], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )  # fmt: skip
    try:
        code = process.wait(timeout=step.limit_s)
        how = "well" if code == 0 else f"with {code}"
    except subprocess.TimeoutExpired:
        how = f"late: over {step.limit_s} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return time.perf_counter() - started, how


def environment_of(kit: Path) -> dict[str, str]:
    """Return the environment of a step."""
    paths = [str(path) for path in (kit / "site", ROOT) if path.exists()]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    return {"OMP_NUM_THREADS": "8", "VLLM_LOGGING_LEVEL": "INFO", **os.environ, **own}


def gpus() -> str:
    """Return name, driver and memory of the GPUs.

    nvidia-smi leaves no CUDA context on the device.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "no nvidia-smi here\n"
    return subprocess.run([tool, "--query-gpu=name,driver_version,memory.total", "--format=csv"], capture_output=True, text=True).stdout


def is_due(step: Step) -> bool:
    """Return True if the step's input exists and its output does not."""
    return (step.needs is None or step.needs.exists()) and (step.makes is None or not step.makes.exists())


def hour(part: int, steps: list[Step], *, kit: Path, out: Path, patience: float = 1.0) -> bool:
    """Run the steps of a part and return True if all of them succeeded."""
    kit.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    ended, path = [], out / f"part{part}.txt"
    path.write_text(gpus())
    for step in (replace(step, limit_s=round(patience * step.limit_s)) for step in steps):
        if not is_due(step):
            continue
        with path.open("a") as log:
            print(f"\n== {step.name}: {' '.join(step.words)[:300]}", file=log, flush=True)
            begins = log.tell()
            seconds, how = play(step, log, environment_of(kit))
        # A partial model would be taken for a complete one by the next part.
        if how != "well" and step.makes is not None:
            shutil.rmtree(step.makes, ignore_errors=True)
        ended.append((step.name, f"{seconds:.1f}", step.limit_s, how))
        said = path.read_bytes()[begins:].decode(errors="replace").splitlines()
        print(f"\n{step.name}: ended {how} after {seconds:.1f} s", *(tables(said) if how == "well" else said[-15:]), sep="\n", flush=True)
    print_head("step", "s", "limit s", "ended")
    for row in ended:
        print_row(*row)
    for name in BROUGHT.get(part, []):
        if (kit / name).exists():
            shutil.copy(kit / name, out)
    return all(how == "well" for *_, how in ended)


def tables(said: list[str]) -> list[str]:
    """Return the Markdown tables in the output, separated by lines, or its last lines."""
    found: list[str] = []
    for line, after in pairwise([*said, ""]):
        if line.startswith("|"):
            found += [""] * after.startswith("|---") + [line]
    return found or said[-5:]


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=list(PARTS), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    parser.add_argument("--kit", type=Path, default=ROOT / ".gpu", metavar="DIR", help="what was carried, and what is made on the way")
    parser.add_argument("--tiny", action="store_true", help="the nano model alone, and as little of it as there is")
    parser.add_argument("--patience", type=float, default=1.0, help="times the steps' limits")
    given = parser.parse_args()
    kit = given.kit.resolve()
    steps = PARTS[given.part](kit, tiny=given.tiny)
    sys.exit(0 if hour(given.part, steps, kit=kit, out=given.out, patience=given.patience) else 1)


if __name__ == "__main__":
    main()
