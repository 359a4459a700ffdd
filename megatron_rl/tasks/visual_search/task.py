"""Visual search for a model with a million parameters.

The policy receives the canvas at a resolution at which the labels are illegible. To read a label,
the policy must crop the image with Python. Episodes use PyVision's protocol with the environment
and the sandbox of visual_python. There are two differences from visual_python. First, this package
draws the canvases instead of reading images from files. Second, the rules in the prompt consist of
one line, because such a small model imitates demonstrations but does not follow instructions.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL.Image import Image as Picture

from megatron_rl.config import TaskSettings, require, require_choice
from megatron_rl.rewards import rubrics
from megatron_rl.rollout.task import Task
from megatron_rl.tasks.visual_python.env import AgentEnv
from megatron_rl.tasks.visual_python.message_parts import make_message
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.tasks.visual_python.task import make_sandbox, start_sandbox
from megatron_rl.tasks.visual_search.drawing import LABELS, Box, SearchLevel, SearchScene, draw_shapes, make_scene
from megatron_rl.types import Demonstration, Example, Message, ToolCall

DISC_SPRITES = draw_shapes(("disc",), colors=("red", "green", "blue", "yellow", "purple", "black"))
SEARCH_RULES = "Look, then answer."
NANO_LEVEL = SearchLevel(grid_side=5, cell_px=100, num_objects=3, object_scale=0.8, plate_scale=0.55, label_scale=0.13)
"""Level for nano models. If the canvas is resized to 140 x 140 pixels, a cell covers one image
token and a label is less than 3 pixels high. In a crop of the middle of a cell, the label is ten
times as large as on the resized canvas.
"""
CENTER_START, CENTER_END = NANO_LEVEL.cell_px // 4, NANO_LEVEL.cell_px * 3 // 4
"""Start and end of the middle of a cell, in pixels from the left or top edge of the cell. The
middle contains the label.
"""
NUM_TRAIN, NUM_EVAL = 4096, 128
GUESS_PROBABILITY = 0.65
"""Probability that the demonstrator of the "biased" split answers with a random label without
cropping the image.
"""


@dataclass(slots=True, frozen=True)
class SearchCanvas:
    """Canvas that is identified by a seed and drawn when it is opened."""

    seed: str

    @property
    def scene(self) -> SearchScene:
        """Scene that is generated from the seed."""
        return make_scene(NANO_LEVEL, list(DISC_SPRITES), seed=self.seed)

    def open(self) -> Picture:
        """Draw the canvas."""
        return self.scene.draw(DISC_SPRITES)


def crop_box(cell: Box) -> Box:
    """Return the box that encloses the middle of a cell, where the label is."""
    left, top, _, _ = cell
    return left + CENTER_START, top + CENTER_START, left + CENTER_END, top + CENTER_END


def write_crop_code(cell: Box) -> str:
    """Return Python code that displays the middle of a cell.

    Only two tokens of the code depend on the cell: the column number and the row number.
    """
    side = NANO_LEVEL.cell_px
    column, row = cell[0] // side, cell[1] // side
    box = f"x + {CENTER_START}, y + {CENTER_START}, x + {CENTER_END}, y + {CENTER_END}"
    return f"x, y = {side} * {column}, {side} * {row}\nimage_clue_0.crop(({box})).show()"


def make_example(name: str) -> Example:
    """Return the example for the canvas with seed `name`.

    The keys of the payload are a subset of the keys that data/questions.py reads from a file.
    """
    canvas = SearchCanvas(name)
    target = canvas.scene.target
    payload = {
        "question": canvas.scene.question, "answer": target.label, "images": (canvas,), "data_source": "visual_search",
        "ability": "visual_search", "env_name": "pyvision_gym_w_image_hint", "index": name, "extra": {"bbox": list(target.cell)},
    }  # fmt: skip
    return Example(id=name, payload=payload)


def write_transcript(protocol: PyVisionProtocol, canvas: SearchCanvas, *, guess: str | None) -> list[Message]:
    """Return the messages of a demonstration.

    If `guess` is None, the demonstrator crops the target's cell and answers with the correct label.
    Otherwise the demonstrator answers `guess` without cropping.
    """
    picture, target = canvas.open(), canvas.scene.target
    messages = protocol.write_prompt(canvas.scene.question, [picture])
    if guess is not None:
        return [*messages, make_message("assistant", protocol.write_answer(guess))]
    code = write_crop_code(target.cell)
    observed = protocol.write_observation(
        ToolCall(tool="python", source=code), [picture.crop(crop_box(target.cell))], num_previous_images=1
    )
    return [
        *messages,
        make_message("assistant", protocol.write_code(code)),
        *observed,
        make_message("assistant", protocol.write_answer(target.label)),
    ]


@dataclass(slots=True, frozen=True)
class SearchTranscripts(Sequence[Demonstration]):
    """Demonstrations whose images are drawn on access to save 2 MB of memory per demonstration."""

    protocol: PyVisionProtocol
    plans: list[tuple[SearchCanvas, str | None]]
    """Canvas and guess of each demonstration. The guess is None if the demonstrator crops."""

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> Demonstration:
        canvas, guess = self.plans[index]
        return Demonstration(write_transcript(self.protocol, canvas, guess=guess))


class VisualSearchTask(Task):
    """Visual search task. An episode is solved if the final answer is correct.

    Each example is a canvas that is identified by its seed. The train and eval splits use different
    seeds.
    """

    demonstration_splits = ("correct", "biased")
    reward_names = ("accuracy", "pyvision", "deepeyes")
    runs_code = True

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        remedy = "task=visual_search supports only pyvision; use task=visual_python for other protocols"
        require(settings.tool_format == "pyvision", "task.tool_format", settings.tool_format, remedy)
        settings.require_no_words()
        self.protocol = PyVisionProtocol(rules=SEARCH_RULES)
        self.rubric = rubrics.build_rubric(settings.reward or "accuracy", judge=None, tool_format="pyvision")
        self.stop = self.protocol.stop
        self.num_eval = min(settings.data.max_eval or NUM_EVAL, NUM_EVAL)
        self._sandbox = settings.sandbox
        self._pool = make_sandbox(settings.sandbox)

    async def start(self) -> None:
        """Start the sandbox pool."""
        await start_sandbox(self._pool, self._sandbox)

    async def close(self) -> None:
        """Close the sandbox pool."""
        await self._pool.close()

    def examples(self, split: str) -> list[Example]:
        """Return the examples of a split, one for each canvas."""
        require_choice("split", split, ("train", "eval"))
        num = NUM_TRAIN if split == "train" else self.num_eval
        return [make_example(f"{split} {index}") for index in range(num)]

    def env(self, example: Example) -> AgentEnv:
        """Return a new environment for one canvas."""
        return AgentEnv(example, protocol=self.protocol, pool=self._pool)

    def demonstrations(self, split: str, *, num: int, seed: int) -> SearchTranscripts:
        """Return demonstrations on canvases that occur in neither the train nor the eval split.

        A larger `num` with the same seed returns the same demonstrations, followed by additional
        ones. In the "correct" split, the demonstrator crops the image and reads the label. In the
        "biased" split, the demonstrator guesses without cropping with probability
        GUESS_PROBABILITY. A policy trained on the "biased" split crops and reads labels as
        accurately as a policy trained on the "correct" split, but guesses too often. The accuracy
        of the "biased" policy is 41% at temperature 1 and 10% with greedy decoding.
        """
        require_choice("sft.splits", split, self.demonstration_splits)
        dice = random.Random(seed)
        plans = []
        for index in range(num):
            guess, guesses = dice.choice(LABELS), dice.random() < GUESS_PROBABILITY and split == "biased"
            plans.append((SearchCanvas(f"demonstration {seed} {index}"), guess if guesses else None))
        return SearchTranscripts(self.protocol, plans)

    def gold_replies(self, example: Example) -> list[str]:
        """Return replies that earn the full reward, one per turn."""
        target = SearchCanvas(example.id).scene.target
        return [self.protocol.write_code(write_crop_code(target.cell)), self.protocol.write_answer(target.label)]
