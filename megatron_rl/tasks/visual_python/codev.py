r"""CodeV's protocol: Python code in <code>, images as named files, results in <sandbox_output>.

    reply         <code>\n```python\n...\n```\n</code>   ends at </code>; several blocks are joined
                  <answer>...</answer>
    observation   <sandbox_output> text, images </sandbox_output> and a reminder of the protocol

Differences from the original implementation:

- The original runs each call in a new process, so only files persist between calls. In this
  implementation, variables persist too. This difference affects only code that relies on a variable
  being undefined.
- Each image is also available as a variable that is named after the stem of its file name.
- A reply with neither code nor an answer receives an error message. The original returns nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from PIL.Image import Image as Picture

from megatron_rl.tasks.visual_python.message_parts import describe_sizes, insert_images, make_message, write_code_block
from megatron_rl.tasks.visual_python.reply_parsing import join_code_blocks, make_no_action_error, parse_answer, parse_blocks
from megatron_rl.tasks.visual_python.tool_protocol import MalformedReply, ParsedReply
from megatron_rl.types import Message, ToolCall

CODEV_RULES = """Answer the user's question. You may write Python for it; you need not.

Code goes between tags, in a fence:
<code>
```python
...
```
</code>
It runs in a sandbox outside of this conversation, and what it gives back comes in <sandbox_output> tags. Decide from that whether to answer
or to write more code. Use the standard library and what is installed (NumPy, Pillow, Matplotlib, SciPy, SymPy, pandas, OpenCV).
- Working on an image: load it by the file name that is given, save the result into the working directory and print the saved file's name,
  nothing else; the image is then shown to you.
- Calculating: define every variable that you use and print the result.

The final answer goes between tags, and ends the conversation:
<answer>the answer</answer>"""
CODEV_REMINDER = "Think about what this shows. Then either write more code in <code> tags or give the final answer in <answer> tags."


@dataclass(slots=True, frozen=True)
class CodeVProtocol:
    """Tool protocol of CodeV."""

    file_names: tuple[str, ...] = ()
    """File names of the images from the data set, in the order of the images. An image without an
    entry is named by its index: image_0.png, image_1.png, ...
    """
    name = "codev"
    stop: ClassVar[tuple[str, ...]] = ("</code>",)

    def write_prompt(self, question: str, images: Sequence[Picture]) -> list[Message]:
        """Return a system message with the rules and a user message with the question.

        The user message also contains the images and their file names.
        """
        names = list(self.name_images(images))
        files = f"\nImage files: {', '.join(names)}. {describe_sizes(names, images)}" if names else ""
        return [
            make_message("system", CODEV_RULES),
            make_message("user", *insert_images(question, images, lambda _, picture: [picture]), files),
        ]

    def parse_reply(self, reply: str) -> ParsedReply:
        """Parse a reply into code, an answer or an error."""
        found = parse_blocks(reply, action="code", reserved=("sandbox_output",))
        if isinstance(found, MalformedReply):
            return found
        if found.tag == "answer":
            return parse_answer(found.bodies[0])
        return join_code_blocks(found.bodies) if found.tag else make_no_action_error("code")

    def write_observation(self, call: ToolCall, pictures: Sequence[Picture], *, num_previous_images: int) -> list[Message]:
        """Return a user message with the result in <sandbox_output> tags.

        The message ends with a reminder of the protocol.
        """
        return [make_message("user", f"<sandbox_output>\n{call.text}\n", *pictures, f"\n</sandbox_output>\n{CODEV_REMINDER}")]

    def name_images(self, pictures: Sequence[Picture]) -> dict[str, Picture]:
        """Return the images, keyed by file name."""
        given = self.file_names[: len(pictures)]
        others = (name for name in (f"image_{index}.png" for index in count(len(given))) if name not in given)
        return dict(zip([*given, *(next(others) for _ in pictures[len(given) :])], pictures, strict=True))

    def write_code(self, source: str) -> str:
        """Return a reply that runs the given Python source."""
        return write_code_block(source)

    def write_answer(self, text: str) -> str:
        """Return a reply that gives the final answer."""
        return f"<answer>{text}</answer>"
