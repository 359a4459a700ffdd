"""Prompts that only the teacher reads, by hand."""

import torch

from megatron_rl.batching.minibatches import PackItem
from megatron_rl.batching.packing import pack
from megatron_rl.batching.privileged import PrivilegedPrompt, fill_template
from megatron_rl.types import Rollout, TokenSequence

END = 50
PROMPT = PrivilegedPrompt("The answer is {answer}.", lambda text: [60] if "long" not in text else [60, 61, 62], END)


def straight(token_ids: list[int], images: list) -> torch.Tensor:
    """Return rotary positions for text without images."""
    return torch.arange(len(token_ids)).expand(3, -1)


def test_fields_of_the_example_are_replaced() -> None:
    """A field that is missing or empty leaves the prompt as it is; values are not templates."""
    rollout = Rollout("t", "0", 0, 0, question="2 + 2?", answer="{extra}", extra='{"steps": ["two", 2], "none": ""}')
    assert fill_template("{question} {answer} {steps} {}", rollout) == "2 + 2? {extra} ['two', 2] {}"
    assert fill_template("{answer} {none}", rollout) == fill_template("{other}", rollout) == ""


def test_the_text_ends_the_last_message_before_the_first_response() -> None:
    sequence = TokenSequence([1, END, 2, 3, END, 4, 5, 6, END, 7, 8], [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1], [-1.0] * 11, [3] * 11)
    found = PROMPT.insert(sequence, "long")
    assert found.token_ids == [1, END, 2, 3, 60, 61, 62, END, 4, 5, 6, END, 7, 8]
    assert found.loss_mask == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1]
    assert PROMPT.insert(sequence, "").token_ids == sequence.token_ids
    assert len(sequence.token_ids) == 11, "the policy's sequence is not changed"


def test_the_teacher_reads_the_same_sampled_tokens_in_the_same_order() -> None:
    """Groups share prompts, with information of different lengths; one example has none."""
    rollouts = [Rollout("t", "0", number, 0, answer=answer) for number, answer in enumerate(("x", "x", "long", ""))]
    for number, rollout in enumerate(rollouts):
        prompt = [1, 2, END, 4] if number < 2 else [1, 3, END, 4]
        sampled = [10 * number + place for place in range(2 + number)]
        length, mask = len(prompt + sampled), [0] * 4 + [1] * len(sampled)
        rollout.sequences = [TokenSequence(prompt + sampled, mask, [0.0] * length, [-1] * length)]
    part = [PackItem(rollout.sequences[0], origin=(number, 0)) for number, rollout in enumerate(rollouts)]
    (((*read,),),) = PROMPT.extend([[part]], rollouts)
    assert [item.origin for item in read] == [None] * 4
    assert [item.num_tokens - own.num_tokens for item, own in zip(read, part, strict=True)] == [1, 1, 3, 0]
    batch, other = (pack(items, image_token_id=99, positions=straight, share_prompts=True, multiple_of=4) for items in (part, read))
    assert batch.target_T[batch.row_R].tolist() == other.target_T[other.row_R].tolist()
