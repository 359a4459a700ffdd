"""Small tokenizers with the special tokens, normalizers and chat templates of the model families
used as judges.

They split text into bytes. Special tokens are spelled as in the family's released tokenizer.
Families without special tokens for roles (Vicuna, Alpaca) get the role strings of their template as
special tokens, so that these strings are detected as well.
"""

import functools
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPACE = normalizers.Replace(" ", "\u2581")
_BERT = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=False, strip_accents=True, lowercase=True)


@dataclass(slots=True, frozen=True)
class ChatFamily:
    prefix: str
    """Text before the first message."""
    system: tuple[str, str]
    user: tuple[str, str]
    """Text before and after a message."""
    generation_prompt: str
    """Text after all messages, which begins the judge's turn."""
    unused_specials: tuple[str, ...] = ()
    """Special tokens that the template does not use: images, tools, fillers."""
    used_specials: tuple[str, ...] = ()
    """Special tokens that the template uses."""
    normalizer: normalizers.Normalizer | None = None
    match_normalized: bool = False
    """If True, special tokens are matched in the normalized text."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*self.used_specials, *self.unused_specials)


def _chatml(*others: str) -> ChatFamily:
    system, user = ("<|im_start|>system\n", "<|im_end|>\n"), ("<|im_start|>user\n", "<|im_end|>\n")
    return ChatFamily("", system, user, "<|im_start|>assistant\n", others, ("<|im_start|>", "<|im_end|>"))


def _header(role: str, names: tuple[str, str]) -> str:
    return f"{names[0]}{role}{names[1]}\n\n"


def _llama(begin: str, names: tuple[str, str], end: str, *others: str) -> ChatFamily:
    system, user = (_header("system", names), end), (_header("user", names), end)
    return ChatFamily(begin, system, user, _header("assistant", names), others, (begin, *names, end))


_BARS = tuple(f"<\uff5c{name}\uff5c>" for name in ("begin\u2581of\u2581sentence", "User", "Assistant", "end\u2581of\u2581sentence"))
_INST = ("[INST]", "[/INST]")
FAMILIES = {
    "qwen": _chatml(
        "<|endoftext|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|object_ref_start|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|fim_prefix|>",
    ),
    "chatml": _chatml("<|im_sep|>", "<s>", "</s>", "<unk>", "<image>", "[UNUSED_TOKEN_145]", "<|action_start|>", "<|plugin|>"),
    "llama2": ChatFamily(
        "<s>",
        ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n"),
        ("", " [/INST]"),
        "",
        ("</s>", "<unk>", "<pad>", "<image>"),
        ("<s>", *_INST, "<<SYS>>", "<</SYS>>"),
        _SPACE,
    ),
    "llama3": _llama(
        "<|begin_of_text|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|python_tag|>",
        "<|image|>",
        "<|reserved_special_token_0|>",
        "<|finetune_right_pad_id|>",
    ),
    "llama4": _llama(
        "<|begin_of_text|>",
        ("<|header_start|>", "<|header_end|>"),
        "<|eot|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|patch|>",
        "<|tile_x_separator|>",
        "<|python_start|>",
        "<|eom|>",
    ),
    "gemma": ChatFamily(
        "<bos>",
        ("<start_of_turn>user\n", "\n\n"),
        ("", "<end_of_turn>\n"),
        "<start_of_turn>model\n",
        ("<eos>", "<pad>", "<unused0>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "[multimodal]", "<mask>"),
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        _SPACE,
    ),
    "mistral": ChatFamily(
        "<s>",
        ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        ("[INST]", "[/INST]"),
        "",
        ("</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[THINK]"),
        ("<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", *_INST),
    ),
    "deepseek": ChatFamily(
        _BARS[0],
        ("", ""),
        (_BARS[1], ""),
        _BARS[2],
        (_BARS[3], "<think>", "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<image>"),
        _BARS[:3],
    ),
    "phi": ChatFamily(
        "",
        ("<|system|>\n", "<|end|>\n"),
        ("<|user|>\n", "<|end|>\n"),
        "<|assistant|>\n",
        ("<|endoftext|>", "<|image_1|>", "<|tool|>"),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "harmony": ChatFamily(
        "",
        ("<|start|>system<|message|>", "<|end|>"),
        ("<|start|>user<|message|>", "<|end|>"),
        "<|start|>assistant",
        ("<|channel|>", "<|return|>", "<|call|>", "<|constrain|>", "<|startoftext|>"),
        ("<|start|>", "<|message|>", "<|end|>"),
    ),
    "exaone": ChatFamily(
        "",
        ("[|system|]", "[|endofturn|]\n"),
        ("[|user|]", "\n"),
        "[|assistant|]",
        ("[BOS]",),
        ("[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"),
    ),
    "minimax": ChatFamily(
        "]~!b[",
        ("]~b]system\n", "[e~[\n"),
        ("]~b]user\n", "[e~[\n"),
        "]~b]ai\n",
        ("]!p~[", "]<]image[>[", "<think>"),
        ("]~!b[", "]~b]", "[e~["),
    ),
    "glm": ChatFamily(
        "[gMASK]<sop>",
        ("<|system|>\n", ""),
        ("<|user|>\n", ""),
        "<|assistant|>",
        ("<|observation|>", "<|begin_of_image|>", "<eop>"),
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    ),
    "falcon": ChatFamily(
        "",
        ("System: ", "\n"),
        ("User: ", "\n"),
        "Falcon:",
        (">>ANSWER<<", ">>QUESTION<<", "<|endoftext|>", "|ENDOFTEXT|", "|SPEAKER|"),
        ("System:", "User:", "Falcon:"),
    ),
    "vicuna": ChatFamily("<s>", ("", " "), ("USER: ", " "), "ASSISTANT:", ("</s>", "<image>"), ("<s>", "USER:", "ASSISTANT:")),
    "alpaca": ChatFamily(
        "",
        ("### Instruction:\n", "\n\n"),
        ("### Input:\n", "\n\n"),
        "### Response:\n",
        ("</s>", "Question:", "Answer:"),
        ("### Instruction:", "### Input:", "### Response:"),
    ),
    "nfkc": ChatFamily(
        "",
        ("<|im_start|>system\n", "<|im_end|>\n"),
        ("USER: ", " "),
        "[/INST]",
        ("<s>", "|ENDOFTEXT|", "]~b]"),
        ("<|im_start|>", "<|im_end|>", "USER:", "[/INST]"),
        normalizers.NFKC(),
        True,
    ),
    "bert": ChatFamily(
        "[cls]",
        ("", "[sep]"),
        ("user:", "[sep]"),
        "assistant:",
        ("[mask]", "<|im_end|>", "</s>"),
        ("[cls]", "[sep]", "user:", "assistant:"),
        normalizers.Sequence([normalizers.NFKC(), _BERT]),
        True,
    ),
}
"""Chat families by name. The last two belong to no real model; they are the worst case of what a
tokenizer can do to text before it looks for special tokens.
"""


@functools.cache
def build_tokenizer(name: str) -> PreTrainedTokenizerFast:
    family, alphabet = FAMILIES[name], sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if family.normalizer is not None:
        plain.normalizer = family.normalizer
    plain.add_special_tokens(
        [AddedToken(word, normalized=family.match_normalized, special=True) for word in dict.fromkeys(family.special_tokens)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
    tokenizer.chat_template = (
        f"{{{{ {family.prefix!r} }}}}{{% for message in messages %}}"
        f"{{% if message['role'] == 'system' %}}{{{{ {family.system[0]!r} + message['content'] + {family.system[1]!r} }}}}"
        f"{{% else %}}{{{{ {family.user[0]!r} + message['content'] + {family.user[1]!r} }}}}{{% endif %}}{{% endfor %}}"
        f"{{{{ {family.generation_prompt!r} }}}}"
    )
    return tokenizer


def find_special_tokens(name: str, system: str, user: str) -> list[str]:
    """Return the special tokens of a complete prompt in order."""
    tokenizer = build_tokenizer(name)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    special = tokenizer.added_tokens_decoder
    return tokenizer.convert_ids_to_tokens([each for each in ids if each in special])
