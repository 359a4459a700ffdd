"""Rounds of the Lewis game, loaded from data sets that tools/data/make_lewis.py writes.

Columns for the speaker: image, ret_paths (paths of the K candidates), names (letters of the
candidates), speaker_problem (prompt), solution (letter of the target), category.

Columns for the listener: query_image, reference_image (or query_image_path, reference_image_path),
listener_problem (question), listener_solution (yes or no).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from megatron_rl.config import DataSettings, require
from megatron_rl.data.images import StoredImage
from megatron_rl.data.records import IMAGE_PLACEHOLDER, DataRecord, RecordFiles
from megatron_rl.io.jsonl import to_json_line
from megatron_rl.rewards.rubric import RewardInput
from megatron_rl.rollout.task import Env, Step
from megatron_rl.tasks.lewis.description import PROMPT, SITUATION_PROMPT
from megatron_rl.tasks.lewis.listener_client import ImageFile
from megatron_rl.tasks.lewis.listener_protocol import MAX_CANDIDATES
from megatron_rl.tasks.visual_python.message_parts import make_message
from megatron_rl.types import Example, Message

Payload = Mapping[str, Any]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COMPARE_PROMPT = (
    "Image 1: <image>\nImage 2: <image>\n{problem}\nAnswer with one JSON object in a fenced block and nothing else: "
    '```json\n{{"Reasoning": "...", "Answer": "yes or no"}}\n```'
)
SELECT_PROMPT = (
    "Which of these candidates shows the same {category} as the query?\nQuery: <image>\n{candidates}\n"
    "Answer with one JSON object in a fenced block and nothing else: "
    '```json\n{{"Reasoning": "...", "Answer": "the letter"}}\n```'
)


def load_examples(data: DataSettings, split: str, payload_of: Callable[[DataRecord], Payload]) -> list[Example]:
    """Return the examples of a split. The eval split is limited to data.max_eval examples, if set.

    Raises:
        ValueError: A row is invalid; the message names the first invalid row.
    """
    paths = {"train": data.train, "eval": data.eval}[split]
    require(
        bool(paths), f"task.data.{split}", paths, "set the files or folders that contain the rounds of the game (tools/data/make_lewis.py)"
    )
    records = RecordFiles(paths, images_root=data.images, image_roots=data.image_roots, key=f"task.data.{split}")
    num = min(len(records), data.max_eval) if split == "eval" and data.max_eval else len(records)
    found = []
    for place in range(num):
        record = records[place]
        payload = payload_of(record)
        for image in (*payload["images"], *payload.get("candidates", ())):
            image.size()
        found.append(Example(id=f"{split}/{place}", payload=payload, where=record.where))
    return found


def make_speaker_payload(record: DataRecord) -> Payload:
    """Return the payload of a round for the speaker task."""
    row = record.row
    category = record.require_text(row.get("category", "object"), "category")
    candidates, names = _read_candidates(record)
    solution = record.require_text(row.get("solution"), "solution")
    if solution not in names:
        raise record.make_error("solution", f"{solution!r:.20} is not one of the names {', '.join(names)}")
    return {
        "question": _read_text(record, "speaker_problem", row.get("speaker_problem", PROMPT.format(category=category))),
        "answer": solution, "system": "", "extra": {}, "category": category, "target": names.index(solution),
        "images": (record.load_image(_read_image_column(record, "image"), "image"),), "candidates": candidates, "names": names,
    }  # fmt: skip


def make_situated_payload(record: DataRecord) -> Payload:
    """Return the payload of a round with a question about the object's state and location.

    SITUATION_PROMPT is appended to the question unless the question already contains the tags
    <state> and <location>. The reward term `overlap` requires the state and the location.
    """
    given = make_speaker_payload(record)
    words = str(given["question"])
    return {**given, "question": words if "<state>" in words and "<location>" in words else f"{words} {SITUATION_PROMPT}"}


def make_comparison_payload(record: DataRecord) -> Payload:
    """Return the payload of a listener row, which contains a question about two images."""
    answer = record.require_text(record.row.get("listener_solution"), "listener_solution").strip().casefold()
    if answer not in ("yes", "no"):
        raise record.make_error("listener_solution", f"{answer!r:.20} is invalid; use yes or no")
    problem = _read_text(record, "listener_problem", record.row.get("listener_problem"))
    images = tuple(record.load_image(_read_image_column(record, f"{which}_image"), f"{which}_image") for which in ("query", "reference"))
    return {"question": COMPARE_PROMPT.format(problem=problem), "answer": answer, "system": "", "extra": {}, "images": images}


def make_selection_payload(record: DataRecord) -> Payload:
    """Return the payload of a listener question about all candidates of a round."""
    given = make_speaker_payload(record)
    shown = "\n".join(f"{name}: <image>" for name in given["names"])
    question = SELECT_PROMPT.format(category=given["category"], candidates=shown)
    return {"question": question, "answer": given["answer"], "system": "", "extra": {}, "images": (*given["images"], *given["candidates"])}


def load_description_examples(data: DataSettings, split: str) -> list[Example]:
    """Return two examples per speaker round: one with answer yes and one with answer no.

    The example with answer yes shows the target, and the example with answer no shows another
    candidate. The index of the other candidate changes from round to round.
    """
    found = []
    for number, example in enumerate(load_examples(data, split, make_speaker_payload)):
        payload = example.payload
        candidates, target = payload["candidates"], payload["target"]
        others = [place for place in range(len(candidates)) if place != target]
        for answer, place in (("yes", target), ("no", others[number % len(others)])):
            own = {"images": (candidates[place],), "answer": answer, "shown": payload["images"][0], "category": payload["category"]}
            found.append(Example(id=f"{example.id}/{answer}", payload=own, where=example.where))
    return found


def _read_text(record: DataRecord, column: str, value: object) -> str:
    words = record.require_text(value, column)
    if IMAGE_PLACEHOLDER in words:
        raise record.make_error(column, f"contains {IMAGE_PLACEHOLDER}; remove the placeholder")
    return words


def _read_image_column(record: DataRecord, column: str) -> object:
    """Return the value of an image column or, if the column is missing, of its path column."""
    value = record.row.get(column, record.row.get(f"{column}_path"))
    if value is None:
        raise record.make_error(column, "is missing")
    return value


def _read_candidates(record: DataRecord) -> tuple[tuple[StoredImage, ...], list[str]]:
    values = record.require_list(record.row.get("ret_paths"), "ret_paths")
    if not 2 <= len(values) <= MAX_CANDIDATES:
        raise record.make_error("ret_paths", f"has {len(values)} candidates; must have between 2 and {MAX_CANDIDATES}")
    if any(value in values[:place] for place, value in enumerate(values)):
        raise record.make_error("ret_paths", "contains a candidate more than once")
    names = record.require_list(record.row.get("names", list(LETTERS[: len(values)])), "names")
    names = [record.require_text(name, "names") for name in names]
    if len(names) != len(values) or len({*names}) < len(names):
        raise record.make_error("names", f"must contain {len(values)} different names, one for each candidate")
    return tuple(record.load_image(value, f"ret_paths[{place}]") for place, value in enumerate(values)), names


def read_image_file(image: StoredImage) -> ImageFile:
    """Read an image file.

    Raises:
        InfraError: The disk failed.
        PermanentInfraError: The file is missing or has changed since the run started.
    """
    return ImageFile(image.read(), str(image.source) if isinstance(image.source, Path) else "")


class SingleImageEnv(Env):
    """Single-turn environment. The prompt is one image followed by a text.

    The prompts consist of the same tokens as the prompts of the Lewis services.
    """

    def __init__(self, example: Example, get_question: Callable[[Example], Awaitable[str]]) -> None:
        """Create the environment for one example.

        Args:
            example: Example with one image in its payload.
            get_question: Function that returns the text of the prompt. The function raises
                InfraError if the source of the text is unavailable.
        """
        self._example, self._get_question = example, get_question

    async def reset(self, seed: int) -> list[Message]:
        """Return the messages of the prompt. The seed is not used.

        Raises:
            InfraError: The image cannot be opened, or the text is unavailable.
        """
        (image,) = self._example.payload["images"]
        words = await self._get_question(self._example)
        return [make_message("user", await asyncio.to_thread(image.open), words)]

    async def step(self, text: str) -> Step:
        """End the episode with the reply as the answer."""
        return Step(messages=[], reward=0.0, done=True, reason="answer")


class PredictionLog:
    """JSON-lines log of predictions, with the keys time, reward, content and solution.

    An empty path disables the log.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: TextIOWrapper | None = None

    def start(self) -> None:
        """Open the log file.

        Raises:
            ValueError: The file cannot be written.
        """
        if not self._path:
            return
        try:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(self._path).open("a", buffering=1)  # noqa: SIM115 (close)
        except OSError as error:
            raise ValueError(f"task.options.log={self._path}: {error.strerror}; choose a writable file") from error

    def __call__(self, reward: float, reward_input: RewardInput) -> None:
        """Write one prediction to the log."""
        if self._file is not None:
            line = {"time": time.time(), "reward": reward, "content": reward_input.replies[-1], "solution": reward_input.payload["answer"]}
            self._file.write(to_json_line(line) + "\n")

    def close(self) -> None:
        """Close the log file."""
        if self._file is not None:
            self._file.close()
