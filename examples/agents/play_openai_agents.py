"""NumberLine with openai-agents: one agent with one function tool (number_line.py starts it).

The first message contains the picture of the start state. The tool `move` returns the new state as
text, and the agent ends with the game.
"""

import asyncio
import contextlib
from typing import Literal

from agents import Agent, OpenAIChatCompletionsModel, Runner, ToolsToFinalOutputResult, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from number_line import MAX_MOVES, PROMPT, Episode, NumberLine, run
from openai import AsyncOpenAI

INSTRUCTIONS = "Move the current number to the target."


async def play_game(episode: Episode) -> float:
    """Play one game and return its reward."""
    game = NumberLine(episode)

    @function_tool
    def move(action: Literal["+", "-"]) -> str:
        """Add 1 or subtract 1."""
        return game.move(action)

    def stop_at_end(context: object, results: list) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(is_final_output=game.is_over, final_output=str(game))

    content = [
        {"type": "input_image", "image_url": game.picture_url(), "detail": "auto"},
        {"type": "input_text", "text": PROMPT},
    ]
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0, timeout=None) as client:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="player", instructions=INSTRUCTIONS, model=model, tools=[move], tool_use_behavior=stop_at_end)
        with contextlib.suppress(MaxTurnsExceeded, ModelBehaviorError):  # too many turns, or a call of an unknown tool
            await Runner.run(agent, [{"role": "user", "content": content}], max_turns=MAX_MOVES)
    return game.finish()  # a response without a tool call ends the agent


if __name__ == "__main__":
    set_tracing_disabled(True)
    run(lambda episode: asyncio.run(play_game(episode)))
