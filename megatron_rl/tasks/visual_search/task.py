"""Visual search for a nano model: a canvas is shown too small to read its labels; Python crops it, and the crop can be read.

The episodes are those of visual_python in PyVision's protocol, sandbox and rules included. Only the canvases are drawn here instead of read
from files, and the rules in the prompt are one line, for a model of a million parameters that follows what it was shown and no instruction.
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
"""At 140 x 140 pixels a cell is one image token and a label is under 3 pixels high; a crop of the middle of its cell shows it ten times as
large."""
CENTER_START, CENTER_END = NANO_LEVEL.cell_px // 4, NANO_LEVEL.cell_px * 3 // 4
"""The middle of a cell, where a label is."""
NUM_TRAIN, NUM_EVAL = 4096, 128
GUESS_PROBABILITY = 0.65
"""In split "biased" the demonstrator answers at once, with any label, in this share of the transcripts."""


@dataclass(slots=True, frozen=True)
class SearchCanvas:
    """A scene by its seed, drawn when it is asked for."""

    seed: str

    @property
    def scene(self) -> SearchScene:
        return make_scene(NANO_LEVEL, list(DISC_SPRITES), seed=self.seed)

    def open(self) -> Picture:
        return self.scene.draw(DISC_SPRITES)


def crop_box(cell: Box) -> Box:
    left, top, _, _ = cell
    return left + CENTER_START, top + CENTER_START, left + CENTER_END, top + CENTER_END


def write_crop_code(cell: Box) -> str:
    """Code that shows the middle of a cell. Two of its tokens say which: the column and the row."""
    side = NANO_LEVEL.cell_px
    column, row = cell[0] // side, cell[1] // side
    box = f"x + {CENTER_START}, y + {CENTER_START}, x + {CENTER_END}, y + {CENTER_END}"
    return f"x, y = {side} * {column}, {side} * {row}\nimage_clue_0.crop(({box})).show()"


def make_example(name: str) -> Example:
    """The example whose name is its canvas's seed, as data.questions would give it from a file."""
    canvas = SearchCanvas(name)
    target = canvas.scene.target
    payload = {
        "question": canvas.scene.question, "answer": target.label, "images": (canvas,), "data_source": "visual_search",
        "ability": "visual_search", "env_name": "pyvision_gym_w_image_hint", "index": name, "extra": {"bbox": list(target.cell)},
    }  # fmt: skip
    return Example(id=name, payload=payload)


def write_transcript(protocol: PyVisionProtocol, canvas: SearchCanvas, *, guess: str | None) -> list[Message]:
    """What the demonstrator does: look into the cell and read, or, with a guess, give that at once."""
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
    """Drawn when they are asked for: a canvas and its crop take 2 MB."""

    protocol: PyVisionProtocol
    plans: list[tuple[SearchCanvas, str | None]]
    """Each canvas, and the guess if the demonstrator does not look."""

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> Demonstration:
        canvas, guess = self.plans[index]
        return Demonstration(write_transcript(self.protocol, canvas, guess=guess))


class VisualSearchTask(Task):
    """Solved when the answer is right. An example is a canvas by number; those of "train" and of "eval" have seeds of their own."""

    reward_names = ("accuracy", "pyvision", "deepeyes")
    runs_code = True

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        remedy = "visual_search speaks pyvision; visual_python has the other protocols"
        require(settings.tool_format == "pyvision", "task.tool_format", settings.tool_format, remedy)
        settings.require_no_words()
        self.protocol = PyVisionProtocol(rules=SEARCH_RULES)
        self.rubric = rubrics.build_rubric(settings.reward or "accuracy", judge=None, tool_format="pyvision")
        self.stop = self.protocol.stop
        self.num_eval = min(settings.data.max_eval or NUM_EVAL, NUM_EVAL)
        self._sandbox = settings.sandbox
        self._pool = make_sandbox(settings.sandbox)

    async def start(self) -> None:
        await start_sandbox(self._pool, self._sandbox)

    async def close(self) -> None:
        await self._pool.close()

    def examples(self, split: str) -> list[Example]:
        require_choice("split", split, ("train", "eval"))
        num = NUM_TRAIN if split == "train" else self.num_eval
        return [make_example(f"{split} {index}") for index in range(num)]

    def env(self, example: Example) -> AgentEnv:
        return AgentEnv(example, protocol=self.protocol, pool=self._pool)

    def demonstrations(self, split: str, *, num: int, seed: int) -> SearchTranscripts:
        """Transcripts on canvases of their own. Fewer are a prefix of more.

        In split "correct" the demonstrator looks and reads; in "biased" it mostly guesses at once. A policy that has learned that sees and
        reads as well as before, and decides wrongly: it is right in 41% of its episodes at temperature 1, and in 10% when greedy.
        """
        require_choice("sft.splits", split, ("correct", "biased"))
        dice = random.Random(seed)
        plans = []
        for index in range(num):
            guess, guesses = dice.choice(LABELS), dice.random() < GUESS_PROBABILITY and split == "biased"
            plans.append((SearchCanvas(f"demonstration {seed} {index}"), guess if guesses else None))
        return SearchTranscripts(self.protocol, plans)

    def gold_replies(self, example: Example) -> list[str]:
        """Replies that earn full marks, turn by turn."""
        target = SearchCanvas(example.id).scene.target
        return [self.protocol.write_code(write_crop_code(target.cell)), self.protocol.write_answer(target.label)]
