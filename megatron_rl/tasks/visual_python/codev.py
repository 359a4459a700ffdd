r"""CodeV's protocol: Python in <code>, pictures as files by name, what came of it in <sandbox_output>.

    reply         <code>\n```python\n...\n```\n</code>                        the reply ends at </code>; several blocks are joined
                  <answer>...</answer>
    observation   <sandbox_output> text, pictures </sandbox_output> and a reminder of the protocol

Differs from the original: there each call was a fresh process and only files stayed; here variables stay too, which no transcript of
CodeV's notices unless it counts on their absence. A picture is also a variable by its file's stem. A reply with neither code nor answer is
told so; there it met with silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from PIL.Image import Image as Picture

from megatron_rl.tasks.visual_python.message_parts import code_block, place, say, sizes
from megatron_rl.tasks.visual_python.reply_parsing import nothing_found, read_answer, read_blocks, read_python
from megatron_rl.tasks.visual_python.tool_protocol import Malformed, Reply
from megatron_rl.types import Message, ToolCall

RULES = """Answer the user's question. You may write Python for it; you need not.

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
REMINDER = "Think about what this shows. Then either write more code in <code> tags or give the final answer in <answer> tags."


@dataclass(slots=True, frozen=True)
class CodeV:
    file_names: tuple[str, ...] = ()
    """Of the pictures, in order, as the data set calls them; those without a name here are image_0.png, image_1.png, ..."""
    name = "codev"
    stop = ("</code>",)

    def prompt(self, question: str, pictures: Sequence[Picture]) -> list[Message]:
        names = list(self.inputs(pictures))
        files = f"\nImage files: {', '.join(names)}. {sizes(names, pictures)}" if names else ""
        return [say("system", RULES), say("user", *place(question, pictures, lambda _, picture: [picture]), files)]

    def read(self, reply: str) -> Reply:
        found = read_blocks(reply, action="code", reserved=("sandbox_output",))
        if isinstance(found, Malformed):
            return found
        if found.tag == "answer":
            return read_answer(found.bodies[0])
        return read_python(found.bodies) if found.tag else nothing_found("code")

    def observe(self, call: ToolCall, pictures: Sequence[Picture], *, num_before: int) -> list[Message]:
        return [say("user", f"<sandbox_output>\n{call.text}\n", *pictures, f"\n</sandbox_output>\n{REMINDER}")]

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, Picture]:
        given = self.file_names[: len(pictures)]
        others = (name for name in (f"image_{index}.png" for index in count(len(given))) if name not in given)
        return dict(zip([*given, *(next(others) for _ in pictures[len(given) :])], pictures, strict=True))

    def write_code(self, source: str) -> str:
        return code_block(source)

    def write_answer(self, text: str) -> str:
        return f"<answer>{text}</answer>"
