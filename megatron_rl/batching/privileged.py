"""Prompts with information that only the teacher reads."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_rl.batching.minibatches import PackItem, RankShares
from megatron_rl.types import Rollout, TokenSequence

_FIELD = re.compile(r"\{(\w+)\}")


def fill_template(template: str, rollout: Rollout) -> str:
    """Return the template with {question}, {answer} and fields of `extra` replaced.

    Returns "" if the rollout's example lacks one of the fields, or if the field is empty.
    """
    extra = json.loads(rollout.extra) if rollout.extra else {}
    fields = {**extra, "question": rollout.question, "answer": rollout.answer}
    values = {name: fields.get(name) for name in _FIELD.findall(template)}
    if any(value in (None, "", [], {}) for value in values.values()):
        return ""
    return _FIELD.sub(lambda found: str(values[found[1]]), template)


@dataclass(slots=True, frozen=True)
class PrivilegedPrompt:
    """Inserts the filled template at the end of the last message before the first response."""

    template: str
    """Text with fields in braces (distill.privileged_prompt)."""
    encode: Callable[[str], list[int]]
    """Function that returns the ids of a text, in which special tokens are ordinary text."""
    end_id: int
    """Id of the token that ends a message."""

    def extend(self, shares: RankShares, rollouts: list[Rollout]) -> RankShares:
        """Return the sequences that the teacher reads, in the same micro-batches and order."""
        return [[[self._extend_item(item, rollouts) for item in part] for part in parts] for parts in shares]

    def _extend_item(self, item: PackItem, rollouts: list[Rollout]) -> PackItem:
        assert item.origin is not None
        return replace(item, sequence=self.extend_sequence(item.sequence, rollouts[item.origin[0]]), origin=None)

    def extend_sequence(self, sequence: TokenSequence, rollout: Rollout) -> TokenSequence:
        """Return what the teacher reads of a sequence of the rollout."""
        return self.insert(sequence, fill_template(self.template, rollout))

    def insert(self, sequence: TokenSequence, text: str) -> TokenSequence:
        """Return a copy of the sequence with the text before the prompt's last end of a message.

        The copy has the same sampled tokens. An empty text changes nothing.
        """
        first = sequence.loss_mask.index(1)
        place = next((place for place in reversed(range(first)) if sequence.token_ids[place] == self.end_id), 0)
        ids = self.encode(text) if text else []
        return TokenSequence(
            token_ids=[*sequence.token_ids[:place], *ids, *sequence.token_ids[place:]],
            loss_mask=[*sequence.loss_mask[:place], *[0] * len(ids), *sequence.loss_mask[place:]],
            rollout_logprobs=[0.0] * (len(sequence.token_ids) + len(ids)),
            weight_versions=[-1] * (len(sequence.token_ids) + len(ids)),
            images=sequence.images,
        )
