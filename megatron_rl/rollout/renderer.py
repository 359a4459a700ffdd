"""Renders messages as tokens with the chat template and the image processor.

An observation is rendered as a continuation of the sequence, so tokens that the policy sampled are
never re-tokenized. An image is resized once, to its final grid; neither the engine nor the trainer
resizes the image again. Several threads may render at the same time.
"""

import asyncio
import codecs
import hashlib
import itertools
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import torch
from PIL.Image import Image as Picture
from PIL.Image import Resampling
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from megatron_rl.config import EngineSettings, ModelSettings, require
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.vocabulary import check_vocabulary
from megatron_rl.rollout.chat_template import ChatTemplate
from megatron_rl.rollout.processor import (
    check_determinism,
    check_model_fit,
    check_template,
    find_banned_ids,
    find_continuation_problem,
    load_processor,
    require_bounded_template,
)
from megatron_rl.rollout.transcript_segments import extract_images, split_transcript
from megatron_rl.types import Image, Message, SpecialTokens, TokenSequence

T = TypeVar("T")
MAX_INLINE_PIXELS = 1 << 17
"""Default of `Renderer.max_inline_pixels`. Rendering an image with fewer pixels takes less than 8
ms, which is shorter than a decode step of a large model.
"""
_THREADS = 4
"""Number of rendering threads. Rendering an image of 2,000,000 pixels takes about 100 ms and
temporarily uses 100 MB of memory.
"""
_CACHED_BYTES = 1 << 30
"""Maximum size of the image cache in bytes, including the patches. An image of 2,000,000 pixels
takes 8 MB, and its patches take 48 MB.
"""
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
"""Maps each character in the vocabulary of a byte-level tokenizer to the byte that it represents.
"""
_NEVER_SAMPLED = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
"""Image and video markers, which the policy must not sample."""

GROUNDING_TOKENS = tuple(f"<|{name}_{end}|>" for name in ("object_ref", "box", "quad") for end in ("start", "end"))
"""Special tokens that mark grounding data in Qwen2-VL. They have no control function."""


def max_inline_pixels(engine: EngineSettings) -> int:
    """Return the number of pixels below which images are rendered in the event loop.

    Images with more pixels are rendered in a thread. For a colocated engine, rendering in the event
    loop keeps the order of requests the same in every run, which makes a run on a CPU bitwise
    reproducible. For inference servers, the order of requests varies, so all images are rendered in
    threads.
    """
    return 1 if engine.mode == "server" else MAX_INLINE_PIXELS


