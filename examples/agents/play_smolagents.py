"""NumberLine with smolagents: a ToolCallingAgent with one tool (number_line.py starts it).

smolagents returns the policy's tool calls as text ("Calling tools: ..."), so each of its requests
is a new prompt. Its own prompts have about 1,000 words; the templates here have one sentence.
"""

import io

from number_line import MAX_MOVES, PROMPT, Episode, NumberLine, run
from PIL import Image
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

TEMPLATES = {
    "system_prompt": "Move the current number to the target. Then call final_answer.",
    "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Answer.", "post_messages": "Answer."},
}


def play_game(episode: Episode) -> float:
    """Play one game and return its reward."""
    game = NumberLine(episode)

    @tool
    def move(action: str) -> str:
        """Add 1 or subtract 1.

        Args:
            action: "+" or "-".
        """
        return game.move(action)

    client = {"max_retries": 0, "timeout": None}
    model = OpenAIModel(model_id="policy", api_base=episode.base_url, api_key=episode.api_key, client_kwargs=client)
    agent = ToolCallingAgent(
        tools=[move], model=model, prompt_templates=TEMPLATES, max_steps=MAX_MOVES + 1, verbosity_level=LogLevel.OFF
    )  # fmt: skip
    agent.run(PROMPT, images=[Image.open(io.BytesIO(game.picture()))])
    return game.finish()


if __name__ == "__main__":
    run(play_game)
