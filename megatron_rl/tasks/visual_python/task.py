"""Questions about pictures, answered with tools: the user's data, a protocol, a sandbox, and a rubric by name."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from PIL.Image import Image as Picture

import sandbox
from megatron_rl.config import SandboxSettings, TaskSettings
from megatron_rl.data.benchmarks.catalog import examples_of, figures
from megatron_rl.data.prompt_lengths import HIDDEN
from megatron_rl.errors import AccessDenied, InfraError
from megatron_rl.rewards import rubrics
from megatron_rl.rewards.judge import judge_of
from megatron_rl.rollout.task import Task
from megatron_rl.tasks.visual_python.codev import CodeV
from megatron_rl.tasks.visual_python.deepeyes import DeepEyes
from megatron_rl.tasks.visual_python.env import AgentEnv
from megatron_rl.tasks.visual_python.function_tools import Functions
from megatron_rl.tasks.visual_python.pyvision import CLIP, PyVision
from megatron_rl.tasks.visual_python.tool_protocol import ToolProtocol
from megatron_rl.types import Example, Rollout
from sandbox.client import SandboxClient
from sandbox.token import read_token

INPUT_BYTES = 512 << 20
"""Of an episode's pictures as PNG: two of the largest that are read (data/images.py), as noise."""
Payload = Mapping[str, object]
OBSERVED_CHARACTERS = 8192
"""Of what a call prints, on each of its two streams: the first half and the last. Some 3,000 tokens."""


def pyvision(payload: Payload) -> PyVision:
    videos = payload["videos"]
    assert isinstance(videos, tuple), f"{payload}"
    return PyVision(shown=payload["env_name"] != HIDDEN, num_videos=len(videos))


def codev(payload: Payload) -> CodeV:
    """Pictures go by extra_info.image_file_name: one name, or a list of them; one without a suffix is given that of what the box holds."""
    extra = payload["extra"]
    assert isinstance(extra, Mapping), f"{payload}"
    names = extra.get("image_file_name", [])
    given = map(str, names if isinstance(names, list) else [names])
    return CodeV(tuple(name if PurePosixPath(name).suffix else f"{name}.png" for name in given))


PROTOCOLS: Mapping[str, Callable[[Payload], ToolProtocol]] = {
    "pyvision": pyvision,
    "codev": codev,
    "deepeyes": lambda _: DeepEyes(),
    "functions": lambda _: Functions(),
}
"""task.tool_format -> the protocol as an example wants it."""


class VisualPythonTask(Task):
    """PyVision-RL, CodeV and DeepEyes are settings of it: task.tool_format, task.reward and the data."""

    rewards = rubrics.REWARDS
    runs_code = True

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        self.reward = settings.reward or "accuracy"
        self.protocol = PROTOCOLS[settings.tool_format]({"env_name": "", "extra": {}, "videos": ()})
        self.stop = self.protocol.stop
        self.judge = judge_of(settings.judge)
        self.rubric = rubrics.build(self.reward, judge=self.judge, protocol=settings.tool_format)
        self._pool = pool_of(settings.sandbox)
        self._splits: dict[str, Sequence[Example]] = {}

    async def start(self) -> None:
        await start_pool(self._pool, self.settings.sandbox)
        if self.judge is not None:
            await self.judge.start()

    async def close(self) -> None:
        if self.judge is not None:
            await self.judge.close()
        await self._pool.close()

    def examples(self, split: str) -> Sequence[Example]:
        """The user's questions; every row is looked at the first time. ValueError names the first that is no good."""
        if split not in self._splits:
            self._splits[split] = examples_of(self.settings.data, split, videos=self.settings.tool_format == "pyvision")
        return self._splits[split]

    def env(self, example: Example) -> AgentEnv:
        return AgentEnv(example, protocol=PROTOCOLS[self.settings.tool_format](example.payload), pool=self._pool)

    def figures(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Those that are quoted of task.data.benchmark."""
        return figures(self.settings.data.benchmark, examples, rollouts)

    def gold(self, example: Example) -> list[str]:
        """Replies that earn full marks: the answer; before it, where tools are rewarded and there is a picture, a look at the first one."""
        protocol = PROTOCOLS[self.settings.tool_format](example.payload)
        images, answer = example.payload["images"], example.payload["answer"]
        assert isinstance(images, tuple) and isinstance(answer, str), f"{example}"
        look = [look_at_first(protocol, images[0].open())] if images and self.reward != "accuracy" else []
        if example.payload["videos"] and self.reward != "accuracy":
            look = [protocol.write_code(f"plt.imshow({CLIP.format(0)}[0].asnumpy())\nplt.show()")]
        return [*look, protocol.write_answer(answer)]


def look_at_first(protocol: ToolProtocol, picture: Picture) -> str:
    """A reply that shows the first picture of a question, whole."""
    if isinstance(protocol, DeepEyes):
        return protocol.write_call("zoom", {"bbox_2d": [0, 0, picture.width, picture.height]})
    (name,) = protocol.inputs([picture])
    return protocol.write_code(f"Image.open({name!r}).show()" if isinstance(protocol, CodeV) else f"{name}.show()")


async def start_pool(pool: sandbox.Sandbox | SandboxClient, settings: SandboxSettings) -> None:
    """Raises InfraError, under the setting that chose this pool."""
    try:
        await pool.start()
    except sandbox.AccessDenied as denied:
        raise AccessDenied(f"task.sandbox.url={denied}: task.sandbox.token_file=FILE") from denied
    except sandbox.SandboxFault as fault:
        url, isolation = settings.url, settings.isolation
        chosen = f"url={url}: {fault}; start it" if url else f"isolation={isolation}: {fault}; see what this machine lacks"
        raise InfraError(f"task.sandbox.{chosen}: python -m sandbox {'serve' if url else 'doctor'}") from fault


def pool_of(settings: SandboxSettings) -> sandbox.Sandbox | SandboxClient:
    """The server at settings.url, which has its own limits, or a pool of this process."""
    if settings.url:
        return sandbox_client(settings)
    limits = sandbox.Limits(
        call_s=settings.call_timeout_s, memory=settings.memory_mib << 20, text=OBSERVED_CHARACTERS, input_bytes=INPUT_BYTES
    )
    return sandbox.Sandbox(size=settings.size, limits=limits, isolation=settings.isolation, accept=settings.allow_missing)


def sandbox_client(settings: SandboxSettings) -> SandboxClient:
    """Of the server at settings.url. ValueError: the file of its token holds none."""
    try:
        return SandboxClient(settings.url, token=read_token(settings.token_file) if settings.token_file else "")
    except ValueError as error:
        raise ValueError(f"task.sandbox.token_file={error}") from error
