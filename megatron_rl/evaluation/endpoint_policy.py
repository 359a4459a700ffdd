"""Evaluates a model behind an OpenAI-compatible endpoint on the trainer's tasks.

The endpoint returns no token ids, so a rollout contains only text. No stop strings are sent with a
request, because servers omit the stop string from the response. Instead, the client truncates each
response after the first occurrence of a stop string of the task (Task.stop). If the endpoint
returns an error, the episode fails (InfraError) and is not scored.
"""

import asyncio
import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import openai
from openai.types.chat import ChatCompletionMessageParam
from PIL import Image as Pictures
from PIL.Image import Image as Picture
from pydantic import BaseModel, Field
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from megatron_rl.clients.endpoint_pool import Endpoint, EndpointPool
from megatron_rl.clients.openai import api_key, make_client, translate_errors
from megatron_rl.config import EvaluationSettings, ModelSettings
from megatron_rl.rollout.conversation import SequenceLimits
from megatron_rl.rollout.engine import ResponseSize, SamplingSettings
from megatron_rl.rollout.episode import EpisodeSettings, require_access, run_episode
from megatron_rl.rollout.renderer import image_key
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.transcript_segments import extract_images
from megatron_rl.types import Example, Image, Message, Rollout, StopReason, TokenSequence, Turn

IMAGE_PLACEHOLDER_TEXT = "[picture]"
"""Text that replaces an image when a message is converted to text."""
PATCH_SIZE, MERGE_SIZE = 14, 2
"""Patch size in pixels and merge size of Qwen2.5-VL. Images are resized to sides that are multiples
of 28, the product of the two sizes. model.min_pixels and model.max_pixels therefore have the same
effect as in training.
"""


class EndpointMessage(BaseModel):
    """The model's message in a chat completion."""

    content: str | None = None
    """Text of the message, or None if the model refused or produced only reasoning.

    None counts as an empty response.
    """


class EndpointChoice(BaseModel):
    """One choice in a chat completion."""

    message: EndpointMessage
    finish_reason: str | None = None


class EndpointCompletion(BaseModel):
    """Chat completion returned by the endpoint, reduced to the fields used here."""

    choices: list[EndpointChoice] = Field(min_length=1)


class EndpointClient:
    """Client for the evaluated servers, shared by all episodes.

    The client is bound to the event loop in which it is constructed.
    """

    def __init__(self, settings: EvaluationSettings, model: ModelSettings) -> None:
        self.model = model
        self._secret = api_key()
        self._clients = {url: make_client(url, key="evaluation.urls", secret=self._secret) for url in settings.urls}
        self._endpoints = EndpointPool(
            settings.urls, name="evaluation", max_attempts=settings.max_attempts, timeout_s=settings.timeout_s,
            outage_timeout_s=settings.outage_timeout_s,
            concurrency=settings.concurrency,
        )  # fmt: skip
        self._endpoints.start()
        self.num_truncated = 0
        """Number of responses that were cut off at the token limit."""

    async def generate(self, messages: Sequence[dict[str, object]], sampling: SamplingSettings) -> str:
        """Return the model's response to a conversation.

        Raises InfraError if no server returns a response.
        """
        return await self._endpoints.request(lambda endpoint: self._request_reply(endpoint, messages, sampling))

    async def _request_reply(self, endpoint: Endpoint, messages: Sequence[dict[str, object]], sampling: SamplingSettings) -> str:
        client: openai.AsyncOpenAI = self._clients[endpoint.url]
        with translate_errors(self._secret):
            raw = await client.chat.completions.with_raw_response.create(
                model=self.model.path,
                messages=cast(list[ChatCompletionMessageParam], list(messages)),
                temperature=sampling.temperature,
                max_completion_tokens=sampling.max_tokens,
                seed=sampling.seed,
            )
            choice = EndpointCompletion.model_validate_json(raw.content).choices[0]
        self.num_truncated += choice.finish_reason == "length"
        return truncate_at_stop(choice.message.content or "", sampling.stop)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))


class ChatConversation:
    """Conversation of one episode as chat messages.

    The class has the same methods as the conversation in rollout/conversation.py.
    """

    def __init__(self, client: EndpointClient, limits: SequenceLimits) -> None:
        self._client, self._limits = client, limits
        self.sequences: list[TokenSequence] = []
        self.turns: list[Turn] = []
        self.response_size: ResponseSize | None = None
        self._messages: list[dict[str, object]] = []
        self._histories: list[tuple[list[dict[str, object]], list[Image]]] = []
        """Messages and images up to and including the response of each turn."""
        self.prompt_text = ""
        """First prompt of the episode as text."""

    async def start(self, messages: Sequence[Message]) -> StopReason | None:
        """Add the first prompt. Return a stop reason if the prompt exceeds a limit, else None."""
        self.prompt_text = "\n".join(map(message_to_text, messages))
        return await self._append_messages(messages, is_new_prompt=True)

    async def generate(self, sampling: SamplingSettings) -> str:
        """Request the model's response and record it as a turn."""
        text = await self._client.generate(self._messages, sampling)
        self._messages.append({"role": "assistant", "content": text})
        self.turns.append(Turn(sequence=len(self.sequences) - 1, token_span=(0, 0), text=text))
        self._histories.append((list(self._messages), list(self.sequences[-1].images)))
        return text

    def char_to_token(self, char: int) -> None:
        """Return None, because the tokens are unknown."""

    async def observe(self, messages: Sequence[Message], *, is_new_prompt: bool, after_turn: int | None = None) -> StopReason | None:
        """Add an observation; if `is_new_prompt` is set, start a new sequence with a new prompt.

        Return a stop reason if a limit is exceeded, else None.
        """
        if not is_new_prompt and after_turn not in (None, len(self.turns) - 1):
            history, images = self._histories[after_turn]
            self._messages = list(history)
            self.sequences.append(TokenSequence(images=list(images)))
        end = await self._append_messages(messages, is_new_prompt=is_new_prompt)
        if end is None and not is_new_prompt:
            self.turns[-1].images = self.sequences[-1].images[-len(extract_images(messages)) :] if extract_images(messages) else []
        return end

    async def render_final_state(self, messages: Sequence[Message], *, is_new_prompt: bool, after_turn: int | None = None) -> None:
        """Return None, because the tokens are unknown."""

    async def _append_messages(self, messages: Sequence[Message], *, is_new_prompt: bool) -> StopReason | None:
        images = await asyncio.to_thread(lambda: [prepare_image(picture, self._client.model) for picture in extract_images(messages)])
        context = TokenSequence() if is_new_prompt else self.sequences[-1]
        more = TokenSequence(images=images)
        if is_new_prompt:
            self.sequences.append(context)
            self._messages = []
        end = replace(self._limits, max_sequence_tokens=1 << 62).exceeds(context, more)
        if end is None or is_new_prompt:
            context.images += images
            self._messages += await asyncio.to_thread(lambda: [to_openai_message(message, iter(images)) for message in messages])
        return end


