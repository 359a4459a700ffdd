"""One episode of an agent with tools: replies are read by its protocol, code runs in a box of its own, pictures come back.

Whatever the policy writes leads to an observation: it is never an exception here. InfraError is for what the policy cannot bring about: a
picture of the data set that cannot be read, a box that cannot be had, a box or server that died from outside.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from PIL.Image import Image as Picture

import sandbox
from megatron_rl.data.clips import StoredVideo
from megatron_rl.errors import AccessDenied, InfraError, PermanentInfraError
from megatron_rl.rollout.task import Env, Step
from megatron_rl.tasks.visual_python.image_tools import IMAGE_TOOLS, ToolError
from megatron_rl.tasks.visual_python.pyvision import CLIP_NAME
from megatron_rl.tasks.visual_python.tool_protocol import CodeAction, FinalAnswer, MalformedReply, ToolAction, ToolProtocol
from megatron_rl.types import Example, Message, ToolCall
from sandbox.client import RemoteBox, SandboxClient
from sandbox.images import encode_png

PRELOAD = """\
import base64, collections, io, itertools, json, math, re
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import PIL
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
"""
"""Names that are there before the first line of the policy's code, beside those of its pictures."""
CLIP_SOURCE = (Path(__file__).parent / "clip.py").read_text()
"""What its videos are read by, where it has some."""
STATE_LOST_TEXT = "The interpreter was started anew: variables, imports and files of earlier calls are gone; the images are there."
NO_OUTPUT_TEXT = "The code ran and gave nothing back: print values, or show a picture."


