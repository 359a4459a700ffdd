"""Trains a nano speaker for the Lewis game within seconds. It learns with Hugging Face and torch
alone to name a random color for any image, with the required tags.

Its responses vary between samples, so that a listener's rewards vary as well. This project's
trainer and engine are not involved.
"""

import random
from pathlib import Path

import torch
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from megatron_rl.tasks.lewis.description import PROMPT
from megatron_rl_tools.data.make_lewis import main as make_rounds
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.model_server_process import encode_png, make_noise_image

COLORS = ("red", "blue", "green", "pink")
STEPS, BATCH_SIZE = 60, 8


def write_lewis_data(output_dir: Path) -> None:
    """Write pictures/ (two categories of four objects in three views each, as noise images that are
    never resized), rounds/ built from them, and rounds/words.txt.
    """
    for number in range(24):
        folder = output_dir / "pictures" / f"kind{number // 12}" / f"thing{number // 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number % 3}.png").write_bytes(encode_png(make_noise_image(number)))
    words = ["--pictures", str(output_dir / "pictures"), "--out", str(output_dir / "rounds"), "--queries", "2", "--train-share", "0.5"]
    assert make_rounds(words) == 0


def make_reply(color: str, category: str) -> str:
    return f"<thinking>{color}</thinking><coarse>a photo of a {color} {category}</coarse><detailed>The {category} is {color}.</detailed>"


def train_speaker(out: Path, *, vocabulary_file: Path) -> Path:
    """Train the speaker and return its folder."""
    make_checkpoint(out.with_name("untaught"), preset="nano", init="learn", seed=0, words=vocabulary_file)
    processor = AutoProcessor.from_pretrained(out.with_name("untaught"))
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(out.with_name("untaught"), dtype=torch.float32)
    dice, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        kinds = [f"kind{dice.randrange(2)}" for _ in range(BATCH_SIZE)]
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT.format(category=kind)}]} for kind in kinds]
        prompts = [processor.apply_chat_template([each], tokenize=False, add_generation_prompt=True) for each in asked]
        texts = [prompt + make_reply(dice.choice(COLORS), kind) + "<|im_end|>" for prompt, kind in zip(prompts, kinds, strict=True)]
        pictures = [make_noise_image(dice.randrange(24)) for _ in kinds]
        batch = processor(text=texts, images=pictures, do_resize=False, padding=True, padding_side="left", return_tensors="pt")
        labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
        for row, prompt in enumerate(prompts):
            num_reply = len(processor.tokenizer(texts[row][len(prompt) :])["input_ids"])
            labels[row, : labels.shape[1] - num_reply] = -100
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)
    processor.save_pretrained(out)
    return out
