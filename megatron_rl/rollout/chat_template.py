"""Renders messages as text with the chat template of a checkpoint.

The tools that the policy may call are in the field `tools` of the first message, in OpenAI's
format. The tool calls of an assistant message are in its field `tool_calls`. Both are rendered by
the template.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError
from transformers import ProcessorMixin

from megatron_rl.types import Message

TOOL_FIELDS: Mapping[str, str] = {"tools": "tools", "tool_calls": "tool calls"}
"""Maps the fields of messages that a template may omit to their names in error messages."""


class ChatTemplate:
    """Chat template of one checkpoint."""

    def __init__(self, processor: ProcessorMixin, path: str, *, special_tokens: Sequence[str]) -> None:
        """Create the template of a processor.

        Args:
            processor: Processor with a chat template.
            path: Value of model.path, for error messages.
            special_tokens: Special tokens that texts must not contain.
        """
        self._processor, self._path = processor, path
        self._special_token_pattern = re.compile("|".join(map(re.escape, special_tokens)))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the messages as text, with the names of special tokens escaped.

        Raises:
            ValueError: The template rejects the messages, or does not render their tools or calls.
        """
        rendered = self._render(messages, add_generation_prompt)
        for name, what in TOOL_FIELDS.items():
            without = [{key: value for key, value in message.items() if key != name} for message in messages]
            if any(name in message for message in messages) and self._render(without, add_generation_prompt) == rendered:
                raise ValueError(f"model.path={self._path}: its chat template omits {what}; use a chat_template.jinja that renders them")
        return rendered

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self.apply([self._escape_message(message) for message in messages], add_generation_prompt)
        except TemplateError as error:
            raise ValueError(f"model.path={self._path}: its chat template cannot render these messages: {error}") from error

    def apply(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Apply the template to messages without escaping their text.

        Exceptions of the template are not caught.
        """
        tools = messages[0].get("tools") if messages else None
        text = self._processor.apply_chat_template(
            cast(Any, messages), tools=tools or None, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return cast(str, text)

    def find_special_token(self, text: str) -> str:
        """Return the first special-token name in a text from the dataset, or ''.

        In prompts, such a name is escaped by inserting a space.
        """
        found = self._special_token_pattern.search(text)
        return found[0] if found else ""

    def _escape_message(self, message: Message) -> Message:
        """Return the message with the names of special tokens escaped in its text.

        Text from a dataset, a user or a tool must not be tokenized as special tokens. Messages of
        the assistant stay unchanged.
        """
        if message["role"] == "assistant":
            return message
        content = message["content"]
        if isinstance(content, str):
            escaped: object = self._escape(content)
        else:
            escaped = [{**part, "text": self._escape(part["text"])} if part["type"] == "text" else part for part in content]
        tools = {"tools": self._escape_json(message["tools"])} if message.get("tools") else {}
        return {**message, "content": escaped, **tools}

    def _escape_json(self, value: object) -> object:
        if isinstance(value, str):
            return self._escape(value)
        if isinstance(value, Mapping):
            return {self._escape(str(key)): self._escape_json(item) for key, item in value.items()}
        return [self._escape_json(item) for item in value] if isinstance(value, list) else value

    def _escape(self, text: str) -> str:
        return self._special_token_pattern.sub(lambda name: f"< {name[0][1:]}", text)