def prepare_image(picture: Picture, model: ModelSettings) -> Image:
    """Resize an image to the size that the trainer's renderer would choose."""
    limits = {"min_pixels": model.min_pixels, "max_pixels": model.max_pixels}
    height, width = smart_resize(picture.height, picture.width, factor=PATCH_SIZE * MERGE_SIZE, **limits)
    resized = picture.convert("RGB").resize((width, height), Pictures.Resampling.BICUBIC)
    grid = (1, height // PATCH_SIZE, width // PATCH_SIZE)
    return Image(pil=resized, patch_PC=None, grid=grid, key=image_key(resized), merge=MERGE_SIZE)


def message_to_text(message: Message) -> str:
    """Return a message's role and content as text, with [picture] in place of each image."""
    content = message["content"]
    parts = (
        [content] if isinstance(content, str) else [part["text"] if part["type"] == "text" else IMAGE_PLACEHOLDER_TEXT for part in content]
    )
    return f"{message['role']}: {''.join(parts)}"


def to_openai_message(message: Message, images: Iterator[Image]) -> dict[str, object]:
    """Convert a message to OpenAI's format.

    A tool message becomes a user message, because the conversation contains no tool call to which
    the tool message could refer.
    """
    role = "user" if message["role"] == "tool" else message["role"]
    if isinstance(message["content"], str):
        return {"role": role, "content": message["content"]}
    return {"role": role, "content": [_to_openai_part(part, images) for part in message["content"]]}


def _to_openai_part(part: Mapping[str, object], images: Iterator[Image]) -> dict[str, object]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    return {"type": "image_url", "image_url": {"url": encode_png_url(next(images))}}


def encode_png_url(image: Image) -> str:
    """Encode an image as a PNG data URL."""
    encoded = io.BytesIO()
    assert image.pil is not None, "prepare_image keeps the pixels"
    image.pil.save(encoded, "PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text up to and including the stop string that occurs first."""
    ends = [text.index(word) + len(word) for word in stop if word in text]
    return text[: min(ends, default=len(text))]


class EndpointRolloutRunner:
    """Runs a task's episodes against an endpoint, chunk by chunk, in one event loop."""

    def __init__(self, task: Task, settings: EvaluationSettings, model: ModelSettings, episode: EpisodeSettings) -> None:
        self._task, self._episode = task, episode
        self.prompt_text = ""
        """First prompt of the first episode in the last chunk, as text."""
        self._runner = asyncio.Runner()
        self._runner.run(task.start())
        self.client = self._runner.run(_make_client(settings, model))

    def run_examples(self, examples: Sequence[Example], *, samples: int, first_group: int) -> list[Rollout]:
        """Run `samples` episodes per example; return rollouts ordered by group and sample index.

        Episodes with an infrastructure error have Status.FAILED.

        Raises:
            RunDenied: The endpoint does not accept the API key.
        """
        rollouts = self._runner.run(self._run_episodes(examples, samples=samples, first_group=first_group))
        require_access(rollouts)
        return rollouts

    async def _run_episodes(self, examples: Sequence[Example], *, samples: int, first_group: int) -> list[Rollout]:
        places = [(group, sample) for group in range(first_group, first_group + len(examples)) for sample in range(samples)]
        conversations = [ChatConversation(self.client, self._episode) for _ in places]
        rollouts = await asyncio.gather(
            *(
                run_episode(
                    self._task,
                    examples[group - first_group],
                    conversation=conversation,
                    settings=self._episode,
                    group=group,
                    sample_index=sample,
                )
                for (group, sample), conversation in zip(places, conversations, strict=True)
            )
        )
        self.prompt_text = conversations[0].prompt_text
        return rollouts

    def close(self) -> None:
        """Close the task and the client, and report truncated responses if there are any."""
        if self.client.num_truncated:
            print(f"{self.client.num_truncated} responses were truncated at task.max_new_tokens", flush=True)
        try:
            self._runner.run(self._task.close())
            self._runner.run(self.client.close())
        finally:
            self._runner.close()


async def _make_client(settings: EvaluationSettings, model: ModelSettings) -> EndpointClient:
    return EndpointClient(settings, model)
