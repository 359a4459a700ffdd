r"""PyVision-RL's protocol: fenced Python in <code>, a boxed answer, and numbered image tags.

    reply         <code>\n```python\n...\n```\n</code>            the reply ends at </code>
                  <answer>\n\boxed{...}\n</answer>
    observation   <tool_response> <interpreter> Text Result: ...
                  Image Result: <image_clue_2> image </image_clue_2> ...

The protocol supports three of PyVision-RL's environments, which differ in the policy's access to
images and videos:

- pyvision_gym_w_image_hint (shows_images=True): the prompt contains the images, and code can access
  the images as image_clue_i.
- pyvision_gym_wo_image_hint (shows_images=False): the prompt contains no images, but code can
  access the images as image_hint_i.
- pyvision_gym_wo_video_hint: the prompt contains no frames, but code can access the videos as
  video_clue_i and display frames.

Difference from the original implementation: a reply with both code and an answer, or with an answer
outside of \boxed{}, receives an error message that the policy can react to. In the original, such a
reply ends the episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from PIL.Image import Image as Picture

from megatron_rl.tasks.visual_python.message_parts import MessagePart, describe_sizes, insert_images, make_message, write_code_block
from megatron_rl.tasks.visual_python.reply_parsing import (
    find_last_fence,
    join_code_blocks,
    make_no_action_error,
    parse_blocks,
    parse_boxed_answer,
)
from megatron_rl.tasks.visual_python.tool_protocol import MalformedReply, ParsedReply
from megatron_rl.types import Message, ToolCall

PYVISION_RULES = r"""Solve the task step by step. To look closer, to measure or to calculate, write Python, and read what it gives back
before you go on. A step with code ends like this:
<code>
```python
# a complete script; variables of earlier steps are still there
```
</code>
It is run in a sandbox. IMAGES Show what you want to see with matplotlib (plt.imshow(...), plt.show()) and print the values that you need;
save nothing. Numbers, crops and figures that come back are your evidence: for questions about details of an image, look before you answer.

When you are sure, end with the answer alone, nothing behind it:
<answer>
\boxed{the answer}
</answer>"""
SHOWN_IMAGES_TEXT = "Image i, counted from 0, is the global variable image_clue_i already (a PIL image)."
HIDDEN_IMAGES_TEXT = (
    "Image i, counted from 0, is the global variable image_hint_i already (a PIL image); you do not see it before your code shows it."
)

CLIP_NAME = "video_clue_{}"
VIDEOS_TEXT = """Video i, counted from 0, is the global variable video_clue_i already; you do not see it. len(video_clue_0) is how many
frames it has, video_clue_0.get_avg_fps() how many of them are a second, video_clue_0[n].asnumpy() is frame n as an array (height, width,
RGB), and video_clue_0.get_batch([n, ...]).asnumpy() is several. Show the frames that you need, and no more."""
VIDEO_PLACEHOLDER = "<video>"
"""Placeholder for a video in a question."""


@dataclass(slots=True, frozen=True)
class PyVisionProtocol:
    """Tool protocol of PyVision-RL."""

    shows_images: bool = True
    """If True, the prompt contains the question's images. If False, only code can access the
    images.
    """
    num_videos: int = 0
    """Number of the question's videos, which only code can access."""
    rules: str = PYVISION_RULES
    """System message. The word IMAGES is replaced with an explanation of the image or video names.
    """
    name = "pyvision"
    stop: ClassVar[tuple[str, ...]] = ("</code>",)

    def write_prompt(self, question: str, pictures: Sequence[Picture]) -> list[Message]:
        """Return a system message with the rules and a user message with the question.

        The user message also contains the sizes of the images. If `shows_images` is True, the user
        message contains the images too.
        """
        names = list(self.name_images(pictures))
        parts = insert_images(self._insert_video_names(question), pictures, self._wrap_image)
        rules = self.rules.replace(
            "IMAGES", VIDEOS_TEXT if self.num_videos else SHOWN_IMAGES_TEXT if self.shows_images else HIDDEN_IMAGES_TEXT
        )
        return [make_message("system", rules), make_message("user", *parts, *(["\n", describe_sizes(names, pictures)] if names else []))]

    def parse_reply(self, reply: str) -> ParsedReply:
        """Parse a reply into code, a boxed answer or an error.

        If there are several code blocks, only the last block is used. In a reply without tags, the
        code may also be in a Markdown fence that starts with ```python.
        """
        found = parse_blocks(reply, action="code", reserved=("tool_response", "interpreter"))
        if isinstance(found, MalformedReply):
            return found
        if found.tag == "answer":
            return parse_boxed_answer(found.bodies[0])
        if found.tag == "code":
            return join_code_blocks(found.bodies[-1:])
        bare = find_last_fence(reply)
        return make_no_action_error("code") if bare is None else join_code_blocks((bare,))

    def write_observation(self, call: ToolCall, pictures: Sequence[Picture], *, num_previous_images: int) -> list[Message]:
        """Return a user message with the result in <tool_response> tags and numbered images."""
        parts: list[MessagePart] = [f"<tool_response>\n<interpreter>\nText Result:\n{call.text}\n"]
        if pictures:
            parts.append("Image Result:\n")
        for index, picture in enumerate(pictures, start=num_previous_images):
            parts += [*_wrap_image_clue(index, picture), "\n"]
        return [make_message("user", *parts, "</interpreter>\n</tool_response>")]

    def name_images(self, pictures: Sequence[Picture]) -> dict[str, Picture]:
        """Return the images, keyed by variable name: image_clue_i or image_hint_i."""
        name = "image_clue" if self.shows_images else "image_hint"
        return {f"{name}_{index}": picture for index, picture in enumerate(pictures)}

    def _insert_video_names(self, question: str) -> str:
        """Return the question, extended by the names of its videos.

        If the question has one placeholder for each video, the names replace the placeholders.
        Otherwise the placeholders are removed, and the names precede the question.
        """
        names = [f"[{CLIP_NAME.format(number)}]" for number in range(self.num_videos)]
        if question.count(VIDEO_PLACEHOLDER) == len(names):
            for name in names:
                question = question.replace(VIDEO_PLACEHOLDER, name, 1)
            return question
        return "\n".join([*names, question.replace(VIDEO_PLACEHOLDER, "")])

    def write_code(self, source: str) -> str:
        """Return a reply that runs the given Python source."""
        return write_code_block(source)

    def write_answer(self, text: str) -> str:
        """Return a reply that gives the final answer."""
        return f"<answer>\n\\boxed{{{text}}}\n</answer>"

    def _wrap_image(self, index: int, picture: Picture) -> list[MessagePart]:
        return _wrap_image_clue(index, picture) if self.shows_images else [f"[image_hint_{index}]"]


def _wrap_image_clue(index: int, picture: Picture) -> list[MessagePart]:
    return [f"<image_clue_{index}>", picture, f"</image_clue_{index}>"]
