"""Trains on recorded rollouts without an engine, on the trainer's own path from rollouts to
updates, and returns every number as a plain value.

tests/golden/record_rollouts.py records these numbers, and tests/golden/test_recorded.py compares
with them.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.algo.filtering import used_groups
from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.build import build_policy
from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    FilterSettings,
    LoraSettings,
    ModelSettings,
    OptimSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.training_batch import prepare_training_batch
from megatron_rl.training_loop import fills_batch
from megatron_rl.types import MicroBatch, Rollout
from tests.support.single_process_policy import close_with_world

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PIXELS = {"min_pixels": 12000, "max_pixels": 14200}
"""Limits for which 112 x 112 and 168 x 84 pixels need no resizing."""
REL_TOL, ABS_TOL = 1e-5, 2e-6
"""Relative tolerance, and absolute tolerance for values near 0, such as a loss whose advantages
cancel. Running with two threads, or with kernels for AVX2 instead of AVX-512, uses at most a fifth
of the tolerance. PyTorch's kernels for CPUs without vector instructions exceed it slightly.
"""
FIRST_GRAD_NORM, FIRST_GRAD_NORM_TOL = "updates[0]/grad_norm", 4e-5
"""Tolerance for a gradient norm that is dominated by the first layer of the vision tower, the layer
furthest from the loss. MKL's AVX-512 kernels on a CPU with AMX differ by 1.7e-5 from its AVX2
kernels (MKL_ENABLE_INSTRUCTIONS). Later norms and all norms with LoRA are not dominated by this
layer.
"""
LOGPROB_BOUND = 1e-4
"""Bound for the logprob of a single float32 token: between engine and trainer, and for a ratio
between two machines.
"""
ROUNDING_METRICS = ("rollout_mismatch/logprob_abs_diff", "rollout_mismatch/logprob_abs_diff_p99", "rollout_mismatch/logprob_abs_diff_max")
"""Metrics that measure rounding itself, which differs between any two machines. They are checked
against LOGPROB_BOUND instead of the recorded value.
"""
SINGLE_TOKEN_METRICS = ("policy/ratio_abs_dev_max",)


@dataclass(slots=True, frozen=True, kw_only=True)
class GoldenCase:
    """Settings for the updates of one step. Micro-batches are small, so that there are several."""

    algo: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1e-4

    def settings(self, model: Path) -> Settings:
        """Return the complete settings.

        Adam's eps is far above every gradient, so that an update is proportional to its gradient
        and no rounding error is divided by another one.
        """
        return Settings(
            model=ModelSettings(path=str(model), **PIXELS),
            lora=LoraSettings(**self.lora),
            optim=OptimSettings(lr=self.lr, eps=1e-2),
            batch=BatchSettings(prompts_per_step=4, group_size=3, micro_batch_tokens=200, **self.batch),
            filter=FilterSettings(drop=["zero_std"]),
            algo=AlgoSettings(**self.algo),
            task=TaskSettings(name="number_line"),
            run=RunSettings(dir="nowhere"),
        )


CASES = {
    "grpo": GoldenCase(algo={"kl_coef": 0.05, "clip_ratio_low": 0.05, "clip_ratio_high": 0.08}, batch={"minibatches": 2, "epochs": 2}),
    "return_to_go": GoldenCase(algo={"turn_credit": "return_to_go", "gamma": 0.9}, batch={"loss_agg_mode": "sequence_mean"}),
    "lora": GoldenCase(
        algo={"kl_coef": 0.05, "entropy_coef": 0.01, "clip_ratio_low": 0.02, "clip_ratio_high": 0.03}, batch={"minibatches": 2,
        "epochs": 2},
        lora={"rank": 4, "alpha": 8, "targets": ["attention", "mlp", "vision", "projector"]}, lr=1e-3,
    ),
    "gspo": GoldenCase(
        algo={"name": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.15}, batch={"minibatches": 2, "epochs": 2,
        "loss_agg_mode": "sequence_mean"},
    ),
}  # fmt: skip


def load_rollouts() -> list[Rollout]:
    """Read the recorded rollouts.

    Each use needs its own copy, because advantages are written into the rollouts.
    """
    return [entry.rollout for entry in read_recorded(GOLDEN / "rollouts.jsonl")]


def build_golden_policy(settings: Settings) -> Policy:
    renderer = Renderer(settings.model)
    return close_with_world(build_policy(
        settings, build_layout(settings.parallel, seed=0), renderer,
        patches=partial(renderer.patches, load_image=attrgetter("pil")), num_steps=1, is_rl=True,
    ))  # fmt: skip


def compute_golden_step(settings: Settings) -> dict[str, Any]:
    """Run a step of training_loop.py on the recorded rollouts with a world size of 1.

    Return what was filtered, packed and measured as JSON values.
    """
    rollouts, algorithm = load_rollouts(), ALGORITHMS[settings.algo.name]
    policy = build_golden_policy(settings)
    fills_batch(rollouts, settings, algorithm)
    minibatches = prepare_training_batch(rollouts, settings, policy, algorithm=algorithm, fetch_images=lambda needed: None, step=0)
    updates = [policy.update(batches, make_policy_objective(settings.algo), step=0) for batches in minibatches * settings.batch.epochs]
    return {
        "dropped": [rollout.filter_reason for rollout in rollouts],
        "kept_groups": sorted(used_groups(rollouts)),
        "minibatches": [[describe_batch(batch) for batch in batches] for batches in minibatches],
        "advantages": [sum(map(abs, context.advantages)) for rollout in rollouts for context in rollout.sequences],
        "weights": [[float(batch.weight_T.sum(dtype=torch.float64)) for batch in batches] for batches in minibatches],
        "updates": updates,
    }


def describe_batch(batch: MicroBatch) -> dict[str, Any]:
    """Return the integers of a micro-batch: readable sizes, and a digest of all of them."""
    integers = (batch.token_T, batch.target_T, batch.mask_T, batch.position_3T, batch.cu_seqlens_S1, batch.grid_I3, batch.vision_position_M)
    digest = hashlib.sha256(repr([each.tolist() for each in (*integers, batch.vision_row_M)]).encode())
    sources = [each and (each.rollout, each.sequence, each.start) for each in batch.origin_S]
    digest.update(repr((batch.prefix_S, sources)).encode())
    return {
        "tokens": batch.num_tokens, "segments": len(batch.prefix_S), "sampled": int(batch.mask_T.sum()), "images": len(batch.grid_I3),
        "denominator": batch.denominator, "digest": digest.hexdigest()[:16],
    }  # fmt: skip


def find_differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """Return the differences between two trees of JSON values.

    Integers and strings must be equal; floats may differ by REL_TOL and ABS_TOL, or by the special
    tolerances above.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        names = sorted(expected.keys() | found.keys())
        return [line for name in names for line in find_differences(expected.get(name), found.get(name), f"{path}/{name}".lstrip("/"))]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for number, (old, new) in pairs for line in find_differences(old, new, f"{path}[{number}]")]
    if isinstance(expected, float) and isinstance(found, float):
        if path.endswith(ROUNDING_METRICS):
            return [] if found <= LOGPROB_BOUND else [f"{path}: {found} is above {LOGPROB_BOUND}"]
        close = LOGPROB_BOUND if path.endswith(SINGLE_TOKEN_METRICS) else FIRST_GRAD_NORM_TOL if path == FIRST_GRAD_NORM else REL_TOL
        same = math.isclose(expected, found, rel_tol=close, abs_tol=close * ABS_TOL / REL_TOL)
    else:
        same = type(expected) is type(found) and expected == found
    return [] if same else [f"{path}: {expected} is now {found}"]
