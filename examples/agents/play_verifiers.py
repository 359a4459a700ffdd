"""NumberLine with verifiers: an exchange in which the game is the user (number_line.py starts it).

Every user message contains the picture of the state; the policy answers + or -. The harness of
verifiers runs in this process and sends chat completions through the interception server of
verifiers, which records the trace and computes the reward.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from number_line import MAX_MOVES, PROMPT, Episode, NumberLine, run
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["InProcessChat"]


class InProcessChat(vf.Harness[vf.HarnessConfig]):
    """Harness that sends one chat completion for each user message."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str, mcp_urls: dict[str, str],
        data: vf.TaskData, **_: Any,
    ) -> vf.ProgramResult:  # fmt: skip
        """Request one response; verifiers passes the whole conversation as the prompt."""
        _, prompt = self.resolve_prompt(data)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            await client.chat.completions.create(model=ctx.model, messages=[message_to_wire(message) for message in prompt or []])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class NumberLineTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """One game, with its return as the reward."""

    def __init__(self, game: NumberLine) -> None:
        super().__init__(vf.TaskData(prompt=None))
        self.game = game

    @vf.reward
    async def game_return(self) -> float:
        """Return the sum of the rewards of all moves."""
        return float(self.game.finish())


def show(game: NumberLine, text: str) -> list[vf.Message]:
    """Return a user message with the picture of the state."""
    image = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url=game.picture_url()))
    return [vf.UserMessage(content=[image, vf.TextContentPart(text=text)])]


async def play_game(episode: Episode) -> float:
    """Play one game and return the reward of its trace."""
    game = NumberLine(episode)
    key_variable = f"KEY_{episode.api_key}"  # verifiers reads keys from environment variables
    os.environ[key_variable] = episode.api_key
    config = vf.AgentConfig(
        harness=vf.HarnessConfig(id=Path(__file__).stem),
        runtime=vf.SubprocessConfig(),
        client=vf.EvalClientConfig(base_url=episode.base_url, api_key_var=key_variable),
        model="policy",
        max_turns=MAX_MOVES,
        network_notice=False,
    )
    try:
        async with vf.Agent(config).interaction(NumberLineTask(game)) as interaction:
            text = PROMPT
            while not game.is_over:
                segment = await interaction.turn(show(game, text))
                if segment.terminated:
                    break
                game.move(segment.messages[-1].content.strip())
                text = "Next."
    finally:
        del os.environ[key_variable]
    for error in interaction.trace.errors:
        raise RuntimeError(f"{error.type}: {error.message}")
    return interaction.trace.reward


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    run(lambda episode: asyncio.run(play_game(episode)))
