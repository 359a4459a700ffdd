"""Critic with its own backbone.

If the critic shares the policy's backbone, the value head is part of `Policy` instead.
"""

import torch

from megatron_rl.config import CriticSettings, ModelSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.load_model import load_model
from megatron_rl.policy.network import Network, TrainingSettings
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.patches import ImagePatchFn, patch_bytes
from megatron_rl.policy.trainable_model import TrainableModel
from megatron_rl.policy.transformer import HeadConfig
from megatron_rl.types import LossMetrics, MicroBatch, ValueLoss


class Critic(TrainableModel):
    """Value model with its own backbone and optimizer, using the policy's parallel layout."""

    def __init__(
        self, settings: CriticSettings, layout: Layout, *,
        model: ModelSettings, training: TrainingSettings, patches: ImagePatchFn = patch_bytes,
    ) -> None:  # fmt: skip
        """Load a backbone and add a value head.

        Args:
            settings: Critic settings. `settings.path` is the checkpoint of the backbone; if it is
                empty, the backbone is loaded from `model.path`.
            layout: Parallel layout shared by policy and critic.
            model: Model settings of the policy. The critic uses the same dtype and frozen parts.
            training: Optimizer, learning-rate schedule, adapters and offloading of the critic.
            patches: Function that returns the patches of an image.
        """
        spec = read_spec(settings.path or model.path, key="critic.path" if settings.path else "model.path")
        heads = HeadConfig(has_lm_head=False, value_sizes=settings.head_sizes, normalizes_returns=settings.normalize_returns)
        built = load_model(
            spec, layout, settings.path or model.path,
            dtype=model.dtype, lora=training.lora, heads=heads, seed=training.seed, key="critic.path" if settings.path else "model.path",
        )  # fmt: skip
        self.network = Network(
            built.chunks, layout, training=training, frozen=model.frozen, head_lr=training.optim.lr, patches=patches
        )  # fmt: skip

    def update(self, batches: list[MicroBatch], loss: ValueLoss, *, step: int) -> dict[str, float]:
        """Run one optimizer update with the given loss; see Network.update.

        Returns the metrics value/loss, value/grad_norm and value/lr.
        """

        def on_hidden(batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
            rows = self._value_loss_inputs(batch, rows_R, hidden_RH)
            value, metrics = loss(rows)
            metrics.checks.update(rows.finite_checks())
            return value, metrics

        found = self.network.update(batches, on_hidden, step=step)
        return {f"value/{name.removeprefix('value/')}": found[name] for name in ("value/loss", "grad_norm", "lr")}
