"""What is expected to be earned: a value head on a trunk's hidden states, and a critic whose trunk is its own."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.batch import turns_of
from megatron_rl.config import CriticSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.build import load_model
from megatron_rl.policy.network import Network
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.training_state import Save
from megatron_rl.policy.transformer import Heads
from megatron_rl.types import Batch, LossMetrics, ValueLoss, ValueRows


def read_values(network: Network, batches: list[Batch]) -> list[torch.Tensor]:
    """The value [T] of the state before each target; 0 where mask_T is False."""

    def on_hidden(batch: Batch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
        head = network.chunks[-1].value_head
        return head.to_returns(head(hidden_RH))

    return network.read(batches, on_hidden)


def value_rows(network: Network, batch: Batch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> ValueRows:
    """What a critic's loss sees of a batch, in the head's units."""
    head = network.chunks[-1].value_head
    return ValueRows(
        value_R=head(hidden_RH),
        old_R=head.to_units(batch.old_value_T[rows_R]),
        return_R=head.to_units(batch.return_T[rows_R]),
        weight_R=batch.weight_T[rows_R],
        turn_R=turns_of(rows_R),
    )


def see_returns(network: Network, returns: Sequence[float]) -> None:
    """Take a step's returns into what the head normalizes by. The same on every rank."""
    head = network.chunks[-1].value_head
    if head is not None:  # the last stage has it
        head.see(returns)


class Critic:
    """A network of its own with a value head, at the policy's layout."""

    def __init__(
        self, settings: CriticSettings, layout: Layout, *,
        model: ModelSettings, parallel: ParallelSettings, optim: OptimSettings, num_steps: int, seed: int = 0,
    ) -> None:  # fmt: skip
        """`model` is the policy's, `optim` its own."""
        spec = read_spec(settings.path or model.path, key="critic.path" if settings.path else "model.path")
        heads = Heads(speaks=False, value_sizes=settings.head_sizes, normalizes=settings.normalize_returns)
        built = load_model(
            spec, layout, settings.path or model.path,
            dtype=model.dtype, lora=settings.lora, heads=heads, seed=seed, key="critic.path" if settings.path else "model.path",
        )  # fmt: skip
        self.network = Network(
            built.chunks, layout, frozen=model.frozen, lora=settings.lora, parallel=parallel, optim=optim, num_steps=num_steps,
            head_lr=optim.lr,
        )  # fmt: skip

    def values(self, batches: list[Batch]) -> list[torch.Tensor]:
        """See read_values."""
        return read_values(self.network, batches)

    def see(self, returns: Sequence[float]) -> None:
        """See see_returns."""
        see_returns(self.network, returns)

    def update(self, batches: list[Batch], loss: ValueLoss, *, step: int) -> dict[str, float]:
        """One optimizer update of this loss; see Network.update. Metrics are called value/..."""

        def on_hidden(batch: Batch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
            rows = value_rows(self.network, batch, rows_R, hidden_RH)
            value, metrics = loss(rows)
            metrics.checks.update(rows.are_finite())
            return value, metrics

        found = self.network.update(batches, on_hidden, step=step)
        return {f"value/{name.removeprefix('value/')}": found[name] for name in ("value/loss", "grad_norm", "lr")}

    def save(self, folder: Path, *, optimizer: str, background: bool) -> Save:
        """See Network.save."""
        return self.network.save(folder, optimizer=optimizer, background=background)

    def load(self, folder: Path, *, seed: int) -> None:
        """See Network.load."""
        self.network.load(folder, seed=seed)

    def sleep(self) -> None:
        """See Network.sleep."""
        self.network.sleep()

    def wake(self) -> None:
        self.network.wake()

    def close(self) -> None:
        self.network.close()
