"""Tests which tokens of a transcript SFT trains on, from the row of the file to the labels of the
batch. Oracle: ChatML written by hand.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_rl.batching.packing import pack
from megatron_rl.config import BatchSettings, DataSettings, EngineSettings, ModelSettings, Settings
from megatron_rl.data.transcript_survey import make_length_check
from megatron_rl.data.transcripts import load_demonstrations
from megatron_rl.models.hf_config import read_spec
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.sft import RenderedDemonstrations
from megatron_rl.types import Demonstration, MicroBatch
from tests.support.data_files import make_png, write_rows

SIZE = (56, 56)
"""Size of every image in this file: 4 tokens."""


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


def batch_of(row: dict, folder: Path, renderer: Renderer, model: Path) -> MicroBatch:
    path = write_rows(folder / "t.jsonl", [row])
    shown = load_demonstrations(DataSettings(demonstrations=[str(path)]), "transcripts", num=1, seed=0)
    return pack(
        [RenderedDemonstrations(renderer, shown)[0]], image_token_id=renderer.image_token_id, positions=read_spec(model).rope_positions
    )


def by_hand(renderer: Renderer, pieces: Sequence[tuple[str, int]]) -> tuple[list[int], list[int]]:
    """Return the token ids of the pieces, where <P> is an image of 4 tokens, and a mask that is 1
    for each token of a trained piece.
    """
    ids, mask = [], []
    for text, learned in pieces:
        picture = f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>"
        tokens = renderer.tokenizer(text.replace("<P>", picture), add_special_tokens=False)["input_ids"]
        ids += tokens
        mask += [learned] * len(tokens)
    return ids, mask


SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
FLAGS = {"loss": (False, True), "weight": (0, 1), "trainable": (False, True), "loss_mask": (0, 1), "loss_scale": (0.0, 1.0)}


def turn(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.known_failure("masked-turns-learned")
@pytest.mark.parametrize("flag", FLAGS)
def test_a_masked_reply_is_read_and_not_learned(flag: str, renderer: Renderer, random_model: Path, tmp_path: Path) -> None:
    no, yes = FLAGS[flag]
    row = {
        "image": make_png(size=SIZE),
        "conversations": [
            {"from": "human", "value": "What is there?"},
            {"from": "gpt", "value": "bad", flag: no},
            {"from": "human", "value": "And now?"},
            {"from": "gpt", "value": "good", flag: yes},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "unsure", flag: no},
        ],
    }
    batch = batch_of(row, tmp_path, renderer, random_model)
    ids, mask = by_hand(
        renderer,
        [
            (SYSTEM + turn("<P>\nWhat is there?"), 0),
            ("bad<|im_end|>", 0),
            ("\n" + turn("And now?"), 0),
            ("good<|im_end|>", 1),
            ("\n" + turn("Sure?"), 0),
            ("unsure<|im_end|>", 0),
        ],
    )
    assert batch.token_T.tolist() == ids
    assert batch.target_T.tolist() == [*ids[1:], 0] and batch.mask_T.int().tolist() == [*mask[1:], 0]
    assert batch.weight_T.tolist() == [*map(float, mask[1:]), 0.0]
    assert batch.denominator == sum(mask) > 1, "the mean is over learned tokens alone"


def test_what_is_masked_counts_nothing(renderer: Renderer, random_model: Path, tmp_path: Path) -> None:
    """Two rows that differ only in the flag of a masked response have the same tokens, and the same
    labels for the other response.
    """
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}, {"role": "user", "content": "d"}]
    masked, learned = (
        batch_of({"messages": [talk[0], talk[1] | flag, talk[2], talk[1]]}, tmp_path, renderer, random_model) for flag in ({"loss": 0}, {})
    )
    assert masked.token_T.equal(learned.token_T) and masked.target_T.equal(learned.target_T)
    num = len(renderer.tokenizer("b c<|im_end|>", add_special_tokens=False)["input_ids"])
    assert (masked.denominator, learned.denominator) == (num, 2 * num)
    assert masked.mask_T.logical_and(learned.mask_T).equal(masked.mask_T)


ASKED = {"role": "user", "content": "?"}
LATE = {
    "nothing learned": ([ASKED, {"role": "assistant", "content": "x", "loss": False}], "contains no assistant message with a loss"),
    "a picture in a reply": (
        [ASKED, {"role": "assistant", "content": [{"type": "image", "image": None}]}],
        r"messages\[1\]: the assistant message contains an image",
    ),
    "a token that is never sampled": (
        [ASKED, {"role": "assistant", "content": "a <|image_pad|>"}],
        "a response contains <|image_pad|>, which",
    ),
}


@pytest.mark.known_failure("image-word-in-response")
@pytest.mark.parametrize("name", LATE)
def test_what_cannot_be_rendered_is_named_by_file_and_row(name: str, renderer: Renderer) -> None:
    messages, told = LATE[name]
    with pytest.raises(ValueError, match=f"^t.jsonl row 3: {told}"):
        RenderedDemonstrations(renderer, [Demonstration(messages, where="t.jsonl row 3")])[0]
    with pytest.raises(ValueError, match=f"^demonstration 0: {told}"):
        RenderedDemonstrations(renderer, [Demonstration(messages)])[0]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            "{{ raise_exception('system role not supported') }}",
            r".* its chat template cannot render these messages: system role not supported",
        ),
        (
            "{% for m in messages %}<{{ m.content if loop.last or m.role == 'user' else '' }}{% endfor %}",
            r"messages\[3\]: .* rewrites messages before this response",
        ),
    ],
)
def test_a_chat_template_that_does_not_fit_is_named(template: str, told: str, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second template leaves out earlier responses, as templates of thinking models drop
    earlier thoughts.
    """
    messages = [ASKED, {"role": "assistant", "content": "x"}, ASKED, {"role": "assistant", "content": "y"}]
    monkeypatch.setattr(renderer.processor, "chat_template", template)
    with pytest.raises(ValueError, match=f"^t.jsonl row 3: {told}"):
        RenderedDemonstrations(renderer, [Demonstration(messages, where="t.jsonl row 3")])[0]


def test_a_transcript_is_measured_without_its_pixels_and_refused_where_it_is_too_long(renderer: Renderer, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Look: <image>!"}, {"role": "assistant", "content": "It is red."}]
    rows = [{"images": [{"bytes": make_png(size=(300, 200))}] * times, "messages": talk * times} for times in (1, 3)]
    data = DataSettings(demonstrations=[str(write_rows(tmp_path / "t.jsonl", rows))])
    shown = load_demonstrations(data, "transcripts", num=2, seed=0)
    lengths = sorted(len(renderer.transcript(each.messages).token_ids) for each in shown)
    for micro, engine, is_bad in ((lengths[1], 1, False), (1, lengths[1], False), (lengths[1] - 1, lengths[0], True)):
        settings = Settings(batch=BatchSettings(micro_batch_tokens=micro), engine=EngineSettings(max_model_len=engine))
        check = make_length_check(settings, renderer)
        if not is_bad:
            shown.check_lengths(check)
            continue
        told = f"{lengths[1]} tokens, but memory is planned for {micro}; raise batch.micro_batch_tokens={micro}"
        with pytest.raises(ValueError, match=f"^t.jsonl row 1: {told}"):
            shown.check_lengths(check)
