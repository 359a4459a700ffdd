"""launch/train.py with a check of its saved model: every rank reads the folder back and compares it
with the parameters that it trained.
"""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.config import OptimSettings, ParallelSettings
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.policy import Policy
from megatron_rl.types import SpecialTokens

TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"
save = Policy.save_hf


def save_and_compare(self: Policy, out: Path, *, card: str) -> None:
    """Save the model, load a second policy from the folder in the same layout, and check that every
    parameter of this rank is equal, bit for bit.
    """
    save(self, out, card=card)
    saved = Policy(
        replace(self.settings, path=str(out)), self.layout,
        training=TrainingSettings(parallel=ParallelSettings(), optim=OptimSettings(), num_steps=1),
        special_tokens=SpecialTokens(image_token_id=self.image_token_id),
    )  # fmt: skip
    trained = dict(self.network.chunks.named_parameters())
    for name, parameter in saved.network.chunks.named_parameters():
        assert torch.equal(parameter, trained.pop(name)), f"{name} was trained, but something else was saved"
    assert not trained, f"not saved: {sorted(trained)}"
    print("witness: saved is trained", flush=True)


if __name__ == "__main__":
    Policy.save_hf = save_and_compare
    sys.argv[0] = str(TRAIN)
    runpy.run_path(str(TRAIN), run_name="__main__")
