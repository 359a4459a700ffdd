"""DeepEyes' protocol: JSON tool calls that zoom into or rotate the original image.

    reply         <tool_call>
                  {"name": "image_zoom_in_tool",
                   "arguments": {"bbox_2d": [x1, y1, x2, y2], "label": "..."}}
                  </tool_call>
                  <tool_call>{"name": "image_rotate_tool", "arguments": {"angle": 90}}</tool_call>
                  <answer>...</answer>
    observation   <tool_response> image </tool_response> and a reminder

If a reply has several calls, only the last call is run. Boxes are in pixels of the ORIGINAL image
(the first image of the question), regardless of the resolution at which the policy sees that image.

Difference from the original implementation: a reply with neither a call nor an answer receives an
error message that the policy can react to, unless task.stop_on_tool_error ends the episode. In the
original, such a reply always ends the episode.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from PIL.Image import Image as Picture

from megatron_rl.tasks.visual_python.image_tools import IMAGE_TOOLS
from megatron_rl.tasks.visual_python.message_parts import describe_sizes, insert_images, make_message
from megatron_rl.tasks.visual_python.reply_parsing import parse_tool_reply
from megatron_rl.tasks.visual_python.tool_protocol import MalformedReply, ParsedReply, ToolAction
from megatron_rl.types import Message, ToolCall

TOOL_NAMES: Mapping[str, str] = {"image_zoom_in_tool": "zoom", "image_rotate_tool": "rotate"}
"""Maps DeepEyes' tool names to the names in IMAGE_TOOLS."""
DEEPEYES_GUIDE = """

Look closer before you answer where details matter, as often as you need. The final answer goes into <answer>...</answer>."""
DEEPEYES_REMINDER = "Think about what this shows. Then call a tool again, or give the final answer in <answer> tags."


def write_tools_prompt(schemas: Sequence[Mapping[str, object]]) -> str:
    """Return a system message that lists functions in the format of Qwen2.5's chat template.

    The wording is copied from the template in Qwen2.5's tokenizer_config.json, because the model
    was trained on this wording.
    """
    listed = "\n".join(json.dumps({"type": "function", "function": schema}) for schema in schemas)
    return (
        "You are a helpful assistant.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def make_tool_schema(name: str, tool: str) -> dict[str, object]:
    """Return the JSON schema of an image tool.

    Args:
        name: Tool name in the protocol.
        tool: Tool name in IMAGE_TOOLS.
    """
    return {"name": name, "description": IMAGE_TOOLS[tool].description, "parameters": IMAGE_TOOLS[tool].parameters}


def write_tool_call(name: str, arguments: Mapping[str, object]) -> str:
    """Return a tool call in <tool_call> tags."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(slots=True, frozen=True)
class DeepEyesProtocol:
    """Tool protocol of DeepEyes."""

    name = "deepeyes"
    stop: ClassVar[tuple[str, ...]] = ()

    def write_prompt(self, question: str, pictures: Sequence[Picture]) -> list[Message]:
        """Return a system message with the tools and a user message with the question.

        The user message also contains the images and the size of the first image.
        """
        tools = write_tools_prompt([make_tool_schema(name, tool) for name, tool in TOOL_NAMES.items()])
        size = ["\n", describe_sizes(["The original image"], pictures[:1])] if pictures else []
        return [
            make_message("system", tools, DEEPEYES_GUIDE),
            make_message("user", *insert_images(question, pictures, lambda _, picture: [picture]), *size),
        ]

    def parse_reply(self, reply: str) -> ParsedReply:
        """Parse a reply into a tool call, an answer or an error."""
        call = parse_tool_reply(reply, allow_several=True)
        if not isinstance(call, ToolAction):
            return call
        if call.name not in TOOL_NAMES:
            return MalformedReply(f"there is no tool {call.name[:60]!r}; there are {', '.join(TOOL_NAMES)}")
        return ToolAction(TOOL_NAMES[call.name], call.arguments)

    def write_observation(self, call: ToolCall, pictures: Sequence[Picture], *, num_previous_images: int) -> list[Message]:
        """Return a user message with the result in <tool_response> tags.

        The message ends with a reminder of the protocol.
        """
        return [make_message("user", f"<tool_response>\n{call.text}", *pictures, f"\n</tool_response>\n{DEEPEYES_REMINDER}")]

    def name_images(self, pictures: Sequence[Picture]) -> dict[str, Picture]:
        """Return an empty mapping, because this protocol runs no code."""
        return {}

    def write_code(self, source: str) -> str:
        """Raise ValueError, because this protocol runs no code."""
        raise ValueError(
            f"task.tool_format=deepeyes: the protocol does not support code ({source[:40]!r}); use pyvision, codev or functions"
        )

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Return a reply that calls the image tool with the given name in IMAGE_TOOLS."""
        return write_tool_call(next(own for own, tool in TOOL_NAMES.items() if tool == name), arguments)

    def write_answer(self, text: str) -> str:
        """Return a reply that gives the final answer."""
        return f"<answer>{text}</answer>"
