"""Environment for one episode of an agent with tools.

The tool protocol parses the policy's replies. Code from the policy runs in a sandbox that belongs
to the episode. Observations contain text and images. Text from the policy never causes an
exception. Invalid replies and errors in code are reported in the observation. InfraError is raised
only for causes outside of the policy's control: an image in the data set that cannot be opened, a
sandbox that cannot be opened, or the failure of a sandbox, of the sandbox server or of an MCP
server.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL.Image import Image as Picture

import megatron_rl_sandbox as sandbox
from megatron_rl.data.clips import StoredVideo
from megatron_rl.errors import AccessDenied, InfraError, PermanentInfraError
from megatron_rl.rollout.task import Env, Step
from megatron_rl.tasks.visual_python.function_tools import BUILTIN_NAMES, FunctionsProtocol
from megatron_rl.tasks.visual_python.image_tools import IMAGE_TOOLS, ToolError
from megatron_rl.tasks.visual_python.mcp_tools import EpisodeTools, McpTools
from megatron_rl.tasks.visual_python.pyvision import CLIP_NAME
from megatron_rl.tasks.visual_python.tool_protocol import CodeAction, FinalAnswer, MalformedReply, ToolAction, ToolProtocol
from megatron_rl.types import Example, Message, ToolCall
from megatron_rl_sandbox.image_codec import encode_png
from megatron_rl_sandbox.sandbox_client import RemoteBox, SandboxClient

PRELOAD = """\
import base64, collections, io, itertools, json, math, re
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import PIL
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
"""
"""Code that runs in the sandbox before the first code from the policy. The policy's code can use
the imported names as well as the names of the images.
"""
CLIP_SOURCE = (Path(__file__).parent / "clip.py").read_text()
"""Source code of the class `Clip`. This code is added to PRELOAD if the question has videos."""
STATE_LOST_TEXT = "The interpreter was started anew: variables, imports and files of earlier calls are gone; the images are there."
NO_OUTPUT_TEXT = "The code ran and gave nothing back: print values, or show a picture."


class AgentEnv(Env):
    """Environment for one question.

    The sandbox is opened when the policy runs code for the first time. Limits on turns, tokens and
    images are enforced outside of this class.
    """

    def __init__(
        self, example: Example, *, protocol: ToolProtocol, pool: sandbox.SandboxPool | SandboxClient, server_tools: McpTools | None = None
    ) -> None:  # fmt: skip
        """Create the environment for one example.

        Args:
            example: Example with a payload that contains `question`, a string, and `images`, a
                tuple of objects with a method `open()` that returns a PIL image. `videos`, a tuple
                of `StoredVideo`, is optional.
            protocol: Format of replies and observations.
            pool: Pool or client that opens the sandbox.
            server_tools: Tools of MCP servers, which requires FunctionsProtocol.
        """
        self.example = example
        self.protocol = protocol
        self.pool = pool
        self._input_names: list[str] = []
        """Names by which code refers to the question's images and videos."""
        self.num_images = 0
        """Number of images in the sequence so far."""
        self._box: sandbox.Box | RemoteBox | None = None
        self._server_tools = None if server_tools is None else EpisodeTools(server_tools)

    async def reset(self, seed: int) -> list[Message]:
        """Return the messages of the prompt.

        The seed is not used, because the environment is deterministic.

        Raises:
            PermanentInfraError: An image or the question is invalid.
            InfraError: An image cannot be read, or an MCP server does not list its tools.
        """
        if self._server_tools is not None:
            assert isinstance(self.protocol, FunctionsProtocol), self.protocol.name
            self.protocol = replace(self.protocol, server_tools=await self._server_tools.tools.list_tools(BUILTIN_NAMES))
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
        """Run the action in a reply and return its result. A final answer ends the episode."""
        match self.protocol.parse_reply(text):
            case FinalAnswer():
                return Step(messages=[], reward=0.0, done=True, reason="answer")
            case MalformedReply(reason):
                call, pictures = ToolCall(tool="", source="", text=f"Error: {reason}.", error=reason, ran=False), []
            case CodeAction(source):
                call, pictures = await self._run_code(source)
            case ToolAction(name, arguments) if self._server_tools is not None and name not in IMAGE_TOOLS:
                call, pictures = await self._server_tools.call(name, arguments)
            case ToolAction(name, arguments):
                call, pictures = await asyncio.to_thread(self._apply_image_tool, name, dict(arguments))
        messages = self.protocol.write_observation(call, pictures, num_previous_images=self.num_images)
        self.num_images += _count_images(messages)
        return Step(messages=messages, reward=0.0, done=False, tool_call=call)

    async def close(self) -> None:
        """Close the sandbox and the sessions with MCP servers, as far as they were opened."""
        try:
            if self._server_tools is not None:
                await self._server_tools.close()
        finally:
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
        except ValueError as error:  # the data set has an invalid image or image name
            raise PermanentInfraError(f"{self.example}: sandbox: {error}") from error

    def _read_clips(self) -> dict[str, bytes]:
        """Return the contents of the question's videos, keyed by file name in the sandbox.

        Raises:
            InfraError: A video cannot be read.
        """
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
        """Open the question's image at index `number`.

        The image is reopened on each use, because keeping the original images of all episodes in
        memory would need too much memory.

        Raises:
            InfraError: The image cannot be opened.
        """
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
    """Return the observation text and the error message of a code call.

    Args:
        result: Result of the call.
        image_names: Names of the images. After a NameError or FileNotFoundError, the text lists
            these names.

    Returns:
        The observation text, which includes the error, and the error message alone. The error
        message is empty if the code raised no error.
    """
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
    """Replace lone surrogates with `?`.

    Exception messages can contain lone surrogates, but tokenizers and text files cannot encode
    them.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def _count_images(messages: Sequence[Message]) -> int:
    return sum(part["type"] == "image" for message in messages for part in message["content"])
