"""Draws docstring sentences of this project and of other packages for a blind reader.

    python benchmarks/prose_sample.py --out sample.txt --key key.txt megatron_rl:150 .venv/lib/python3.11/site-packages/vllm:75

A reader marks the sentences that are odd or unclear without knowing where they come from. The key
names the folder of each sentence. The share of marked sentences per folder shows how this project's
prose compares with that of the other packages.
"""

import argparse
import ast
import inspect
import random
import re
from pathlib import Path

MIN_WORDS = 4
_SENTENCE_END = re.compile(r"(?<=[.:!?])\s+(?=[A-Z`])")
_INDENTED = re.compile(r"\n    .*")
"""Matches lines of argument lists and examples, which are left out."""


def read_sentences(source: str) -> list[tuple[str, str]]:
    """Return (name, sentence) for each docstring sentence with at least MIN_WORDS words."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = " ".join(_INDENTED.sub("", ast.get_docstring(node) or "").split())
            name = "(module)" if isinstance(node, ast.Module) else node.name
            found += [(name, sentence) for sentence in _SENTENCE_END.split(text) if len(sentence.split()) >= MIN_WORDS]
    return found


def draw_sample(sizes: dict[Path, int], *, seed: int) -> list[tuple[Path, str, str]]:
    """Return `sizes[folder]` random (folder, name, sentence) of each folder, in random order."""
    rng, drawn = random.Random(seed), []
    for folder, size in sizes.items():
        sentences = {each for file in sorted(folder.rglob("*.py")) for each in read_sentences(file.read_text())}
        drawn += [(folder, *each) for each in rng.sample(sorted(sentences), size)]
    rng.shuffle(drawn)
    return drawn


def main(arguments: list[str] | None = None) -> None:
    """Write the sample and its key."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER:N", help="folder and the number of sentences to draw from it")
    parser.add_argument("--out", type=Path, required=True, help="file for the numbered sentences")
    parser.add_argument("--key", type=Path, required=True, help="file for the folder of each sentence")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    sizes = {Path(folder): int(size) for folder, _, size in (each.rpartition(":") for each in given.folders)}
    drawn = draw_sample(sizes, seed=given.seed)
    given.out.write_text("".join(f"{number}. {name}: {sentence}\n" for number, (_, name, sentence) in enumerate(drawn, 1)))
    given.key.write_text("".join(f"{number} {folder}\n" for number, (folder, _, _) in enumerate(drawn, 1)))


if __name__ == "__main__":
    main()
