"""Peak host memory of runs with large images, compared with the memory plan.

    .venv/bin/python benchmarks/host_memory.py            # 2-megapixel images, 8 and 64 episodes
    .venv/bin/python benchmarks/host_memory.py --side 56 --episodes 2 4         # smoke test

For two runs with different numbers of episodes or ranks, the benchmark compares the difference in
measured memory with the difference planned by megatron_rl/memory_plan/image_memory.py. A run is one
step of launch/train.py with task vqa, one episode per image, a nano model of a million parameters,
and the real engine and trainer. The peak is the maximum resident memory of the run's largest
process as counted by the kernel, including shared pages.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from megatron_rl.config import BatchSettings, EngineSettings, ModelSettings, RunSettings, Settings
from megatron_rl.memory_plan.image_memory import plan_image_bytes
from megatron_rl.models.hf_config import read_spec

ROOT = Path(__file__).resolve().parents[1]


@dataclass(slots=True, frozen=True)
class Kind:
    """Number of episodes and ranks of a run."""

    episodes: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.episodes} episodes, {self.ranks} rank{'s' * (self.ranks > 1)}"


def sizes(side: int) -> dict[str, int]:
    """Return settings for images of side x side pixels, with 28 x 28 pixels per image token."""
    tokens = (side // 28) ** 2
    return {"max_pixels": side * side, "max_model_len": tokens + 256, "micro_batch_tokens": tokens + 256}


def planned(kind: Kind, model: Path, *, side: int) -> int:
    """Return the planned host memory for images, in bytes."""
    size = sizes(side)
    settings = Settings(
        model=ModelSettings(path=str(model), max_pixels=size["max_pixels"]),
        engine=EngineSettings(max_model_len=size["max_model_len"], max_images=1), run=RunSettings(dir="nowhere", steps=1),
        batch=BatchSettings(prompts_per_step=kind.episodes, group_size=1, micro_batch_tokens=size["micro_batch_tokens"]),
    )  # fmt: skip
    return plan_image_bytes(read_spec(model), settings, world_size=kind.ranks)


def measured(kind: Kind, model: Path, data: Path, *, side: int) -> int:
    """Execute a run and return the peak resident memory of its largest process in bytes."""
    size = sizes(side)
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"model.path={model}", f"run.dir={folder}/run", "task=vqa", f"task.data.train=[{data}/questions.jsonl]",
            f"task.data.eval=[{data}/held_out.jsonl]", "algo=reinforce_pp", "algo.kl_coef=0", "algo.use_kl_in_reward=false", "run.steps=1",
            f"batch.prompts_per_step={kind.episodes}", "batch.group_size=1", f"batch.micro_batch_tokens={size['micro_batch_tokens']}",
            f"engine.max_model_len={size['max_model_len']}", "engine.max_num_seqs=4", "engine.max_images=1", "task.max_new_tokens=4",
            f"model.max_pixels={size['max_pixels']}", f"parallel.tp={kind.ranks}",
        ]  # fmt: skip
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={kind.ranks}"] if kind.ranks > 1 else []
        probe = "import json, resource, subprocess, sys; r = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        probe += "print(json.dumps([r.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, (r.stdout + r.stderr)[-3000:]]))"
        command = [sys.executable, "-c", probe, sys.executable, *launcher, "launch/train.py", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
        code, peak_kib, said = json.loads(ended.stdout)
        if code:
            raise RuntimeError(f"{kind}: the run exited with code {code}: {said}")
        return peak_kib * 1024


def make_questions(folder: Path, *, num: int, side: int) -> None:
    """Write questions that each have a different noise image."""
    folder.mkdir(parents=True)
    rows = []
    for number in range(num + 1):
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=0)
        rows.append(json.dumps({"id": f"{number}", "question": "What is this?", "answer": "noise", "images": [f"{folder}/{number}.png"]}))
    (folder / "questions.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    (folder / "held_out.jsonl").write_text(rows[-1] + "\n")


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1400, help="side of each image in pixels; a multiple of 28")
    parser.add_argument("--episodes", type=int, nargs=2, default=[8, 64])
    parser.add_argument("--ranks", type=int, default=2, help="number of tensor-parallel ranks of a third run; 1 skips the third run")
    given = parser.parse_args()
    few, many = given.episodes
    with tempfile.TemporaryDirectory() as home:
        model, data = Path(home, "nano"), Path(home, "data")
        maker = [sys.executable, "tools/data/make_tiny_qwen2_5_vl.py", "--out", str(model)]
        subprocess.run(maker, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        make_questions(data, num=many, side=given.side)
        kinds = [Kind(few, 1), Kind(many, 1), *([Kind(many, given.ranks)] if given.ranks > 1 else [])]
        found = {kind: (planned(kind, model, side=given.side), measured(kind, model, data, side=given.side)) for kind in kinds}
    print("| run | planned memory for images, GB | peak memory of the largest process, GB |\n|---|---|---|")
    for kind, (plan, peak) in found.items():
        print(f"| {kind} | {plan / 1e9:.3f} | {peak / 1e9:.3f} |")
    for less, more in [(kind, kinds[1]) for kind in (kinds[0], *kinds[2:])]:
        plan, peak = (found[more][column] - found[less][column] for column in (0, 1))
        print(f"| difference: {more} minus {less} | {plan / 1e9:.3f} | {peak / 1e9:.3f} (measured / planned: {peak / plan:.2f}) |")


if __name__ == "__main__":
    main()
