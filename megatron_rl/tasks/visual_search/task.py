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
from megatron_rl.tasks.visual_python.message_parts import say
from megatron_rl.tasks.visual_python.pyvision import PyVision
from megatron_rl.tasks.visual_python.task import pool_of, start_pool
from megatron_rl.tasks.visual_search.drawing import LABELS, Box, Level, Scene, scene, shapes
from megatron_rl.types import Demonstration, Example, Message, ToolCall

DISCS = shapes(("disc",), colors=("red", "green", "blue", "yellow", "purple", "black"))
RULES = "Look, then answer."
LEVEL = Level(cells=5, cell=100, things=3, thing=0.8, plate=0.55, label=0.13)
"""At 140 x 140 pixels a cell is one image token and a label is under 3 pixels high; a crop of the middle of its cell shows it ten times as
large."""
NEAR, FAR = LEVEL.cell // 4, LEVEL.cell * 3 // 4
"""The middle of a cell, where a label is."""
NUM_TRAIN, NUM_EVAL = 4096, 128
GUESSES = 0.65
"""In split "biased" the demonstrator answers at once, with any label, in this share of the transcripts."""


@dataclass(slots=True, frozen=True)
class Canvas:
    """A scene by its seed, drawn when it is asked for."""

    seed: str

    @property
    def scene(self) -> Scene:
        return scene(LEVEL, list(DISCS), seed=self.seed)

    def open(self) -> Picture:
        return self.scene.draw(DISCS)


def middle(cell: Box) -> Box:
    left, top, _, _ = cell
    return left + NEAR, top + NEAR, left + FAR, top + FAR


def look(cell: Box) -> str:
    """Code that shows the middle of a cell. Two of its tokens say which: the column and the row."""
    column, row = cell[0] // LEVEL.cell, cell[1] // LEVEL.cell
    return f"x, y = {LEVEL.cell} * {column}, {LEVEL.cell} * {row}\nimage_clue_0.crop((x + {NEAR}, y + {NEAR}, x + {FAR}, y + {FAR})).show()"


def example_of(name: str) -> Example:
    """The example whose name is its canvas's seed, as data.questions would give it from a file."""
    canvas = Canvas(name)
    target = canvas.scene.target
    payload = {
        "question": canvas.scene.question, "answer": target.label, "images": (canvas,), "data_source": "visual_search",
        "ability": "visual_search", "env_name": "pyvision_gym_w_image_hint", "index": name, "extra": {"bbox": list(target.cell)},
    }  # fmt: skip
    return Example(id=name, payload=payload)


def transcript(protocol: PyVision, canvas: Canvas, *, guess: str | None) -> list[Message]:
    """What the demonstrator does: look into the cell and read, or, with a guess, give that at once."""
    picture, target = canvas.open(), canvas.scene.target
    messages = protocol.prompt(canvas.scene.question, [picture])
    if guess is not None:
        return [*messages, say("assistant", protocol.write_answer(guess))]
    code = look(target.cell)
    observed = protocol.observe(ToolCall(tool="python", source=code), [picture.crop(middle(target.cell))], num_before=1)
    return [*messages, say("assistant", protocol.write_code(code)), *observed, say("assistant", protocol.write_answer(target.label))]


@dataclass(slots=True, frozen=True)
class Transcripts(Sequence[Demonstration]):
    """Drawn when they are asked for: a canvas and its crop take 2 MB."""

    protocol: PyVision
    plans: list[tuple[Canvas, str | None]]
    """Each canvas, and the guess if the demonstrator does not look."""

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> Demonstration:
        canvas, guess = self.plans[index]
        return Demonstration(transcript(self.protocol, canvas, guess=guess))


class VisualSearchTask(Task):
    """Solved when the answer is right. An example is a canvas by number; those of "train" and of "eval" have seeds of their own."""

    rewards = ("accuracy", "pyvision", "deepeyes")
    runs_code = True

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        remedy = "visual_search speaks pyvision; visual_python has the other protocols"
        require(settings.tool_format == "pyvision", "task.tool_format", settings.tool_format, remedy)
        settings.require_no_words()
        self.protocol = PyVision(rules=RULES)
        self.rubric = rubrics.build(settings.reward or "accuracy", judge=None, protocol="pyvision")
        self.stop = self.protocol.stop
        self.num_eval = min(settings.data.max_eval or NUM_EVAL, NUM_EVAL)
        self._sandbox = settings.sandbox
        self._pool = pool_of(settings.sandbox)

    async def start(self) -> None:
        await start_pool(self._pool, self._sandbox)

    async def close(self) -> None:
        await self._pool.close()

    def examples(self, split: str) -> list[Example]:
        require_choice("split", split, ("train", "eval"))
        num = NUM_TRAIN if split == "train" else self.num_eval
        return [example_of(f"{split} {index}") for index in range(num)]

    def env(self, example: Example) -> AgentEnv:
        return AgentEnv(example, protocol=self.protocol, pool=self._pool)

    def demonstrations(self, split: str, *, num: int, seed: int) -> Transcripts:
        """Transcripts on canvases of their own. Fewer are a prefix of more.

        In split "correct" the demonstrator looks and reads; in "biased" it mostly guesses at once. A policy that has learned that sees and
        reads as well as before, and decides wrongly: it is right in 41% of its episodes at temperature 1, and in 10% when greedy.
        """
        require_choice("sft.splits", split, ("correct", "biased"))
        dice = random.Random(seed)
        plans = []
        for index in range(num):
            guess, guesses = dice.choice(LABELS), dice.random() < GUESSES and split == "biased"
            plans.append((Canvas(f"demonstration {seed} {index}"), guess if guesses else None))
        return Transcripts(self.protocol, plans)

    def gold(self, example: Example) -> list[str]:
        """Replies that earn full marks, turn by turn."""
        target = Canvas(example.id).scene.target
        return [self.protocol.write_code(look(target.cell)), self.protocol.write_answer(target.label)]
