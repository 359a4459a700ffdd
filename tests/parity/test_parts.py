"""Freezing and learning rates per model part.

A trained part moves as in full training; a frozen part does not move and has no gradient buffer and
no optimizer state.
"""

from pathlib import Path

import pytest
import torch

from tests.conftest import SUPPORT
from tests.support.frozen_parts_world import CASES

FROZEN = {"vision": "visual.blocks.|visual.patch_embed.", "merger": "visual.merger.", "language": "model.|lm_head."}
LEARNING_RATE = 0.1


def part_of(name: str) -> str:
    return next(part for part, prefixes in FROZEN.items() if name.startswith(tuple(prefixes.split("|"))))


@pytest.fixture(scope="module")
def results(random_model: Path, tmp_path_factory: pytest.TempPathFactory, torchrun) -> dict[str, dict]:  # noqa: ANN001
    out = tmp_path_factory.mktemp("parts")
    torchrun(1, SUPPORT / "frozen_parts_world.py", random_model, out, 1, 1, "whole")
    torchrun(4, SUPPORT / "frozen_parts_world.py", random_model, out, 2, 2, *[case for case in CASES if case != "whole"])
    return {path.stem: torch.load(path, weights_only=True) for path in out.glob("*.pt")}


@pytest.mark.known_failure("frozen-tower")
@pytest.mark.parametrize("case", [case for case in CASES if case != "whole"])
def test_each_part_moves_at_its_own_rate_or_not_at_all(case: str, results: dict[str, dict]) -> None:
    """The change of each tensor is that of full training times the ratio of the learning rates, and
    zero if frozen. Adam's first step is proportional to the learning rate."""
    frozen, rates = CASES[case]
    whole, change = results["whole_tp1_pp1"]["change"], results[f"{case}_tp2_pp2"]["change"]
    assert change.keys() == whole.keys()
    for name, moved in change.items():
        part = part_of(name)
        factor = 0.0 if part in frozen else rates.get(part, LEARNING_RATE) / LEARNING_RATE
        assert whole[name].norm() > 0
        if factor == 0.0:
            assert torch.count_nonzero(moved) == 0, name
        else:
            assert (moved - factor * whole[name]).norm() <= 2e-5 * (factor * whole[name]).norm(), name


@pytest.mark.parametrize("case", [case for case in CASES if case != "whole"])
def test_a_frozen_part_has_no_gradient_buffer_and_no_optimizer_state(case: str, results: dict[str, dict]) -> None:
    """Frozen parts have no gradient buffer, and the optimizer state has the size of the trained
    parameters."""
    frozen, _ = CASES[case]
    for names, numel, state in results[f"{case}_tp2_pp2"]["ranks"]:
        parts = {"merger" if ".merger." in name else "vision" if ".vision." in name else "language" for name in names}
        assert not parts & set(frozen)
        assert state == numel  # one data-parallel rank holds the state of all its trained parameters only
    assert any(numel for _, numel, _ in results[f"{case}_tp2_pp2"]["ranks"])
