"""Consistency of token ids, embedding rows and vocab_size, against cases by hand and the tokenizer
that transformers loads."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_rl.models.vocabulary import check_vocabulary, count_token_ids

TABLES = {"model.embed_tokens.weight": 1060, "lm_head.weight": 1060}


def test_the_largest_id_is_that_of_the_loaded_tokenizer(random_model: Path, tmp_path: Path) -> None:
    """The number of token ids equals the largest id of transformers' tokenizer plus one, with added
    tokens too."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(random_model / name, tmp_path)
    assert count_token_ids(tmp_path) == max(AutoTokenizer.from_pretrained(tmp_path).get_vocab().values()) + 1
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    added = {"content": "<new>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    stored["added_tokens"].append({"id": count_token_ids(tmp_path), **added})
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    assert count_token_ids(tmp_path) == max(AutoTokenizer.from_pretrained(tmp_path).get_vocab().values()) + 1


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 0),
        ({"vocab.json": {"a": 0, "b": 7}}, 8),
        ({"vocab.json": {"a": 0}, "added_tokens.json": {"<x>": 11}}, 12),
        ({"tokenizer.json": {"model": {"vocab": {"a": 3}}, "added_tokens": []}, "vocab.json": {"a": 50}}, 4),
        ({"tokenizer.json": {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}}, 2),
        ({"tokenizer.json": {"model": {"vocab": {}}}, "tokenizer_config.json": {"added_tokens_decoder": {"20": {}}}}, 21),
    ],
)
def test_ids_are_counted_in_every_file_that_numbers_tokens(files: dict, count: int, tmp_path: Path) -> None:
    """Token ids are counted from every tokenizer file; tokenizer.json takes precedence over
    vocab.json."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert count_token_ids(tmp_path) == count


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    """A damaged tokenizer file is rejected with its path."""
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(ValueError, match=rf"^{tmp_path}/tokenizer.json: is damaged .*; copy it again$"):
        count_token_ids(tmp_path)


@pytest.mark.known_failure("vocabulary-resized")
@pytest.mark.parametrize(
    ("rows", "vocab_size", "num_token_ids", "remedy"),
    [
        (TABLES, 1024, 1060, "set vocab_size to 1060 in config.json"),
        (TABLES, 1024, 1025, "set vocab_size to 1060 in config.json"),
        (TABLES, 1024, 1024, ""),
        (TABLES, 1060, 1060, ""),
        (TABLES, 1060, 1061, r"resize_token_embeddings\(1061\)"),
        ({**TABLES, "lm_head.weight": 1024}, 1060, 1060, r"resize_token_embeddings\(1060\)"),
        ({**TABLES, "lm_head.weight": 1024}, 1060, 1000, "set vocab_size to 1024"),
        ({}, 1024, 1025, r"resize_token_embeddings\(1025\)"),
        ({}, 1024, 0, ""),
    ],
)
def test_every_token_has_a_row_that_is_kept(rows: dict[str, int], vocab_size: int, num_token_ids: int, remedy: str) -> None:
    """A vocab_size below the number of token ids, or above the rows of a table, is rejected.

    The suggested fix is another vocab_size if the tables have enough rows, and otherwise resizing
    the embeddings.
    """
    numbers = {"num_rows_by_name": rows, "vocab_size": vocab_size, "num_token_ids": num_token_ids, "where": "model.path=m"}
    if not remedy:
        check_vocabulary(**numbers)
        return
    told = "".join(f", {name} has {count} rows" for name, count in rows.items())
    said = f"^model.path=m: the tokenizer has ids up to {num_token_ids - 1}, config.json has vocab_size={vocab_size}{told}; .*{remedy}"
    with pytest.raises(ValueError, match=said):
        check_vocabulary(**numbers)
