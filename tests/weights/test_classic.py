"""Classic Megatron checkpoints: mapping of a pipeline chunk's layers to layers of the whole
model."""

from pathlib import Path

import pytest
import torch

from megatron_rl.weights.formats.classic import open_classic

NAME = "decoder.layers.{}.mlp.linear_fc2.weight"


@pytest.mark.parametrize(("stages", "chunks", "layers"), [(1, 1, 3), (2, 1, 2), (2, 2, 2), (2, 12, 1), (1, 11, 2)])
@pytest.mark.parametrize("tp", [1, 2])
def test_chunks_of_an_interleaved_pipeline_go_round_the_stages(tmp_path: Path, stages: int, chunks: int, layers: int, tp: int) -> None:
    """Chunks of an interleaved pipeline are assigned to the stages in turn, as Megatron does (arXiv
    2104.04473, 2.2). The first layers are stage 0's first chunk, the next ones stage 1's first
    chunk, and so on. Each weight holds its layer number; chunk keys are stored in reverse order."""
    for rank in range(tp):
        for stage in range(stages):
            state: dict[str, object] = {"args": None}
            for chunk in reversed(range(chunks)):
                first = (chunk * stages + stage) * layers
                named = {NAME.format(layer): torch.full((2,), float(first + layer + 1000 * rank)) for layer in range(layers)}
                state["model" if chunks == 1 else f"model{chunk}"] = named
            folder = tmp_path / (f"mp_rank_{rank:02}" + (f"_{stage:03}" if stages > 1 else ""))
            folder.mkdir()
            torch.save(state, folder / "model_optim_rng.pt")
    ranks = open_classic(tmp_path)
    assert len(ranks) == tp
    for number, rank in enumerate(ranks):
        found = {name: rank.read(name).tolist() for name in rank.specs}
        assert found == {f"language.{NAME.format(layer)}": [layer + 1000.0 * number] * 2 for layer in range(stages * chunks * layers)}
