"""How long prompts are, measured without rendering them: the words of a question, the tokens of its pictures, what stands around them."""

from typing import Protocol

from megatron_rl.config import Settings, require
from megatron_rl.data.records import PLACE
from megatron_rl.data.survey import Size
from megatron_rl.types import Example, TokenSequence

HIDDEN = "pyvision_gym_wo_image_hint"
"""The `env_name` of examples whose pictures only the code sees."""


class Measures(Protocol):
    """What is needed of a renderer."""

    vision_pixels: int
    """Side of the square of pixels that is one vision token."""

    def num_tokens(self, text: str) -> int: ...

    def final_size(self, width: int, height: int) -> Size: ...


class Prompts:
    """Looks at one question after the other (survey.Look)."""

    def __init__(self, settings: Settings, measures: Measures, *, around: int = 0) -> None:
        """`around`: tokens that the task and the chat template write around a question."""
        self.longest = 0
        """Tokens of the longest question with its pictures."""
        self.misfits: list[bool] = []
        """Whether each question does not fit, in the order in which they were looked at."""
        self.max_images = settings.engine.max_images
        self.room = settings.engine.max_model_len - 1 - around
        self._settings, self._measures, self._around = settings, measures, around

    def length(self, example: Example, sizes: list[Size]) -> int:
        sizes = [] if example.payload["env_name"] == HIDDEN else sizes
        text = str(example.payload["question"]).replace(PLACE, "<|vision_start|><|vision_end|>")
        return self._measures.num_tokens(text) + sum(map(self._vision_tokens, sizes))

    def look(self, example: Example, sizes: list[Size]) -> list[str]:
        """What keeps a question from being played: a reply has at least one token."""
        length = self.length(example, sizes)
        self.longest = max(self.longest, length)
        wrong = []
        if length > self.room:
            beside = f" beside the {self._around} of its prompt" if self._around else ""
            wrong.append(f"{length} tokens{beside} leave no room for a reply; raise engine.max_model_len or lower model.max_pixels")
        if len(sizes) > self.max_images:
            wrong.append(f"{len(sizes)} pictures; raise engine.max_images={self.max_images}")
        self.misfits.append(bool(wrong))
        return wrong

    def require_played(self, split: str, *, num: int, told: str) -> None:
        """ValueError: of the first `num` questions of a split more do not fit than run.max_failed_fraction allows. `told`: one of them."""
        data, allowed, misfits = self._settings.task.data, self._settings.run.max_failed_fraction, sum(self.misfits[:num])
        files = {"train": data.train, "eval": data.eval}[split]
        remedy = f"{misfits} of {num} prompts do not fit, run.max_failed_fraction={allowed}; {told}"
        require(misfits <= allowed * num, f"task.data.{split}", files, remedy)

    def _vision_tokens(self, size: Size) -> int:
        width, height = self._measures.final_size(*size)
        return width * height // self._measures.vision_pixels**2


def around(example: Example, prompt: TokenSequence, settings: Settings, measures: Measures) -> int:
    """Tokens that the task and the chat template write around a question, told by the prompt that they made of this one."""
    alone = Prompts(settings, measures)
    alone.look(example, [image.size() for image in example.payload["images"]])
    return len(prompt.token_ids) - alone.longest
