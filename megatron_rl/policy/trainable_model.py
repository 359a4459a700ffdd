"""What policy and critic have in common: a network that learns, maybe with a value head, and what a run does with it between updates."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.batching.packing import turn_ids
from megatron_rl.policy.network import Network
from megatron_rl.policy.training_state import AsyncSave
from megatron_rl.types import MicroBatch, ValueLossInputs


class TrainableModel:
    network: Network

    def values(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        """The value [T] of the state before each target; 0 where mask_T is False."""
        return [value_1T[0] for value_1T in self.network.forward_only(batches, self._value_R)]

    def load_image_patches(self, batch: MicroBatch) -> MicroBatch:
        """The batch with the patches of the images that this rank encodes."""
        return self.network.load_image_patches(batch)

    def update_return_stats(self, returns: Sequence[float]) -> None:
        """Take a step's returns into what the value head normalizes by. The same on every rank."""
        head = self.network.chunks[-1].value_head
        if head is not None:  # the last stage has it
            head.update_return_stats(returns)

    def _value_R(self, batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
        head = self.network.chunks[-1].value_head
        return head.denormalize(head(hidden_RH))

    def _value_loss_inputs(self, batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> ValueLossInputs:
        """What a critic's loss sees of a batch, in the head's units."""
        head = self.network.chunks[-1].value_head
        return ValueLossInputs(
            value_R=head(hidden_RH),
            old_value_R=head.normalize(batch.old_value_T[rows_R]),
            return_R=head.normalize(batch.return_T[rows_R]),
            weight_R=batch.weight_T[rows_R],
            turn_R=turn_ids(rows_R),
        )

    def save(self, folder: Path, *, background: bool) -> AsyncSave:
        """Begin to write the training state; see Network.save."""
        return self.network.save(folder, background=background)

    def load(self, folder: Path, *, seed: int) -> None:
        """Go on from a training state; see Network.load."""
        self.network.load(folder, seed=seed)

    def sleep(self) -> None:
        """Leave the device to the engine; see Network.sleep."""
        self.network.sleep()

    def wake(self) -> None:
        """Take the device back."""
        self.network.wake()

    def close(self) -> None:
        """The last thing that is done with it; the process groups can then end."""
        self.network.close()