class Renderer:
    """Renders messages for one checkpoint.

    The engine and the trainer use the same `banned_ids` and `stop_ids`.
    """

    def __init__(
        self, model: ModelSettings, *, max_inline_pixels: int = MAX_INLINE_PIXELS, allow_grounding_tokens: bool = False,
        cache_bytes: int = _CACHED_BYTES,
    ) -> None:  # fmt: skip
        """Load and check the processor and the chat template.

        Args:
            model: Checkpoint path and image size limits.
            max_inline_pixels: See the function `max_inline_pixels`.
            allow_grounding_tokens: See DataSettings.
            cache_bytes: Maximum size of the image cache in bytes.
        """
        self.max_inline_pixels, self._cache_bytes = max_inline_pixels, cache_bytes
        self.min_pixels, self.max_pixels = model.min_pixels, model.max_pixels
        self._path, self.processor = model.path, load_processor(model.path)
        self.tokenizer = self.processor.tokenizer
        spec = read_spec(model.path)
        known = self._added = self.tokenizer.get_added_vocab()
        for token in (*_NEVER_SAMPLED, "<|im_end|>"):
            require(token in known, "model.path", model.path, f"its tokenizer lacks {token}; use the checkpoint's own tokenizer")
        blanked = [token for token in known if token.startswith("<|") and not (allow_grounding_tokens and token in GROUNDING_TOKENS)]
        self._template = ChatTemplate(self.processor, model.path, special_tokens=blanked)
        self.image_token_id, self.end_id = known["<|image_pad|>"], known["<|im_end|>"]
        self.stop_ids = [self.end_id]
        vocab = self.tokenizer.get_vocab()
        check_vocabulary({}, vocab_size=spec.vocab_size, num_token_ids=max(vocab.values()) + 1, where=f"model.path={model.path}")
        self._never_sampled = {known[token] for token in _NEVER_SAMPLED}
        self.banned_ids = find_banned_ids(vocab, spec, never_sampled=_NEVER_SAMPLED)
        self.special_tokens = SpecialTokens(image_token_id=self.image_token_id, banned_ids=self.banned_ids, stop_ids=self.stop_ids)
        self.max_positions, self.merge_size, self.patch_size = spec.max_positions, spec.vision.spatial_merge_size, spec.vision.patch_size
        self.vision_token_side = self.patch_size * self.merge_size
        check_model_fit(self.processor, spec, model.path)
        self._images: OrderedDict[str, Image] = OrderedDict()
        """Cached images by Image.key, least recently used first."""
        self._final_key_by_source: dict[str, str] = {}
        """Maps the digest of a source image to the key of its cached final image."""
        self._sources_by_final_key: dict[str, set[str]] = {}
        """Maps the key of a cached final image to the digests of its source images."""
        self._num_bytes = 0
        self._lock = Lock()
        """Lock that protects the image cache."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="renders")
        template = self.processor.chat_template
        assert isinstance(template, str), "load_processor sets it"
        require_bounded_template(template, model.path)
        check_template(self._template.apply, model.path)
        self.continuation_problem = find_continuation_problem(self._template.apply, model.path)
        """Reason why messages cannot be appended after a response; empty if they can."""
        check_determinism(template, model.path)
        dummy = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        self._dummy, self._dummy_text = dummy, self._template.render(dummy).removesuffix("\n")

    def require_continuation(self) -> None:
        """Raise ValueError unless the chat template allows appending messages after a response."""
        remedy = f"{self.continuation_problem}; use a chat_template.jinja that keeps every message unchanged"
        require(not self.continuation_problem, "model.path", self._path, remedy)

    async def run_in_thread(self, fn: Callable[[], T]) -> T:
        """Run `fn` in a rendering thread and return its result.

        The event loop is not blocked and continues to run the steps of a colocated engine.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, fn)

    def image(self, picture: Picture) -> Image:
        """Resize `picture`, compute its patches and return both as an Image, cached by digest."""
        digest, size = image_key(picture), self.final_size(picture.width, picture.height)
        known = self._find_cached(self._final_key_by_source.get(digest))
        if known is not None:
            return known
        plain = picture if picture.mode == "RGB" else picture.convert("RGB")  # convert would copy a large original
        resized = plain.resize(size, Resampling.BICUBIC)
        is_final = (picture.mode, picture.size) == (resized.mode, resized.size)
        image = self._process_resized(resized, key=digest if is_final else image_key(resized))
        with self._lock:
            if image.key in self._images:
                self._final_key_by_source[digest] = image.key
                self._sources_by_final_key[image.key].add(digest)
        return image

    def _process_resized(self, resized: Picture, *, key: str) -> Image:
        """Return the image and patches for `resized`, which already has its final size.

        `resized` must not be resized again, because a second call of smart_resize may change the
        size again.
        """
        known = self._find_cached(key)
        if known is not None:
            return known
        features = self.processor.image_processor(images=[resized], do_resize=False, return_tensors="pt")
        grid = tuple(features["image_grid_thw"][0].tolist())
        return self._cache_image(Image(pil=resized, patch_PC=features["pixel_values"], grid=grid, key=key, merge=self.merge_size))

    def _find_cached(self, key: str | None) -> Image | None:
        if key is None:
            return None
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def _cache_image(self, image: Image) -> Image:
        with self._lock:
            if image.key not in self._images:
                self._images[image.key], self._sources_by_final_key[image.key] = image, set()
                self._num_bytes += _image_bytes(image)
            while self._num_bytes > self._cache_bytes and len(self._images) > 1:
                key, oldest = self._images.popitem(last=False)
                self._num_bytes -= _image_bytes(oldest)
                for digest in self._sources_by_final_key.pop(key):
                    del self._final_key_by_source[digest]
            return self._images.get(image.key, image)

    def final_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the final width and height of an image of the given size.

        The final width and height are multiples of `vision_token_side`, the side of a vision token
        in pixels.
        """
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        rows, columns = smart_resize(height, width, factor=self.vision_token_side, **limits)
        return columns, rows

    @property
    def final_pixels(self) -> tuple[int, int]:
        """Minimum and maximum number of pixels of an image after the resize.

        A resize within these limits does not change an image that already has its final size. The
        limits are wider than [min_pixels, max_pixels], because smart_resize rounds side lengths to
        multiples of `vision_token_side`. smart_resize rounds up when it enlarges an image, and down
        when it reduces an image.

        The maximum is the largest of three values:

        - max_pixels.
        - (a + side)(b + side) with a * b = min_pixels, for an enlarged image.
        - side * b with a * b = max_pixels and a < side, for a reduced image.

        Here, side is `vision_token_side`, and b / a is 200, the largest aspect ratio that
        smart_resize accepts (transformers 5.19).
        """
        side, longest = self.vision_token_side, 200**0.5
        enlarged = self.min_pixels + side * (longest + 1 / longest) * self.min_pixels**0.5 + side**2
        return side**2, max(self.max_pixels, math.ceil(enlarged), math.ceil(side * longest * self.max_pixels**0.5))

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens in a text."""
        return len(self._tokenize(text))

    def describe_sequence(self, context: TokenSequence) -> str:
        """Return the decoded sequence, with each image's tokens replaced by the image size."""
        pixels = ([side * self.vision_token_side // image.merge for side in image.grid[:0:-1]] for image in context.images)
        sizes = iter(f"[{width}x{height}]" for width, height in pixels)
        words = self.tokenizer.decode(context.token_ids)
        return re.sub(r"<\|vision_start\|>(?:<\|image_pad\|>)+<\|vision_end\|>", lambda _: next(sizes), words)

    def patches(self, image: Image, load_image: Callable[[Image], Picture]) -> torch.Tensor:
        """Return the patches of an image, float32 [P, C]; recompute them if they are not cached."""
        if image.patch_PC is not None:
            return image.patch_PC
        known = self._find_cached(image.key)
        patch_PC = (known or self._process_resized(load_image(image), key=image.key)).patch_PC
        assert patch_PC is not None, "cached images have patches"
        return patch_PC

    def prompt(self, messages: Sequence[Message]) -> TokenSequence:
        """Render messages as a new sequence that ends where the assistant's response begins."""
        context = TokenSequence()
        self._append_text(context, self._template.render(messages, add_generation_prompt=True), self._process_images(messages))
        return context

    def observation(self, context: TokenSequence, messages: Sequence[Message]) -> TokenSequence:
        """Render the messages that follow a response as the continuation of `context`.

        Only these messages are tokenized. If the response was cut off by its token limit, an
        end-of-turn token is inserted first. The policy did not sample this token, so the loss mask
        excludes it.
        """
        whole = self._template.render([*self._dummy, *messages], add_generation_prompt=True)
        if not whole.startswith(self._dummy_text):
            problem = self.continuation_problem or "its chat template renders the response differently before these messages"
            raise ValueError(f"model.path={self._path}: {problem}")
        closing = "" if context.token_ids[-1] == self.end_id else "<|im_end|>"
        more = TokenSequence()
        self._append_text(more, closing + whole.removeprefix(self._dummy_text), self._process_images(messages))
        return more

    def transcript(self, messages: Sequence[Message]) -> TokenSequence:
        """Render a whole conversation for supervised learning.

        The loss mask is 1 on the tokens of each assistant message and on its end-of-turn token,
        except for messages in which `loss` is False.

        Raises:
            ValueError: `split_transcript` rejects the messages, or a reply contains tokens that
                must not be sampled.
        """
        context = TokenSequence()
        for piece in split_transcript(messages, self._template.render):
            self._append_text(context, piece.observation, self._process_images(piece.messages))
            reply = self._tokenize(piece.reply)
            banned = next((token for token in reply if token in self._never_sampled), None)
            if banned is not None:
                name = self.tokenizer.decode([banned])
                raise ValueError(f"a response contains {name}, which the policy never samples; replace it with other text")
            context.extend(reply, logprobs=[0.0] * len(reply) if piece.is_trained else None)
        return context

    def transcript_length(self, messages: Sequence[Message], sizes: Sequence[tuple[int, int]]) -> int:
        """Return the number of tokens that `transcript` would produce, without loading images.

        `sizes` contains the width and height of each image.
        """
        num_text = sum(
            len(self._tokenize(text))
            for piece in split_transcript(messages, self._template.render)
            for text in (piece.observation, piece.reply)
        )
        pixels = (width * height for width, height in itertools.starmap(self.final_size, sizes))
        return num_text - len(sizes) + sum(each // self.vision_token_side**2 for each in pixels)

    def decode_response(self, token_ids: list[int]) -> str:
        """Return the text of a response without its stop token."""
        return self.tokenizer.decode(token_ids[:-1] if token_ids and token_ids[-1] in self.stop_ids else token_ids)

    def char_to_token(self, token_ids: Sequence[int], char: int) -> int:
        """Return the index of the token that contains character `char` of the decoded `token_ids`.

        If the bytes of the character are split between two tokens, the index of the later token is
        returned.
        """
        decoder, length = codecs.getincrementaldecoder("utf-8")("replace"), 0
        for number, token in enumerate(self.tokenizer.convert_ids_to_tokens(token_ids)):
            is_added = token in self._added
            length += len(decoder.decode(token.encode() if is_added else bytes(map(_BYTES.__getitem__, token))))
            if length > char:
                return number
        return len(token_ids) - 1

    def find_special_token(self, text: str) -> str:
        """Return the first special-token name in a text from the dataset, or ''.

        In prompts, such a name is escaped by inserting a space.
        """
        return self._template.find_special_token(text)

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _process_images(self, messages: Sequence[Message]) -> list[Image]:
        return [self.image(picture) for picture in extract_images(messages)]

    def _append_text(self, context: TokenSequence, text: str, images: list[Image]) -> None:
        expanded: list[int] = []
        remaining = iter(images)
        for token in self._tokenize(text):
            repeats = next(remaining).num_tokens if token == self.image_token_id else 1
            expanded.extend([token] * repeats)
        if next(remaining, None) is not None:
            raise ValueError(f"model.path={self._path}: its chat template renders fewer images than the messages contain")
        context.extend(expanded, images=tuple(images))


def _image_bytes(image: Image) -> int:
    """Return the memory size of an image and its patches; Pillow uses 4 bytes per pixel."""
    assert image.patch_PC is not None
    return image.patch_PC.nbytes + 4 * image.num_pixels


def image_key(picture: Picture) -> str:
    """Return a digest of an image's pixels, mode and size.

    For an image at its final size, the digest equals Image.key.
    """
    content = hashlib.sha256(picture.tobytes())
    content.update(f"{picture.mode} {picture.size}".encode())
    return content.hexdigest()[:32]