class AgentEnv(Env):
    """Opens its box at the first code. The episode's limits are not its business."""

    def __init__(self, example: Example, *, protocol: ToolProtocol, pool: sandbox.SandboxPool | SandboxClient) -> None:
        """The payload needs `question`, a text, and `images`, objects whose open() gives a picture."""
        self.example = example
        self.protocol = protocol
        self.pool = pool
        self._input_names: list[str] = []
        """By which code finds the question's pictures and videos."""
        self.num_images = 0
        """Pictures in the context so far."""
        self._box: sandbox.Box | RemoteBox | None = None

    async def reset(self, seed: int) -> list[Message]:
        """The world has no chance in it; the seed is not used."""
        stored, question = self.example.payload["images"], self.example.payload["question"]
        assert isinstance(stored, tuple) and isinstance(question, str), f"example {self.example.id}: {dict(self.example.payload)}"
        try:
            pictures = [await asyncio.to_thread(self._open_image, number) for number in range(len(stored))]
            messages = self.protocol.write_prompt(question, pictures)
        except ValueError as error:
            raise PermanentInfraError(f"{self.example}: {error}") from error
        self._input_names = [*self.protocol.name_images(pictures), *(CLIP_NAME.format(number) for number in range(len(self._stored_clips)))]
        self.num_images = _count_images(messages)
        return messages

    async def step(self, text: str) -> Step:
        match self.protocol.parse_reply(text):
            case FinalAnswer():
                return Step(messages=[], reward=0.0, done=True, reason="answer")
            case MalformedReply(reason):
                call, pictures = ToolCall(tool="", source="", text=f"Error: {reason}.", error=reason, ran=False), []
            case CodeAction(source):
                call, pictures = await self._run_code(source)
            case ToolAction(name, arguments):
                call, pictures = await asyncio.to_thread(self._apply_image_tool, name, dict(arguments))
        messages = self.protocol.write_observation(call, pictures, num_previous_images=self.num_images)
        self.num_images += _count_images(messages)
        return Step(messages=messages, reward=0.0, done=False, tool_call=call)

    async def close(self) -> None:
        if self._box is not None:
            await self._box.close()

    async def _run_code(self, source: str) -> tuple[ToolCall, list[Picture]]:
        try:
            if self._box is None:
                self._box = await self._open_box()
            result = await self._box.run(source)
        except sandbox.SandboxAccessDenied as error:
            raise AccessDenied(f"task.sandbox.url={error}: task.sandbox.token_file=FILE") from error
        except (sandbox.SandboxError, sandbox.PoolFull, sandbox.BoxClosed) as error:
            raise InfraError(f"sandbox: {error}") from error
        if result.fault is sandbox.Fault.HOST:
            assert result.error is not None, f"{result}"
            raise InfraError(f"sandbox: {result.error.message}")
        pictures = await asyncio.to_thread(lambda: [picture.to_pil() for picture in result.images])
        text, error = describe_result(result, image_names=self._input_names)
        return ToolCall(tool="python", source=source, text=text, error=error), pictures

    async def _open_box(self) -> sandbox.Box | RemoteBox:
        def encoded_inputs() -> dict[str, bytes]:
            pictures = [self._open_image(number) for number in range(len(self.example.payload["images"]))]
            return {name: encode_png(picture) for name, picture in self.protocol.name_images(pictures).items()}

        encoded, clips = await asyncio.to_thread(lambda: (encoded_inputs(), self._read_clips()))
        preload = PRELOAD + (CLIP_SOURCE + "".join(f"{Path(name).stem} = Clip({name!r})\n" for name in clips) if clips else "")
        try:
            return await self.pool.open(images=encoded, files=clips, preload=preload)
        except ValueError as error:  # a name, a picture: all of it is the data set's
            raise PermanentInfraError(f"{self.example}: sandbox: {error}") from error

    def _read_clips(self) -> dict[str, bytes]:
        """The question's videos, by the names of their files in the box. InfraError: one cannot be read."""
        try:
            return {
                f"{CLIP_NAME.format(number)}{stored.source.suffix.lower()}": stored.read()
                for number, stored in enumerate(self._stored_clips)
            }
        except InfraError as fault:
            raise type(fault)(f"{self.example}: {fault}") from fault

    @property
    def _stored_clips(self) -> Sequence[StoredVideo]:
        clips = self.example.payload.get("videos", ())
        assert isinstance(clips, tuple), f"example {self.example.id}: {dict(self.example.payload)}"
        return clips

    def _open_image(self, number: int) -> Picture:
        """One of the question's, opened each time that it is looked at: as they are stored, those of a step's episodes are larger than
        what the policy sees of them. InfraError: it cannot be opened."""
        try:
            return self.example.payload["images"][number].open()
        except InfraError as fault:
            raise type(fault)(f"{self.example}: {fault}") from fault

    def _apply_image_tool(self, name: str, arguments: dict[str, object]) -> tuple[ToolCall, list[Picture]]:
        source = json.dumps(arguments)
        if not self.example.payload["images"]:
            error = "there is no image"
            return ToolCall(tool=name, source=source, text=f"Error: {error}.", error=error), []
        picture = self._open_image(0)
        try:
            return ToolCall(tool=name, source=source, frame=picture.size), [IMAGE_TOOLS[name].apply(picture, arguments)]
        except ToolError as error:
            return ToolCall(tool=name, source=source, text=f"Error: {error}.", error=str(error), frame=picture.size), []


def describe_result(result: sandbox.CallResult, *, image_names: Sequence[str]) -> tuple[str, str]:
    """What the policy is told of a call in words, and the error alone (empty without one). `image_names` are those of its pictures."""
    error = ""
    lines = [STATE_LOST_TEXT] if result.state_lost else []
    lines += [stream.rstrip("\n") for stream in (result.text, result.stderr) if stream.strip()]
    if result.error is not None:
        place = "" if result.error.line is None else f" (line {result.error.line})"
        error = f"{result.error.type}: {result.error.message}{place}"
        known = (
            f" The images are called {', '.join(image_names)}."
            if image_names and result.error.type in ("NameError", "FileNotFoundError")
            else ""
        )
        lines.append(f"Error: {error}{known} Mend the code.")
    lines += [f"({dropped})" for dropped in result.dropped]
    if not lines and not result.images:
        lines.append(NO_OUTPUT_TEXT)
    return _to_valid_unicode("\n".join(lines)), _to_valid_unicode(error)


def _to_valid_unicode(text: str) -> str:
    """Half characters, which an exception's message may hold and no tokenizer or file takes, become `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _count_images(messages: Sequence[Message]) -> int:
    return sum(part["type"] == "image" for message in messages for part in message["content"])
