"""Compares a tokenizer's token ids with those of a model or of another tokenizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from megatron_rl.io.jsonl import read_json

MAX_TOKENIZER_BYTES = 256 << 20


def count_token_ids(folder: Path) -> int:
    """Return one plus the largest token id in the tokenizer files of a Hugging Face folder.

    Returns 0 if the folder has no tokenizer. Raises ValueError if a tokenizer file is damaged.
    """
    largest = -1
    for name, read in _READERS.items():
        path = folder / name
        if not path.is_file() or (name == "vocab.json" and (folder / "tokenizer.json").is_file()):
            continue
        try:
            ids = list(read(read_json(path, at_most=MAX_TOKENIZER_BYTES)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: is damaged ({' '.join(str(error).split())[:200]}); copy it again") from error
        largest = max(largest, *ids, -1)
    return largest + 1


def check_same_tokens(folder: Path, other: Path, *, key: str) -> None:
    """Raise ValueError unless the tokenizers of two Hugging Face folders have the same ids.

    `key` is the setting that contains `folder`, used in the error message.
    """
    vocabularies = []
    for each in (folder, other):
        try:
            vocabularies.append(AutoTokenizer.from_pretrained(each, local_files_only=True, trust_remote_code=False).get_vocab())
        except (OSError, ValueError) as error:
            raise ValueError(f"{key}={folder}: {each} has no readable tokenizer ({' '.join(str(error).split())[:200]})") from error
    given, wanted = vocabularies
    different = [token for token in {**wanted, **given} if given.get(token) != wanted.get(token)]
    if different:
        first = min(different)
        raise ValueError(
            f"{key}={folder}: its tokenizer differs from that of {other} in {len(different)} tokens; {first!r} has the id "
            f"{given.get(first)} instead of {wanted.get(first)}; use a model with the same tokenizer"
        )


def _tokenizer_ids(stored: Mapping[str, Any]) -> Iterator[int]:
    vocab = stored["model"]["vocab"]
    yield from vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    yield from (token["id"] for token in stored.get("added_tokens") or [])


def _added_token_ids(stored: Mapping[str, Any]) -> Iterable[int]:
    return map(int, stored.get("added_tokens_decoder") or {})


_READERS: dict[str, Callable[[Any], Iterable[int]]] = {
    "tokenizer.json": _tokenizer_ids, "vocab.json": lambda stored: stored.values(), "added_tokens.json": lambda stored: stored.values(),
    "tokenizer_config.json": _added_token_ids,
}  # fmt: skip
"""Functions that return the token ids in a tokenizer file, keyed by file name."""


def check_vocabulary(num_rows_by_name: Mapping[str, int], *, vocab_size: int, num_token_ids: int, where: str) -> None:
    """Raise ValueError unless num_token_ids <= vocab_size <= number of stored rows.

    Token ids from vocab_size on are rejected even if the embeddings have rows for them, because
    rows beyond config.vocab_size are cut off as padding.

    Args:
        num_rows_by_name: Stored number of rows of the embeddings and of the output layer, by name;
            empty if the numbers are unknown.
        vocab_size: Vocabulary size in config.json.
        num_token_ids: Largest token id of the tokenizer plus one.
        where: Start of the error message, which names the setting and the folder.
    """
    least = min(num_rows_by_name.values(), default=vocab_size)
    if num_token_ids <= vocab_size <= least:
        return
    told = "".join(f", {name} has {count} rows" for name, count in num_rows_by_name.items())
    if num_token_ids > least:
        remedy = f"use this model's tokenizer, or resize its embeddings (transformers: model.resize_token_embeddings({num_token_ids}))"
    else:
        remedy = f"set vocab_size to {least} in config.json"
    raise ValueError(f"{where}: the tokenizer has ids up to {num_token_ids - 1}, config.json has vocab_size={vocab_size}{told}; {remedy}")
