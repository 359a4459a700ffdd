"""Golden runs: short complete runs whose numbers must stay the same, bit for bit, from commit to
commit on one machine.

    python tests/golden/golden_runs.py record runs/golden            # runs all, writes golden.json
    python tests/golden/golden_runs.py check runs/golden [NAME ...]  # runs all or some again

`record` creates the initial models if they are missing. `check` prints the first number of each run
that differs and exits with 1 if there is any. Metrics that depend on the machine (time/*, memory/*)
are not compared. Other machines round differently; for them, tests/golden/test_recorded.py compares
the training results of recorded rollouts within 1e-5.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_rl.observe.metrics import read_metrics  # noqa: E402 (the script's own tree comes first)
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint  # noqa: E402
from tests.support.comparable_metrics import drop_timings  # noqa: E402

SMALL = (
    "task=number_line",
    "model.min_pixels=12000",
    "model.max_pixels=13000",
    "engine.kv_cache_mib=16",
    "task.max_turns=2",
    "task.eval_samples=1",
)
SFT = (
    "stage=sft", "sft.splits=[correct]", "sft.steps=[40]", "sft.batch_size=30", "sft.num_demonstrations=60", "optim.lr=1e-3",
    "optim.warmup_steps=5", "optim.beta2=0.95", *SMALL,
)  # fmt: skip
GRPO = (
    "optim.lr=1e-3", "batch.prompts_per_step=4", "batch.group_size=4", "algo.kl_coef=0.01", "batch.micro_batch_tokens=1500",
    "batch.minibatches=2", "batch.epochs=2", "algo.clip_ratio_high=0.28", "algo.temperature=0.9", "run.steps=6", *SMALL,
)  # fmt: skip
SEARCH = ("engine.kv_cache_mib=16", "task.eval_samples=1", "task.data.max_eval=8", "task.sandbox.size=4")
LOOK = (
    "experiment=visual_search_sft_cpu", "sft.splits=[correct]", "sft.steps=[80]", "sft.batch_size=12", "sft.num_demonstrations=48",
    "optim.lr=2e-3", *SEARCH,
)  # fmt: skip
AGENT = ("experiment=visual_search_python_cpu", "batch.prompts_per_step=4", "batch.group_size=4", "run.steps=6", *SEARCH)
LORA = ("lora.rank=4", "lora.alpha=8", "lora.targets=[attention,mlp,vision,projector]")

RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sft": ("nano", SFT),
    "grpo": ("sft", (*GRPO, "filter.drop=[zero_std]", "filter.max_num_gen_batches=2", "algo.turn_credit=return_to_go", "algo.gamma=0.9")),
    "lora": ("sft", (*GRPO, *LORA)),
    "tp2": ("sft", (*GRPO, "parallel.tp=2", "parallel.sequence_parallel=true")),
    "pp2": ("sft", (*GRPO, "parallel.pp=2", "engine.tp=2")),
    "look": ("nano_search", LOOK),
    "agent": ("look", AGENT),
}
"""Maps the name of a run to its initial model (a preset, or the final model of another run) and its
settings. A run that starts from another run comes after it.
"""


def play(name: str, home: Path) -> dict[str, object]:
    """Run the named run in a new folder.

    Return the metrics of its steps and the checksum of its final weights.
    """
    start, overrides = RUNS[name]
    folder = home / name
    shutil.rmtree(folder, ignore_errors=True)
    model = home / "starts" / start if (home / "starts" / start).exists() else home / start / "final"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(ROOT / "launch" / "train.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    overrides = (*overrides, f"model.path={model}", f"run.dir={folder}")
    result = subprocess.run([*command, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if result.returncode:
        raise SystemExit(f"{name}: exit code {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
    lines = read_metrics(folder / "metrics.jsonl")
    steps = [{key: repr(value) for key, value in drop_timings(line).items()} for line in lines]
    digest = hashlib.sha256()
    for file in sorted((folder / "final").glob("*.safetensors")):
        digest.update(file.read_bytes())
    return {"steps": steps, "weights": digest.hexdigest()}


def difference(old: dict, new: dict) -> str:
    """Return the first number that differs, or an empty string.

    Metrics that exist on one side only are ignored here and listed by `keys_that_changed`, because
    new metrics may be added.
    """
    for before, after in zip(old["steps"], new["steps"], strict=True):
        for key in before.keys() & after.keys():
            if before[key] != after[key]:
                return f"step {before['step']}, {key}: {before[key]} is now {after[key]}"
    return "" if old["weights"] == new["weights"] else "the final weights differ"


def keys_that_changed(old: dict, new: dict) -> str:
    before, after = ({key for step in run["steps"] for key in step} for run in (old, new))
    return "".join(
        [f"; gone: {', '.join(sorted(before - after))}" * bool(before - after), f"; new: {sorted(after - before)}" * bool(after - before)]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "check"))
    parser.add_argument("home", type=Path, help="where starts and runs lie")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; all when none is given")
    asked = parser.parse_args()
    home, file = asked.home.resolve(), asked.home.resolve() / "golden.json"
    for preset, init in (("nano", "learn"), ("nano_search", "learn")):
        if not (home / "starts" / preset).exists():
            make_checkpoint(home / "starts" / preset, preset=preset, init=init, seed=0)
    golden = json.loads(file.read_text()) if file.exists() else {}
    failed = False
    for name in asked.names or RUNS:
        new = play(name, home)
        if asked.verb == "record":
            golden[name] = new
            file.write_text(json.dumps(golden, indent=1))
            print(f"{name}: recorded, {len(new['steps'])} lines, weights {new['weights'][:12]}", flush=True)
            continue
        found = difference(golden[name], new)
        failed |= bool(found)
        print(f"{name}: {found or 'equal, bit for bit'}{keys_that_changed(golden[name], new)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
