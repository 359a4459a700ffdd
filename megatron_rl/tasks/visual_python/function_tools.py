r"""Function calls as OpenAI's servers know them, in the words of Qwen2.5's chat template: python, zoom and rotate.

    reply         <tool_call>\n{"name": "python", "arguments": {"code": "..."}}\n</tool_call>
                  <answer>...</answer>
    observation   <tool_response> text, pictures </tool_response>, as a user's turn, which is how the template shows role `tool`

One call a reply: the reply ends at its closing tag.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL.Image import Image as Picture

from megatron_rl.tasks.visual_python.deepeyes import describe_tools, schema, write_tool_call
from megatron_rl.tasks.visual_python.image_tools import IMAGE_TOOLS
from megatron_rl.tasks.visual_python.message_parts import place, say, sizes
from megatron_rl.tasks.visual_python.reply_parsing import read_python, read_tool_call
from megatron_rl.tasks.visual_python.tool_protocol import Call, Malformed, Reply
from megatron_rl.types import Message, ToolCall

PYTHON: Mapping[str, object] = {
    "name": "python",
    "description": "Runs Python in a sandbox that keeps its variables; returns what is printed and the figures that are shown. "
    "The images of the question are there as image_0, image_1, ... (PIL images).",
    "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
}
GUIDE = """

Call one function at a time. Look closer before you answer where details matter. The final answer goes into <answer>...</answer>."""


@dataclass(slots=True, frozen=True)
class Functions:
    name = "functions"
    stop = ("</tool_call>",)

    def prompt(self, question: str, pictures: Sequence[Picture]) -> list[Message]:
        tools = describe_tools([PYTHON, *(schema(tool, tool) for tool in IMAGE_TOOLS)])
        names = list(self.inputs(pictures))
        size = ["\n", sizes(names, pictures)] if names else []
        return [say("system", tools, GUIDE), say("user", *place(question, pictures, lambda _, picture: [picture]), *size)]

    def read(self, reply: str) -> Reply:
        call = read_tool_call(reply, several=False)
        if not isinstance(call, Call) or call.name in IMAGE_TOOLS:
            return call
        code = call.arguments.get("code")
        if call.name != "python":
            return Malformed(f"there is no function {call.name[:60]!r}; there are python, {', '.join(IMAGE_TOOLS)}")
        return read_python((code,)) if isinstance(code, str) else Malformed("python needs the argument code, a text")

    def observe(self, call: ToolCall, pictures: Sequence[Picture], *, num_before: int) -> list[Message]:
        return [say("user", f"<tool_response>\n{call.text}\n", *pictures, "\n</tool_response>")]

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, Picture]:
        return {f"image_{index}": picture for index, picture in enumerate(pictures)}

    def write_code(self, source: str) -> str:
        return write_tool_call("python", {"code": source})

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        return write_tool_call(name, arguments)

    def write_answer(self, text: str) -> str:
        return f"<answer>{text}</answer>"
