"""SFT demonstrations are rendered when they are needed and cached up to a limit. They equal
demonstrations that are rendered all at once.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image as Pillow

from megatron_rl import sft
from megatron_rl.batching.packing import pack
from megatron_rl.config import BatchSettings, DataSettings, DistillSettings, ModelSettings, RunSettings, Settings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Demonstration, TokenSequence
from tests.support.data_files import write_rows
from tests.support.transcripts import REPLY, USER


class Counted(Sequence[Demonstration]):
    """Three transcripts with one 56 x 56 image each. Counts how often each transcript
    is requested.
    """

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
    """Three demonstrations, used three times each, are rendered once if the cache is large enough
    and again whenever it is not. Oracle: transcripts rendered directly.
    """
    renderer = Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))
    positions = read_spec(random_model).rope_positions
    whole = [renderer.transcript(Counted()[index].messages) for index in range(3)]
    monkeypatch.setattr(sft, "CACHE_BYTES", kept_bytes)
    demonstrations = Counted()
    shown = sft.RenderedDemonstrations(renderer, demonstrations)
    assert demonstrations.asked == [0, 0, 0], "nothing before it is needed"
    for number in range(9):
        weighted, expected = shown[number], whole[number % 3]
        assert (weighted.sequence.token_ids, weighted.sequence.loss_mask) == (expected.token_ids, expected.loss_mask)
        assert weighted.denominator == sum(expected.loss_mask)
        assert [image.patch_PC for image in weighted.sequence.images] == [None], "patches are made for what a rank trains on"
        batch = pack([weighted], image_token_id=renderer.image_token_id, positions=positions)
        assert renderer.patches(batch.images[0], attrgetter("pil")).equal(expected.images[0].patch_PC)
    assert demonstrations.asked == asked


def test_demonstrations_of_a_step(random_model: Path, tmp_path: Path) -> None:
    """Two of six samples are demonstrations, read from shuffled passes over five rows. A step's
    demonstrations depend neither on earlier steps nor on the number of steps, as a resumed or
    longer run needs. Every pass has every row once, and another seed gives another order."""
    renderer = Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))
    rows = [{"messages": [USER, {"role": "assistant", "content": "one " * (number + 1)}]} for number in range(5)]
    data = DataSettings(demonstrations=[str(write_rows(tmp_path / "t.jsonl", rows))])
    task = SimpleNamespace(settings=SimpleNamespace(data=data), find_prompt_mismatch=lambda _: "")

    def load(*, steps: int, seed: int = 0, fraction: float = 1 / 3) -> Callable[[int], list[TokenSequence]] | None:
        settings = Settings(
            model=ModelSettings(path=str(random_model)), run=RunSettings(dir="x", steps=steps, seed=seed),
            batch=BatchSettings(prompts_per_step=2, group_size=2), distill=DistillSettings(teacher="t", data_fraction=fraction),
        )  # fmt: skip
        return sft.load_step_demonstrations(settings, task=task, renderer=renderer, log=lambda _: None)

    def read(step_demonstrations: Callable | None, steps: Sequence[int]) -> list[list[int]]:
        assert step_demonstrations is not None
        return [sequence.token_ids for step in steps for sequence in step_demonstrations(step)]

    whole = read(load(steps=5), range(5))
    rendered = sorted(renderer.transcript(row["messages"]).token_ids for row in rows)
    assert sorted(whole[:5]) == sorted(whole[5:]) == rendered
    assert read(load(steps=5), (3, 4)) == read(load(steps=9), (3, 4)) == whole[6:]
    assert read(load(steps=5, seed=1), range(5)) != whole
    assert load(steps=5, fraction=0.0) is None


def test_columns_that_are_not_read_are_told_once(random_model: Path, tmp_path: Path) -> None:
    """Unread columns are reported once, before the first step, although two SFT stages use the same
    files. Packing returns nothing here, which ends each stage.
    """
    renderer = Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))
    path = write_rows(tmp_path / "t.jsonl", [{"messages": [USER, REPLY], "no_loss": True}])
    lines: list[str] = []
    settings = SimpleNamespace(
        sft=SimpleNamespace(splits=["transcripts"] * 2, steps=[1, 1], num_demonstrations=1, batch_size=1), run=SimpleNamespace(seed=0),
        batch=SimpleNamespace(micro_batch_tokens=999), engine=SimpleNamespace(max_model_len=999), distill=DistillSettings(),
    )  # fmt: skip
    task = SimpleNamespace(settings=SimpleNamespace(data=DataSettings(demonstrations=[str(path)])), find_prompt_mismatch=lambda _: "")
    policy = SimpleNamespace(pack=lambda *_, **__: [], update=lambda *_, **__: {}, load_image_patches=None)
    run = SimpleNamespace(
        step_timer=lambda _: nullcontext(), dump_batches_on_error=lambda *_, **__: nullcontext(), record=lambda *_: None, first_step=0,
        history=[], log=lines.append, stops_early=False,
    )  # fmt: skip
    checkpoints = SimpleNamespace(restore=lambda: None, begin_step=lambda *_, **__: None, finish_step=lambda *_, **__: None)
    stop = SimpleNamespace(check=lambda: None)
    sft.train_sft(settings, task=task, policy=policy, renderer=renderer, run=run, checkpoints=checkpoints, stop_signal=stop)
    assert [line.partition(": only")[0] for line in lines] == [
        "warning: task.data.demonstrations: t.jsonl row 0: column no_loss is not read"
    ]
