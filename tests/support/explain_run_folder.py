"""Creates a run directory as a run leaves it, with random sampled tokens.

The logprobs come from Hugging Face's model and are computed here, independently of
megatron_rl/explain. A mistake is planted in the engine's behavior or in the recorded files.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import AutoModelForImageTextToText, PreTrainedModel

from megatron_rl.config import AlgoSettings, EngineSettings, ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.observe import recorder, rollout_store
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image, Rollout, TokenSequence, Turn
from tests.support.engine_logprob_oracle import policy_logits
from tests.support.packed_example import make_picture, user_message

TEMPERATURE = 0.9
STEP = 0
REPLY_LENGTH = 12
STALE_TENSOR = "model.layers.2.mlp.down_proj.weight"


@dataclass(slots=True, frozen=True)
class EngineBehavior:
    """Describes how an engine has computed its logprobs."""

    temperature: float = TEMPERATURE
    transform_images: Callable[[list[Image]], list[Image]] = list
    """Returns the images that the engine used in place of the sequence's images."""


def make_rollouts(renderer: Renderer) -> list[Rollout]:
    """Return two rollouts: one with an image, a response, another image of the same size and a
    response, and one with one image and one response.
    """
    generator = np.random.default_rng(0)
    allowed = [token for token in range(256) if token not in renderer.banned_ids]
    made = []
    for group, shown in enumerate(([make_picture(1, 112, 56), make_picture(2, 112, 56)], [make_picture(3, 56, 140)])):
        rollout = Rollout("handmade", f"train/{group}", group, 0, reward=float(group))
        context = renderer.prompt([user_message("Look.", shown[0])])
        for number in range(len(shown)):
            if number:
                more = renderer.observation(context, [user_message("And now?", shown[number])])
                context.extend(more.token_ids, images=tuple(more.images))
            first = len(context.token_ids)
            context.extend(generator.choice(allowed, REPLY_LENGTH).tolist(), logprobs=[-1.0] * REPLY_LENGTH)
            rollout.turns.append(Turn(0, (first, first + REPLY_LENGTH), text="..."))
        rollout.sequences.append(context)
        made.append(rollout)
    return made


def set_engine_logprobs(model: PreTrainedModel, renderer: Renderer, context: TokenSequence, behavior: EngineBehavior) -> None:
    """Set the rollout logprobs of a sequence to those of an engine with this behavior."""
    logits = policy_logits(model, context.token_ids, behavior.transform_images(context.images), renderer=renderer) / behavior.temperature
    logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(context.token_ids[1:])[:, None])[:, 0]
    pairs = zip([0.0, *logprobs.tolist()], context.loss_mask, strict=True)
    context.rollout_logprobs = [logprob if sampled else 0.0 for logprob, sampled in pairs]


def make_settings(model: Path, run: Path, *, dtype: str) -> Settings:
    return Settings(
        model=ModelSettings(path=str(model), dtype=dtype), engine=EngineSettings(dtype=dtype), algo=AlgoSettings(temperature=TEMPERATURE),
        task=TaskSettings(name="number_line"), run=RunSettings(dir=str(run), steps=3),
    )  # fmt: skip


def write_run(
    run: Path, model: Path, *, behavior: EngineBehavior = EngineBehavior(), change_model: Callable[[PreTrainedModel],
    None] = lambda model: None,
    corrupt_rollouts: Callable[[list[Rollout]], None] = lambda rollouts: None, as_lines: bool = False, dtype: str = "float32",
) -> Path:  # fmt: skip
    """Write a run directory whose step 0 was sampled by `model`.

    `change_model` modifies the engine's model, which computes in `dtype`; `corrupt_rollouts`
    modifies the recorded rollouts.
    """
    renderer = Renderer(ModelSettings(path=str(model)))
    hf = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).eval()
    change_model(hf)
    rollouts = make_rollouts(renderer)
    for rollout in rollouts:
        set_engine_logprobs(hf, renderer, rollout.sequences[0], behavior)
    corrupt_rollouts(rollouts)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(asdict(make_settings(model, run, dtype=dtype))))
    if as_lines:
        chosen = {"best": rollouts[:1], "worst": rollouts[1:]}
        recorder.write_rollouts(run / recorder.ROLLOUTS_FOLDER / f"step_{STEP:06d}.jsonl", chosen, step=STEP, step_rollouts=rollouts)
    else:
        recorder.save_images(run / recorder.ROLLOUTS_FOLDER, rollouts)
        rollout_store.write_step(rollout_store.step_path(run / recorder.ROLLOUTS_FOLDER, STEP), rollouts, step=STEP, num_gen_batches=1)
    return run


def resize_twice(image: Image, renderer: Renderer, size: tuple[int, int]) -> Image:
    """Return the image after a resize to another size and back, with the patches of the result."""
    again = image.pil.resize(size, 3).resize(image.pil.size, 3)
    patches = renderer.processor.image_processor(images=[again], do_resize=False, return_tensors="pt")["pixel_values"]
    return replace(image, pil=again, patch_PC=patches)


def reverse_images(images: Sequence[Image]) -> list[Image]:
    return list(reversed(images))


def nested_name(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


def read_stale_tensor(older: Path) -> torch.Tensor:
    return dict(AutoModelForImageTextToText.from_pretrained(older, dtype=torch.float32).named_parameters())[
        nested_name(STALE_TENSOR)
    ].detach()


def set_rope_sections(*sections: int) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        model.model.language_model.rotary_emb.mrope_section = list(sections)

    return change


def engine_mistakes(renderer: Renderer, older: Path) -> dict[str, dict]:
    """Return the planted engine mistakes, keyed by the finding that explain must report in
    float32.
    """
    tensor = read_stale_tensor(older)

    def stale(model: PreTrainedModel) -> None:
        with torch.no_grad():
            dict(model.named_parameters())[nested_name(STALE_TENSOR)].copy_(tensor)

    def resize_last(images: list[Image]) -> list[Image]:
        width, height = images[-1].pil.size
        return [*images[:-1], resize_twice(images[-1], renderer, (width // 2, height // 2))]

    return {
        "temperature 0.7, not 0.9": {"behavior": EngineBehavior(temperature=0.7)},
        "replaced by image 1": {"behavior": EngineBehavior(transform_images=reverse_images)},
        "resized again, to 56x28 and back": {"behavior": EngineBehavior(transform_images=resize_last)},
        "rope sections [6, 4, 6], not": {"change_model": set_rope_sections(6, 4, 6)},
        f"{STALE_TENSOR} is stale": {"change_model": stale},
    }
