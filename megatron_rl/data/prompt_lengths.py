"""Measures prompt lengths without rendering the prompts.

A prompt length is the number of tokens in the question and its images, plus the number of tokens
that the task and the chat template add.
"""

from typing import Protocol

from megatron_rl.config import Settings, require
from megatron_rl.data.records import IMAGE_PLACEHOLDER
from megatron_rl.data.survey import Size
from megatron_rl.types import Example, TokenSequence

HIDDEN_IMAGE_ENV = "pyvision_gym_wo_image_hint"
"""`env_name` of examples whose images are available to executed code but not to the policy."""


class PromptMeasurer(Protocol):
    """Subset of the renderer's interface needed to measure prompts."""

    vision_token_side: int
    """Side length, in pixels, of the square image region that one vision token represents."""

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens in a text."""
        ...

    def final_size(self, width: int, height: int) -> Size:
        """Return the width and height of an image after the image processor has resized it."""
        ...


class PromptLengthChecker:
    """Checks that each question fits the sequence length and has no more images than allowed.

    `check_question` can be passed to survey_questions as a QuestionCheck.
    """

    def __init__(self, settings: Settings, measurer: PromptMeasurer, *, overhead_tokens: int = 0) -> None:
        """Create a checker.

        Args:
            settings: settings of the run.
            measurer: renderer that counts tokens.
            overhead_tokens: number of tokens that the task and the chat template add to a question.
        """
        self.max_question_tokens = 0
        """Number of tokens in the longest question so far, including image tokens."""
        self.num_enlarged = 0
        """Number of images with more than model.max_pixels pixels after the resize."""
        self.enlarged_example = ""
        """The first of these images. Example: `160 x 120 becomes 168 x 140 (23520 pixels)`."""
        self.does_not_fit: list[bool] = []
        """One entry per checked question, in order; True if the question does not fit."""
        self.max_images = settings.engine.max_images
        self.available_tokens = settings.engine.max_model_len - 1 - overhead_tokens
        self._settings, self._measurer, self._overhead_tokens = settings, measurer, overhead_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """Number of tokens in the longest prompt so far, including image tokens."""
        return self.max_question_tokens + self._overhead_tokens

    def pixel_warnings(self) -> list[str]:
        """Return a warning if images exceed model.max_pixels because of the rounding of sides."""
        if not self.num_enlarged:
            return []
        side, limit = self._measurer.vision_token_side, self._settings.model.max_pixels
        return [
            f"model.max_pixels={limit}: {self.num_enlarged} images exceed it, e.g. {self.enlarged_example}: sides are multiples of {side}; "
            "lower model.min_pixels, or raise model.max_pixels so that the limits agree with what the model sees"
        ]

    def measure_length(self, example: Example, sizes: list[Size]) -> int:
        """Return the number of tokens in a question and its images."""
        sizes = [] if example.payload["env_name"] == HIDDEN_IMAGE_ENV else sizes
        text = str(example.payload["question"]).replace(IMAGE_PLACEHOLDER, "<|vision_start|><|vision_end|>")
        return self._measurer.count_tokens(text) + sum(map(self._vision_tokens, sizes))

    def check_question(self, example: Example, sizes: list[Size]) -> list[str]:
        """Return the reasons why a question cannot be used.

        At least one token must remain for the response.
        """
        length = self.measure_length(example, sizes)
        self.max_question_tokens = max(self.max_question_tokens, length)
        for size in sizes:
            self._count_enlarged(size)
        wrong = []
        if length > self.available_tokens:
            in_addition = f" in addition to the {self._overhead_tokens} of its prompt" if self._overhead_tokens else ""
            wrong.append(f"{length} tokens{in_addition} leave no room for a response; raise engine.max_model_len or lower model.max_pixels")
        if len(sizes) > self.max_images:
            wrong.append(f"{len(sizes)} images; raise engine.max_images={self.max_images}")
        self.does_not_fit.append(bool(wrong))
        return wrong

    def check_enough_fit(self, split: str, *, num: int, example_error: str) -> None:
        """Raise ValueError if too many of the first `num` questions of a split do not fit.

        The limit is run.max_failed_fraction.

        Args:
            split: "train" or "eval".
            num: number of questions to consider.
            example_error: error about one question that does not fit, quoted in the message.
        """
        data, allowed, misfits = self._settings.task.data, self._settings.run.max_failed_fraction, sum(self.does_not_fit[:num])
        files = {"train": data.train, "eval": data.eval}[split]
        remedy = f"{misfits} of {num} prompts do not fit, run.max_failed_fraction={allowed}; {example_error}"
        require(misfits <= allowed * num, f"task.data.{split}", files, remedy)

    def _count_enlarged(self, size: Size) -> None:
        width, height = self._measurer.final_size(*size)
        if width * height > self._settings.model.max_pixels:
            self.num_enlarged += 1
            told = f"{size[0]} x {size[1]} becomes {width} x {height} ({width * height} pixels)"
            self.enlarged_example = self.enlarged_example or told

    def _vision_tokens(self, size: Size) -> int:
        width, height = self._measurer.final_size(*size)
        return width * height // self._measurer.vision_token_side**2


def measure_prompt_overhead(example: Example, prompt: TokenSequence, settings: Settings, measurer: PromptMeasurer) -> int:
    """Return the number of tokens that the task and the chat template add to a question.

    Args:
        example: the question.
        prompt: the prompt rendered from the question.
        settings: settings of the run.
        measurer: renderer that counts tokens.
    """
    alone = PromptLengthChecker(settings, measurer)
    alone.check_question(example, [image.size() for image in example.payload["images"]])
    return len(prompt.token_ids) - alone.max_question_tokens
