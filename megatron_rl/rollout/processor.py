"""Loads and validates a checkpoint's processor and chat template."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError
from PIL.Image import Resampling
from transformers import AutoProcessor, ProcessorMixin

from megatron_rl.config import require
from megatron_rl.models.family import IMAGE_PROCESSORS, PROCESSORS
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.rollout import template_probe
from megatron_rl.types import Message

SIZE_FORMS = ({"shortest_edge", "longest_edge"}, {"min_pixels", "max_pixels"})
"""Accepted key sets for an image processor's `size`. Each value in `size` is a total pixel count
(height x width), not a side length.
"""
RENDER_ERRORS = (TemplateError, TypeError, KeyError, AttributeError, ValueError, IndexError, RecursionError, ArithmeticError)
"""Exceptions that rendering a faulty chat template may raise."""
TEMPLATE_CPU_S, TEMPLATE_MEMORY_BYTES = 10, 1 << 30
"""Limits on CPU time (seconds) and memory (bytes) for the test rendering of a chat template."""
_PROBE_S = 300
"""Wall-time limit in seconds for the process that test-renders a chat template. The CPU-time limit
normally ends the process long before this limit, even on a busy machine.
"""
_SYSTEM, _QUESTION, _REPLY, _NEXT = "Probe\n\n  system", 'Probe:\n\n  is 1 < 2 & "x"?', "probe reply", "probe observation"
"""Test texts with everything that a chat template might alter: capitals, spaces, empty lines, and
characters that HTML and JSON escape.
"""
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VARYING = {"strftime_now": "the time of day", "lipsum": "random text", "random": "a random choice"}
"""Maps each nondeterministic function or filter in the template environments of transformers and
Jinja to a description of its output.
"""
_REMEDY = "copy chat_template.jinja from the original model"


def load_processor(path: str) -> ProcessorMixin:
    """Load the processor of a Hugging Face model folder and set its chat template.

    Raises:
        ValueError: A file is damaged or missing, or belongs to an unsupported kind of model. The
            message names model.path and the file.
    """
    folder = Path(path)
    there = (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file()
    require(there, "model.path", path, "tokenizer.json is missing; copy it from the original model")
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    except (RecursionError, TypeError, KeyError, AttributeError, ValueError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        files = _image_file(folder) or "preprocessor_config.json (which is missing)"
        remedy = f"copy tokenizer_config.json, tokenizer.json and {files} again from the original model"
        raise ValueError(f"model.path={path}: its tokenizer or processor is damaged ({reason}); {remedy}") from error
    _check_classes(processor, path, file=_image_file(folder))
    processor.chat_template = find_template(processor, path)
    return processor


def _image_file(folder: Path) -> str:
    """Return the name of the file that defines the image processor, or '' if there is none.

    If both processor_config.json and preprocessor_config.json exist, transformers reads
    processor_config.json.
    """
    return next((name for name in ("processor_config.json", "preprocessor_config.json") if (folder / name).is_file()), "")


def _check_classes(processor: ProcessorMixin, path: str, *, file: str) -> None:
    for kind, found, known in (
        ("processor_class", type(processor).__name__, PROCESSORS),
        ("image_processor_type", type(processor.image_processor).__name__, IMAGE_PROCESSORS),
    ):
        require(found in known, "model.path", path, f"{file} has {kind} {found}; supported: {', '.join(known)}")
    size = {name for name, value in dict(processor.image_processor.size).items() if value is not None}
    remedy = f"{file} has the size keys {', '.join(sorted(size))}; use shortest_edge and longest_edge, in pixels of the whole image"
    require(size in SIZE_FORMS, "model.path", path, remedy)


def find_template(processor: ProcessorMixin, path: str) -> str:
    """Return the chat template of a loaded processor.

    transformers reads chat templates from chat_template.jinja, additional_chat_templates/,
    chat_template.json, processor_config.json and tokenizer_config.json. If there are several named
    templates, the template named `default` is used.

    Raises:
        ValueError: There is no template, or there are several and none is named `default`.
    """
    for found in (processor.chat_template, processor.tokenizer.chat_template):
        if isinstance(found, str) and found.strip():
            return found
        if isinstance(found, list):
            found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        if isinstance(found, dict) and found:
            names = ", ".join(map(str, found))
            remedy = f"its chat templates are named {names}; rename the template for training to default"
            default: Any = found.get("default")
            require(isinstance(default, str), "model.path", path, remedy)
            return default
    raise ValueError(f"model.path={path}: no chat template; {_REMEDY}")


def check_model_fit(processor: ProcessorMixin, spec: ModelSpec, path: str) -> None:
    """Raise ValueError if the processor does not match the model.

    The processor must use the same patch sizes and special token ids as the model, and the same
    resampling filter as the renderer.
    """
    images, numbers = processor.image_processor, processor.tokenizer.get_added_vocab()
    for what, found, field, stated in (
        ("patch_size", images.patch_size, "vision_config.patch_size", spec.vision.patch_size),
        ("temporal_patch_size", images.temporal_patch_size, "vision_config.temporal_patch_size", spec.vision.temporal_patch_size),
        ("merge_size", images.merge_size, "vision_config.spatial_merge_size", spec.vision.spatial_merge_size),
        ("<|image_pad|>", numbers["<|image_pad|>"], "image_token_id", spec.image_token_id),
        ("<|video_pad|>", numbers["<|video_pad|>"], "video_token_id", spec.video_token_id),
        ("<|vision_start|>", numbers["<|vision_start|>"], "vision_start_token_id", spec.vision_start_id),
        ("<|vision_end|>", numbers["<|vision_end|>"], "vision_end_token_id", spec.vision_end_id),
    ):
        remedy = f"{field} in config.json is {stated}, but {what} of the processor is {found}; use the model's own processor"
        require(found == stated, "model.path", path, remedy)
    remedy = f"its processor resizes images with resample={images.resample}, but only 3 (bicubic) is supported; set resample to 3"
    require(images.resample in (None, Resampling.BICUBIC), "model.path", path, remedy)


def check_determinism(template: str, path: str) -> None:
    """Raise ValueError if a chat template is nondeterministic.

    A template is nondeterministic if it uses a name from `_VARYING`, such as `strftime_now`.
    """
    names = {value for _, kind, value in Environment().lex(template) if kind == "name"}
    for name, what in _VARYING.items():
        remedy = (
            f"its chat template uses {name}, {what}: prompts would differ between processes, and after a resume; replace it with fixed text"
        )
        require(name not in names, "model.path", path, remedy)


@cache
def require_bounded_template(template: str, path: str) -> None:
    """Raise ValueError if a chat template takes too much time or memory.

    The template is rendered for a short conversation in a separate process.
    """
    parts = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
    begun = [
        _make_message("system", _SYSTEM),
        {"role": "user", "content": parts},
        _make_message("assistant", _REPLY),
        _make_message("user", _NEXT),
    ]
    given = {"template": template, "seconds": TEMPLATE_CPU_S, "num_bytes": TEMPLATE_MEMORY_BYTES, "conversations": [begun[:2], begun]}
    command = [sys.executable, "-P", template_probe.__file__]
    ended = subprocess.run(command, input=json.dumps(given), text=True, capture_output=True, timeout=_PROBE_S, check=False)
    remedy = f"its chat template takes more than {TEMPLATE_CPU_S} s or {TEMPLATE_MEMORY_BYTES >> 20} MB for a short conversation; {_REMEDY}"
    require(ended.returncode == 0, "model.path", path, remedy)


def check_template(render: Callable[[Sequence[Message], bool], str], path: str) -> None:
    """Raise ValueError unless the chat template preserves all parts of a test prompt.

    The test prompt has a system message, and a user message with text and two images. With
    add_generation_prompt=True, the template must also append the header that begins the response.

    Args:
        render: Renders messages as text; its second argument is `add_generation_prompt`.
        path: Value of model.path, for the error message.
    """
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": _QUESTION}]
    asked = [_make_message("system", _SYSTEM), {"role": "user", "content": parts}]
    prompt = _render_checked(render, asked, path, add_generation_prompt=True)
    begin, problem = _render_checked(render, asked, path, add_generation_prompt=False), ""
    if _SYSTEM not in prompt:
        problem = "omits the system message"
    elif _QUESTION not in prompt:
        problem = "omits the user's text"
    elif prompt.count(_IMAGE) != 2:
        problem = f"renders two images as {prompt.count(_IMAGE)} occurrences of {_IMAGE}"
    elif prompt == begin:
        problem = "does not begin the response (add_generation_prompt)"
    require(not problem, "model.path", path, f"its chat template {problem}; {_REMEDY}")


def find_continuation_problem(render: Callable[[Sequence[Message], bool], str], path: str) -> str:
    """Return the reason why messages cannot be appended after a response; '' if they can.

    Multi-turn episodes and transcripts append newly rendered messages to the existing sequence. If
    the template rewrites or drops earlier messages, or thoughts in earlier messages, the policy
    would be trained on sequences that never occur at inference.
    """
    for reply, what in ((_REPLY, "earlier messages"), (f"<think>\n{_SYSTEM}\n</think>\n\n{_REPLY}", "thoughts of earlier turns")):
        begun = [_make_message("user", _QUESTION), _make_message("assistant", reply)]
        before = _render_checked(render, begun[:1], path, add_generation_prompt=True)
        after = _render_checked(render, begun, path, add_generation_prompt=False).removesuffix("\n")
        whole = _render_checked(render, [*begun, _make_message("user", _NEXT)], path, add_generation_prompt=True)
        if not whole.startswith(after) or reply not in whole:
            return f"its chat template rewrites or omits {what}"
        if reply == _REPLY and after != f"{before}{reply}<|im_end|>":
            return (
                f"its chat template renders {after.removeprefix(before)[:80]!r} for the response {reply!r}, "
                "not the response followed by <|im_end|>"
            )
    return ""


def _make_message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _render_checked(
    render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], path: str, *, add_generation_prompt: bool
) -> str:
    try:
        return render(messages, add_generation_prompt)
    except RENDER_ERRORS as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"model.path={path}: its chat template cannot be rendered ({reason}); {_REMEDY}") from error


def find_banned_ids(vocab: dict[str, int], spec: ModelSpec, *, never_sampled: Sequence[str]) -> list[int]:
    """Return the token ids that no engine may sample.

    The banned ids are the image and video markers, and all ids of the model's vocabulary to which
    the tokenizer assigns no token.
    """
    return sorted({*(vocab[token] for token in never_sampled), *(set(range(spec.vocab_size)) - set(vocab.values()))})
