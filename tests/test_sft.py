"""The warm start's demonstrations: rendered when needed, kept within a bound, and the same as if all had been rendered at once."""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import pytest
from PIL import Image as Pillow

from megatron_rl import sft
from megatron_rl.batch import pack
from megatron_rl.config import ModelSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Demonstration


class Counted(Sequence[Demonstration]):
    """Three transcripts with one picture of 56 x 56 each, and how often each was asked for."""

    def __init__(self) -> None:
        self.asked = [0, 0, 0]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Demonstration:
        self.asked[index] += 1
        picture = Pillow.new("RGB", (56, 56), (40 * index, 0, 0))
        question = {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]}
        return Demonstration([question, {"role": "assistant", "content": f"answer {index}"}])


@pytest.mark.parametrize(("kept_bytes", "asked"), [(1 << 30, [1, 1, 1]), (2 * 56 * 56 * 3, [1, 1, 3]), (0, [3, 3, 3])])
def test_round_and_round_within_the_bound(random_model: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int, asked: list[int]) -> None:
    renderer = Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))
    positions = read_spec(random_model).positions
    whole = [renderer.transcript(Counted()[index].messages) for index in range(3)]
    monkeypatch.setattr(sft, "KEPT_BYTES", kept_bytes)
    demonstrations = Counted()
    shown = sft.Rendered(renderer, demonstrations)
    assert demonstrations.asked == [0, 0, 0], "nothing before it is needed"
    for number in range(9):
        weighted, expected = shown[number], whole[number % 3]
        assert (weighted.context.token_ids, weighted.context.loss_mask) == (expected.token_ids, expected.loss_mask)
        assert weighted.denominator == sum(expected.loss_mask)
        assert [image.patch_PC for image in weighted.context.images] == [None], "patches are made for what a rank trains on"
        batch = pack([weighted], image_token_id=renderer.image_token_id, positions=positions)
        assert renderer.patches(batch.images[0], attrgetter("picture")).equal(expected.images[0].patch_PC)
    assert demonstrations.asked == asked
