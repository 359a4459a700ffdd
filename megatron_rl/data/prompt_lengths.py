"""How long prompts are, measured without rendering them: the words of a question, the tokens of its pictures, what stands around them."""

from typing import Protocol

from megatron_rl.config import Settings, require
from megatron_rl.data.records import IMAGE_PLACEHOLDER
from megatron_rl.data.survey import Size
from megatron_rl.types import Example, TokenSequence

HIDDEN_IMAGE_ENV = "pyvision_gym_wo_image_hint"
"""The `env_name` of examples whose pictures only the code sees."""


class PromptMeasurer(Protocol):
    """What is needed of a renderer."""

    vision_token_side: int
    """Side of the square of pixels that is one vision token."""

    def count_tokens(self, text: str) -> int: ...

    def final_size(self, width: int, height: int) -> Size: ...


class PromptLengthChecker:
    """Looks at one question after the other (survey.Look)."""

    def __init__(self, settings: Settings, measurer: PromptMeasurer, *, overhead_tokens: int = 0) -> None:
        """`overhead_tokens`: tokens that the task and the chat template write around a question."""
        self.max_question_tokens = 0
        """Tokens of the longest question with its pictures."""
        self.does_not_fit: list[bool] = []
        """Whether each question does not fit, in the order in which they were looked at."""
        self.max_images = settings.engine.max_images
        self.available_tokens = settings.engine.max_model_len - 1 - overhead_tokens
        self._settings, self._measurer, self._overhead_tokens = settings, measurer, overhead_tokens

    def measure_length(self, example: Example, sizes: list[Size]) -> int:
        sizes = [] if example.payload["env_name"] == HIDDEN_IMAGE_ENV else sizes
        text = str(example.payload["question"]).replace(IMAGE_PLACEHOLDER, "<|vision_start|><|vision_end|>")
        return self._measurer.count_tokens(text) + sum(map(self._vision_tokens, sizes))

    def check_question(self, example: Example, sizes: list[Size]) -> list[str]:
        """What keeps a question from being played: a reply has at least one token."""
        length = self.measure_length(example, sizes)
        self.max_question_tokens = max(self.max_question_tokens, length)
        wrong = []
        if length > self.available_tokens:
            beside = f" beside the {self._overhead_tokens} of its prompt" if self._overhead_tokens else ""
            wrong.append(f"{length} tokens{beside} leave no room for a reply; raise engine.max_model_len or lower model.max_pixels")
        if len(sizes) > self.max_images:
            wrong.append(f"{len(sizes)} pictures; raise engine.max_images={self.max_images}")
        self.does_not_fit.append(bool(wrong))
        return wrong

    def check_enough_fit(self, split: str, *, num: int, example_error: str) -> None:
        """ValueError: of the first `num` questions of a split more do not fit than run.max_failed_fraction allows. `example_error`: one of
        them."""
        data, allowed, misfits = self._settings.task.data, self._settings.run.max_failed_fraction, sum(self.does_not_fit[:num])
        files = {"train": data.train, "eval": data.eval}[split]
        remedy = f"{misfits} of {num} prompts do not fit, run.max_failed_fraction={allowed}; {example_error}"
        require(misfits <= allowed * num, f"task.data.{split}", files, remedy)

    def _vision_tokens(self, size: Size) -> int:
        width, height = self._measurer.final_size(*size)
        return width * height // self._measurer.vision_token_side**2


def measure_prompt_overhead(example: Example, prompt: TokenSequence, settings: Settings, measurer: PromptMeasurer) -> int:
    """Tokens that the task and the chat template write around a question, told by the prompt that they made of this one."""
    alone = PromptLengthChecker(settings, measurer)
    alone.check_question(example, [image.size() for image in example.payload["images"]])
    return len(prompt.token_ids) - alone.max_question_tokens
