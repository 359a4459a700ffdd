"""Task with user-provided questions about images, which the policy answers with tools."""

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from PIL.Image import Image as Picture

import megatron_rl_sandbox as sandbox
from megatron_rl.clients.sandbox_service import make_sandbox_client
from megatron_rl.config import SandboxSettings, TaskSettings
from megatron_rl.data.prompt_lengths import HIDDEN_IMAGE_ENV
from megatron_rl.errors import AccessDenied, InfraError
from megatron_rl.rewards import rubrics
from megatron_rl.tasks.question_task import QuestionTask
from megatron_rl.tasks.visual_python.codev import CodeVProtocol
from megatron_rl.tasks.visual_python.deepeyes import DeepEyesProtocol
from megatron_rl.tasks.visual_python.env import AgentEnv
from megatron_rl.tasks.visual_python.function_tools import BUILTIN_NAMES, FunctionsProtocol
from megatron_rl.tasks.visual_python.mcp_tools import McpTools
from megatron_rl.tasks.visual_python.pyvision import CLIP_NAME, PyVisionProtocol
from megatron_rl.tasks.visual_python.tool_protocol import ToolProtocol
from megatron_rl.types import Example
from megatron_rl_sandbox.sandbox_client import SandboxClient

MAX_INPUT_BYTES = 512 << 20
"""Maximum total size of an episode's images in PNG format, in bytes. The limit is large enough for
two images of random noise with the maximum size that data/images.py accepts.
"""
Payload = Mapping[str, Any]
MAX_OUTPUT_CHARS = 8192
"""Maximum number of characters kept from each output stream (stdout and stderr) of a call. The
maximum corresponds to about 3,000 tokens. If a stream is longer, its first and last
MAX_OUTPUT_CHARS / 2 characters are kept.
"""


def make_pyvision(payload: Payload) -> PyVisionProtocol:
    """Return PyVision's protocol, configured for the images and videos of an example."""
    videos = payload["videos"]
    assert isinstance(videos, tuple), f"{payload}"
    return PyVisionProtocol(shows_images=payload["env_name"] != HIDDEN_IMAGE_ENV, num_videos=len(videos))


def make_codev(payload: Payload) -> CodeVProtocol:
    """Return CodeV's protocol, configured with the file names of an example's images.

    The names come from extra_info.image_file_name, which is one name or a list of names. A name
    without a suffix gets the suffix .png, the format of the files in the sandbox.
    """
    extra = payload["extra"]
    assert isinstance(extra, Mapping), f"{payload}"
    names = extra.get("image_file_name", [])
    given = map(str, names if isinstance(names, list) else [names])
    return CodeVProtocol(tuple(name if PurePosixPath(name).suffix else f"{name}.png" for name in given))


TOOL_PROTOCOLS: Mapping[str, Callable[[Payload], ToolProtocol]] = {
    "pyvision": make_pyvision,
    "codev": make_codev,
    "deepeyes": lambda _: DeepEyesProtocol(),
    "functions": lambda _: FunctionsProtocol(),
}
"""Maps each value of task.tool_format to a function that creates the protocol for an example's
payload.
"""


class VisualPythonTask(QuestionTask):
    """Task with questions about images, answered with image tools and Python code.

    PyVision-RL, CodeV and DeepEyes correspond to different settings of task.tool_format,
    task.reward and task.data.
    """

    reward_names = rubrics.REWARD_NAMES
    runs_code = True

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        self.reward = settings.reward or "accuracy"
        self.protocol = TOOL_PROTOCOLS[settings.tool_format]({"env_name": "", "extra": {}, "videos": ()})
        self.stop = self.protocol.stop
        self.reads_videos = settings.tool_format == "pyvision"
        self.rubric = rubrics.build_rubric(self.reward, judge=self.judge, tool_format=settings.tool_format)
        self._pool = make_sandbox(settings.sandbox)
        self._server_tools = McpTools(settings.tools) if settings.tools.mcp else None

    async def start(self) -> None:
        """Start the sandbox pool, list the tools of MCP servers, and start the judge."""
        await start_sandbox(self._pool, self.settings.sandbox)
        if self._server_tools is not None:
            await self._server_tools.list_tools(BUILTIN_NAMES)
        await super().start()

    async def close(self) -> None:
        """Close the sandbox pool and, if one is configured, the judge."""
        await super().close()
        await self._pool.close()

    def env(self, example: Example) -> AgentEnv:
        """Return a new environment for one question."""
        protocol = TOOL_PROTOCOLS[self.settings.tool_format](example.payload)
        return AgentEnv(example, protocol=protocol, pool=self._pool, server_tools=self._server_tools)

    def gold_replies(self, example: Example) -> list[str]:
        """Return replies that earn the full reward, one per turn.

        The last reply contains the answer. If task.reward is not accuracy, another reply precedes
        the answer and displays the first frame of the first video. If the question has no videos,
        this reply displays the first image.
        """
        protocol = TOOL_PROTOCOLS[self.settings.tool_format](example.payload)
        images, answer = example.payload["images"], example.payload["answer"]
        assert isinstance(images, tuple) and isinstance(answer, str), f"{example}"
        look = [write_look_at_first(protocol, images[0].open())] if images and self.reward != "accuracy" else []
        if example.payload["videos"] and self.reward != "accuracy":
            look = [protocol.write_code(f"plt.imshow({CLIP_NAME.format(0)}[0].asnumpy())\nplt.show()")]
        return [*look, protocol.write_answer(answer)]


def write_look_at_first(protocol: ToolProtocol, picture: Picture) -> str:
    """Return a reply that displays the first image of a question without cropping the image."""
    if isinstance(protocol, DeepEyesProtocol):
        return protocol.write_call("zoom", {"bbox_2d": [0, 0, picture.width, picture.height]})
    (name,) = protocol.name_images([picture])
    return protocol.write_code(f"Image.open({name!r}).show()" if isinstance(protocol, CodeVProtocol) else f"{name}.show()")


async def start_sandbox(pool: sandbox.SandboxPool | SandboxClient, settings: SandboxSettings) -> None:
    """Start a sandbox pool.

    Raises:
        AccessDenied: The sandbox server rejects the token.
        InfraError: The pool cannot start; the message names the setting that selects the pool.
    """
    try:
        await pool.start()
    except sandbox.SandboxAccessDenied as denied:
        raise AccessDenied(f"task.sandbox.url={denied}: task.sandbox.token_file=FILE") from denied
    except sandbox.SandboxError as fault:
        url, isolation = settings.url, settings.isolation
        chosen = f"url={url}: {fault}; start the sandbox server" if url else f"isolation={isolation}: {fault}; find the cause"
        raise InfraError(f"task.sandbox.{chosen} with `python -m megatron_rl_sandbox {'serve' if url else 'doctor'}`") from fault


def make_sandbox(settings: SandboxSettings) -> sandbox.SandboxPool | SandboxClient:
    """Return a client of the sandbox server at `settings.url`, or a local pool if there is no URL.

    A sandbox server enforces its own limits instead of the limits in `settings`.
    """
    if settings.url:
        return make_sandbox_client(settings)
    limits = sandbox.BoxLimits(
        call_timeout_s=settings.call_timeout_s, memory=settings.memory_mib << 20, text=MAX_OUTPUT_CHARS, input_bytes=MAX_INPUT_BYTES
    )
    return sandbox.SandboxPool(size=settings.size, limits=limits, isolation=settings.isolation, allow_missing=settings.allow_missing)
