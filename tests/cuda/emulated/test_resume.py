"""Training on the emulated device: update, save, load in a new policy, the same update again.

Equality is exact.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.algo.value import make_value_objective, shared_value_loss
from megatron_rl.config import AlgoSettings, CriticSettings, LoraSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.offload import HostCopy
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.policy.trainable_model import TrainableModel
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import MicroBatch
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import close_with_world, single_process_world

CRITIC = CriticSettings(normalize_returns=True, head_sizes=[6])
EVERYWHERE = LoraSettings(rank=4, targets=["attention", "mlp", "vision", "projector"])


@dataclass(frozen=True)
class Variant:
    dtype: str = "bfloat16"
    parallel: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    lora: LoraSettings = field(default_factory=LoraSettings)


VARIANTS = {
    "float32": Variant("float32", {"offload_params": True}),
    "bfloat16": Variant(parallel={"recompute": "full"}),
    "offloaded": Variant(parallel={"offload_params": True, "offload_optimizer": True}),
    "adapters": Variant(parallel={"offload_params": True}, lora=EVERYWHERE),
    "reference": Variant(options={"keep_reference": True}),
    "value head": Variant(options={"critic": CRITIC}),
}


@dataclass
class Trainer:
    """Builds equal policies or critics, and trains them on the same sequences."""

    model: Path
    variant: Variant
    batches: list[MicroBatch] = field(default_factory=list)

    def policy(self) -> Policy:
        settings = ModelSettings(path=str(self.model), dtype=self.variant.dtype)
        renderer, parallel = Renderer(settings), ParallelSettings(**self.variant.parallel)
        made = close_with_world(Policy(
            settings, build_layout(parallel, seed=0), training=self.training(parallel), special_tokens=renderer.special_tokens,
            **self.variant.options,
        ))  # fmt: skip
        if not self.batches:
            packed = made.pack(make_example_items(renderer), max_tokens=200)
            self.batches = [replace(b, old_value_T=torch.zeros_like(b.weight_T), return_T=torch.ones_like(b.weight_T)) for b in packed]
        return made

    def critic(self) -> Critic:
        parallel = ParallelSettings(**self.variant.parallel)
        model = ModelSettings(path=str(self.model), dtype=self.variant.dtype)
        return close_with_world(Critic(CRITIC, build_layout(parallel, seed=0), model=model, training=self.training(parallel)))

    def training(self, parallel: ParallelSettings) -> TrainingSettings:
        """Use a learning rate that changes bfloat16 weights near 1."""
        return TrainingSettings(parallel=parallel, optim=OptimSettings(lr=3e-2), num_steps=9, lora=self.variant.lora)

    def update(self, model: TrainableModel, step: int) -> dict[str, float]:
        """Run one update, after the model has been away for a rollout."""
        model.sleep()
        model.wake()
        value_loss = make_value_objective(CRITIC, level="turns")
        if isinstance(model, Critic):
            return model.update(self.batches, value_loss, step=step)
        loss = make_policy_objective(AlgoSettings())
        return model.update(self.batches, shared_value_loss(loss, value_loss, 0.5) if "critic" in self.variant.options else loss, step=step)


def parameters(model: TrainableModel) -> dict[str, torch.Tensor]:
    assert all(parameter.device == torch.device("cuda", 0) for parameter in model.network.chunks.parameters())
    return {name: parameter.detach().cpu().clone() for name, parameter in model.network.chunks.named_parameters()}


def assert_resumes(trainer: Trainer, make: Callable[[], TrainableModel], folder: Path) -> tuple[TrainableModel, TrainableModel]:
    """Check that a second model, loaded from a checkpoint written in the background, repeats the
    update of the first one. Return both models."""
    first = make()
    initial = parameters(first)
    first.update_return_stats([0.5, 1.0, 2.0])
    trainer.update(first, 0)
    save = first.save(folder, background=True)
    metrics = trainer.update(first, 1)
    save.finish()
    second = make()
    second.load(folder, seed=0)
    assert trainer.update(second, 1) == metrics
    ours, theirs = parameters(first), parameters(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    trained = [name for name, parameter in first.network.chunks.named_parameters() if parameter.requires_grad]
    assert trained and all(not torch.equal(ours[name], initial[name]) for name in trained)
    return first, second


@pytest.mark.parametrize("name", VARIANTS)
def test_the_update_after_a_load_is_that_of_the_unbroken_run(name: str, random_model: Path, tmp_path: Path) -> None:
    """Also the exported weights, and the logprobs of the reference, are equal."""
    with single_process_world():
        trainer = Trainer(random_model, VARIANTS[name])
        first, second = assert_resumes(trainer, trainer.policy, tmp_path)
        for (hf_name, ours), (_, theirs) in zip(first.hf_weights(), second.hf_weights(), strict=True):
            assert ours.is_cuda and torch.equal(ours, theirs), hf_name
        if name in ("adapters", "reference"):
            initial = trainer.policy()
            for policy in (first, second):
                of_reference, truth = policy.logprobs(trainer.batches, weights="reference"), initial.logprobs(trainer.batches)
                assert all(torch.equal(a, b) for a, b in zip(of_reference, truth, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", ["float32", "bfloat16", "offloaded", "reference"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl_moe"])
def test_other_families_resume(family: str, name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / family, family=family, init="random", seed=1, vision_depth=2)
    test_the_update_after_a_load_is_that_of_the_unbroken_run(name, tmp_path / family, tmp_path / "saved")


def test_a_critic_with_its_own_backbone_resumes(random_model: Path, tmp_path: Path) -> None:
    """Also its values are equal."""
    with single_process_world():
        trainer = Trainer(random_model, VARIANTS["offloaded"])
        trainer.policy()
        first, second = assert_resumes(trainer, trainer.critic, tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(first.values(trainer.batches), second.values(trainer.batches), strict=True))


def test_host_memory_is_page_locked_for_as_long_as_it_is_used() -> None:
    """Two parameters that share a storage leave the device and come back to the bit; their memory
    on the device is freed, and that on the host is page-locked until the copy is deleted."""
    numbers = torch.randn(2**20, device="cuda")
    named = [torch.nn.Parameter(view, requires_grad=False) for view in (numbers[4:24].view(4, 5), numbers[10:50].view(8, 5).t()[:, ::2])]
    before, held = [parameter.cpu() for parameter in named], torch.cuda.memory_allocated()
    copy = HostCopy(named)
    (host,) = [buffer for _, buffer in copy.pairs]
    for _ in range(3):
        copy.copy_to_host()
        copy.free_device_memory()
        assert held - torch.cuda.memory_allocated() == 4 * 2**20
        copy.restore()
        copy.swap()
        assert all(torch.equal(parameter.cpu(), truth) for parameter, truth in zip(named, before, strict=True))
    assert host.is_pinned() and torch.cuda.memory_allocated() == held
    del copy
    gc.collect()
    assert not host.is_pinned()
