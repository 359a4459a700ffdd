"""Base class of policy and critic: a trainable network with an optional value head."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.batching.packing import turn_ids
from megatron_rl.policy.network import Network
from megatron_rl.policy.training_state import AsyncSave
from megatron_rl.types import MicroBatch, ValueLossInputs


class TrainableModel:
    """Base class of `Policy` and `Critic`: values, image patches, checkpoints and offloading."""

    network: Network

    def values(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        """Return the values [T] of each micro-batch; 0 where mask_T is False.

        Entry t is the value of the state before target t. Requires a value head.
        """
        return [value_1T[0] for value_1T in self.network.forward_only(batches, self._value_R)]

    def load_image_patches(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with the patches of this rank's images added."""
        return self.network.load_image_patches(batch)

    def update_return_stats(self, returns: Sequence[float]) -> None:
        """Update the value head's return statistics with the returns of one step.

        Pass the same returns on every rank. Does nothing on ranks without a value head.
        """
        head = self.network.chunks[-1].value_head
        if head is not None:  # only the last pipeline stage has the head
            head.update_return_stats(returns)

    def _value_R(self, batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
        head = self.network.chunks[-1].value_head
        assert head is not None
        return head.denormalize(head(hidden_RH))

    def _value_loss_inputs(self, batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> ValueLossInputs:
        """Return the inputs of the value loss for one micro-batch.

        Values and returns are normalized if the value head normalizes returns.
        """
        head = self.network.chunks[-1].value_head
        assert head is not None and batch.old_value_T is not None and batch.return_T is not None
        return ValueLossInputs(
            value_R=head(hidden_RH),
            old_value_R=head.normalize(batch.old_value_T[rows_R]),
            return_R=head.normalize(batch.return_T[rows_R]),
            weight_R=batch.weight_T[rows_R] * (not batch.is_demonstration),  # demonstrations have no returns
            turn_R=turn_ids(rows_R),
        )

    def save(self, folder: Path, *, background: bool) -> AsyncSave:
        """Start writing the training state into `folder`; see Network.save."""
        return self.network.save(folder, background=background)

    def load(self, folder: Path, *, seed: int) -> None:
        """Restore a training state; see Network.load."""
        self.network.load(folder, seed=seed)

    def sleep(self) -> None:
        """Free device memory for the rollout engine; see Network.sleep."""
        self.network.sleep()

    def wake(self) -> None:
        """Move the parameters back to the device; see Network.wake."""
        self.network.wake()

    def close(self) -> None:
        """Release the network, so that the process groups can be destroyed.

        The model cannot be used afterwards.
        """
        self.network.close()
