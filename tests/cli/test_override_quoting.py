"""Error messages that suggest a quoted value can be pasted: shlex, Hydra's parser and OmegaConf
turn the suggestion into the intended value, for any character that a path may contain.
"""

import os
import random
import re
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from megatron_rl.cli.config_errors import malformed_override_line
from megatron_rl.cli.override_quoting import quote_override, setting_type, split_top_level
from megatron_rl.launcher.compose import compose_settings

LETTERS = "ab/.-_ \u00e4\u00df\u4f60\U0001f600~!#&;<>^`'\"\\()[]{}=:$%*@?|+0e1"
TEXTS = [
    "/data/b\u00e4r/train.jsonl", "/my data/train (1).jsonl", "a=b.jsonl", "it's.jsonl",
    'say "hi".jsonl', "a&b;c.jsonl", "#1!.jsonl", "C:\\d\u00e4ta\\x",
    "x^2`.jsonl", "[draft] \u00fc.jsonl", "{v\u00e4}.jsonl", "(\u00e4", "\u00e4]", "ends in \u00e4\\", "1e3\u00e4",
    "\u4f60\u597d/\u8bad\u7ec3.jsonl", "a'\u00e4'b", "\U0001f600.jsonl",
]  # fmt: skip
NONE = {"model.path": "m", "run.dir": "r", "task": "vqa"}


def pasted(word: str) -> object:
    """Return the value that a shell and Hydra parse from a suggestion."""
    (read,) = shlex.split(word)
    override = OverridesParser.create().parse_override(read)
    return OmegaConf.to_container(OmegaConf.create({"x": override.value()}), resolve=True)["x"]


def remedy_of(word: str) -> str | None:
    """Return the suggestion in the error for an argument that Hydra cannot parse, or None if Hydra
    can parse it.
    """
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        line = malformed_override_line(word, [word])
        found = re.search(r"(?:for the shell|shell quotes|write): (.*)$", line, re.DOTALL)
        assert found, line
        return found[1]
    return None


@pytest.mark.parametrize("text", TEXTS)
def test_a_remedy_for_a_list_gives_the_list(text: str) -> None:
    remedy = remedy_of(f"task.data.train=[{text}]")
    assert remedy is not None and pasted(remedy) == [text]
    remedy = remedy_of(f"task.data.train=[plain.jsonl, {text} ,also.jsonl]")
    assert remedy is not None and pasted(remedy) == ["plain.jsonl", text, "also.jsonl"]


@pytest.mark.parametrize("text", [text for text in TEXTS if not text.startswith(("[", "{", "("))])
def test_a_remedy_for_one_text_gives_the_text(text: str) -> None:
    remedy = remedy_of(f"model.path={text}")
    assert remedy is not None and pasted(remedy) == text
    remedy = remedy_of(f"task.data.train={text}")
    assert remedy is not None and pasted(remedy) == [text], "a list of one, for a setting that is a list"


def test_hundreds_of_texts_at_random() -> None:
    """Pasting the suggestion for a random list of two texts returns the list. Texts exclude commas,
    which separate entries, and quotes around a whole entry, which Hydra removes.
    """
    draw, seen = random.Random(0), 0
    for _ in range(600):
        text = "".join(draw.choices(LETTERS, k=draw.randint(1, 12))).strip()
        if not text or text[0] in "'\"" or text.startswith("~/"):
            continue
        remedy = remedy_of(f"task.data.train=[{text}, b.jsonl]")
        if remedy is None:
            continue
        assert pasted(remedy) == [text, "b.jsonl"], text
        seen += 1
    assert seen > 200


def test_home_is_where_the_shell_would_have_it() -> None:
    """A path that starts with ~ is expanded to the home directory, as the shell would do."""
    remedy = remedy_of("task.data.train=[~/train.jsonl]")
    assert remedy is not None and pasted(remedy) == [os.path.expanduser("~/train.jsonl")]


def test_what_stood_in_quotes_stays_whole() -> None:
    """List entries in quotes or braces are not split at their commas."""
    for typed, meant in (
        ('["a,b",\u00e4]', ["a,b", "\u00e4"]), ("['a, b' , \u00e4]", ["a, b", "\u00e4"]),
        ('"[/\u00e4/q.jsonl,b]"', ["/\u00e4/q.jsonl", "b"]),
        ("[a{1,2}.jsonl,\u00e4]", ["a{1,2}.jsonl", "\u00e4"]), ('["a \\" b",\u00e4]', ['a " b', "\u00e4"]),
    ):  # fmt: skip
        assert pasted(quote_override("task.data.train", typed)) == meant, typed


def test_mappings_and_services() -> None:
    """Suggestions for mappings, which may contain lists, return the intended mapping."""
    remedy = remedy_of("services.judge={kind: vllm, model: /b\u00e4r/7b, args: [--max-model-len, 32768, ~]}")
    assert remedy is not None
    assert pasted(remedy) == {"kind": "vllm", "model": "/b\u00e4r/7b", "args": ["--max-model-len", 32768, "~"]}
    remedy = remedy_of("+task.options.labels={a: gr\u00f6\u00dfe, b: [\u00e4, c]}")
    assert remedy is not None and pasted(remedy) == {"a": "gr\u00f6\u00dfe", "b": ["\u00e4", "c"]}


def test_a_number_is_not_quoted() -> None:
    assert malformed_override_line("optim.lr=1e-5\u00b0") == "optim.lr=1e-5\u00b0: expects a number"
    assert malformed_override_line("checkpoint.background=j\u00e4") == "checkpoint.background=j\u00e4: expects true or false"


def test_a_word_that_the_shell_has_cut_is_put_together() -> None:
    """A list or path that the shell split at spaces is joined again in the suggestion."""
    words = ["run.steps=3", "task.data.train=[a", "\u00e4.jsonl,", "b]", "run.seed=1"]
    assert malformed_override_line(words[1], words).endswith("""into shell quotes: 'task.data.train=["a \u00e4.jsonl",b]'""")
    assert malformed_override_line("folder", ["model.path=my", "folder"]).endswith(
        ": 'model.path=my folder', if it belongs to the argument before it"
    )


def test_a_whole_command_line_takes_it() -> None:
    """A complete command line with the suggested override composes to the intended setting."""
    given = [f"{key}={value}" for key, value in NONE.items()]
    (word,) = shlex.split(quote_override("task.data.train", "[/b\u00e4r/q.jsonl, a'\u00e4.jsonl]"))
    assert compose_settings([*given, word]).task.data.train == ["/b\u00e4r/q.jsonl", "a'\u00e4.jsonl"]


def test_kinds_and_parts() -> None:
    """setting_type returns the type of a setting or None, and split_top_level splits only at commas
    outside quotes and brackets.
    """
    assert setting_type("task.data.train") == list[str] and setting_type("optim.lr") is float and setting_type("optim.lrr") is None
    assert setting_type("optim.lr_by_module.vision") is float
    assert split_top_level("a, 'b, c' ,d[1,2]") == ["a", "'b, c'", "d[1,2]"] and split_top_level("a[,b") == ["a[", "b"]
