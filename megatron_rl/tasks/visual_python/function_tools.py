r"""Protocol with OpenAI-style function calls, in the format of Qwen2.5's chat template.

The functions are python, zoom and rotate, and the tools of MCP servers (task.tools.mcp).

    reply         <tool_call>\n{"name": "python", "arguments": {"code": "..."}}\n</tool_call>
                  <answer>...</answer>
    observation   <tool_response> text, images </tool_response>

The observation is a user message, because the template renders messages of role `tool` as user
messages. A reply may contain only one call, and generation stops at the closing tag of the call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from PIL.Image import Image as Picture

from megatron_rl.tasks.visual_python.deepeyes import make_tool_schema, write_tool_call, write_tools_prompt
from megatron_rl.tasks.visual_python.image_tools import IMAGE_TOOLS
from megatron_rl.tasks.visual_python.message_parts import describe_sizes, insert_images, make_message
from megatron_rl.tasks.visual_python.reply_parsing import join_code_blocks, parse_tool_reply
from megatron_rl.tasks.visual_python.tool_protocol import MalformedReply, ParsedReply, ToolAction
from megatron_rl.types import Message, ToolCall

PYTHON_SCHEMA: Mapping[str, object] = {
    "name": "python",
    "description": "Runs Python in a sandbox that keeps its variables; returns what is printed and the figures that are shown. "
    "The images of the question are there as image_0, image_1, ... (PIL images).",
    "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
}
BUILTIN_NAMES = ("python", *IMAGE_TOOLS)
FUNCTIONS_GUIDE = """

Call one function at a time. Look closer before you answer where details matter. The final answer goes into <answer>...</answer>."""


@dataclass(slots=True, frozen=True)
class FunctionsProtocol:
    """Tool protocol with OpenAI-style function calls."""

    name = "functions"
    stop: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    server_tools: tuple[Mapping[str, object], ...] = ()
    """Name, description and JSON schema of the parameters of each tool of an MCP server."""

    def write_prompt(self, question: str, pictures: Sequence[Picture]) -> list[Message]:
        """Return a system message with the functions and a user message with the question.

        The user message also contains the images and their sizes.
        """
        tools = write_tools_prompt([PYTHON_SCHEMA, *(make_tool_schema(tool, tool) for tool in IMAGE_TOOLS), *self.server_tools])
        names = list(self.name_images(pictures))
        size = ["\n", describe_sizes(names, pictures)] if names else []
        return [
            make_message("system", tools, FUNCTIONS_GUIDE),
            make_message("user", *insert_images(question, pictures, lambda _, picture: [picture]), *size),
        ]

    def parse_reply(self, reply: str) -> ParsedReply:
        """Parse a reply into code, a tool call, an answer or an error."""
        of_servers = [str(tool["name"]) for tool in self.server_tools]
        call = parse_tool_reply(reply, allow_several=False, nested=of_servers)
        if not isinstance(call, ToolAction) or call.name in IMAGE_TOOLS or call.name in of_servers:
            return call
        code = call.arguments.get("code")
        if call.name != "python":
            return MalformedReply(f"there is no function {call.name[:60]!r}; there are {', '.join((*BUILTIN_NAMES, *of_servers))}")
        return join_code_blocks((code,)) if isinstance(code, str) else MalformedReply("python needs the argument code, a text")

    def write_observation(self, call: ToolCall, pictures: Sequence[Picture], *, num_previous_images: int) -> list[Message]:
        """Return a user message with the result in <tool_response> tags."""
        return [make_message("user", f"<tool_response>\n{call.text}\n", *pictures, "\n</tool_response>")]

    def name_images(self, pictures: Sequence[Picture]) -> dict[str, Picture]:
        """Return the images, keyed by variable name: image_0, image_1 and so on."""
        return {f"image_{index}": picture for index, picture in enumerate(pictures)}

    def write_code(self, source: str) -> str:
        """Return a reply that runs the given Python source."""
        return write_tool_call("python", {"code": source})

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Return a reply that calls the function `name`."""
        return write_tool_call(name, arguments)

    def write_answer(self, text: str) -> str:
        """Return a reply that gives the final answer."""
        return f"<answer>{text}</answer>"
