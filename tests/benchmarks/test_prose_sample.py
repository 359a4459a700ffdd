"""The sample of docstring sentences has the sentences written here, and the key names their folders."""

from pathlib import Path

from benchmarks.prose_sample import main, read_sentences

SOURCE = '''"""Module of two sentences. `One` ends here, and
continues.

    an indented example is left out
"""


class Kept:
    """Too short."""

    async def call(self) -> None:
        """Return the value: it is exact. E.g. this is not split at e.g. here."""
'''


def test_sentences_are_those_of_the_docstrings() -> None:
    assert read_sentences(SOURCE) == [
        ("(module)", "Module of two sentences."),
        ("(module)", "`One` ends here, and continues."),
        ("call", "Return the value: it is exact."),
        ("call", "E.g. this is not split at e.g. here."),
    ]


def test_the_key_names_the_folder_of_each_sentence(tmp_path: Path) -> None:
    sources = {"mine": "The sentence number {} is mine.", "theirs": "The sentence number {} is theirs."}
    for folder, text in sources.items():
        (tmp_path / folder).mkdir()
        for number in range(9):
            (tmp_path / folder / f"module_{number}.py").write_text(f'"""{text.format(number)}"""\n')
    out, key = tmp_path / "sample.txt", tmp_path / "key.txt"
    main([f"{tmp_path / 'mine'}:5", f"{tmp_path / 'theirs'}:4", "--out", str(out), "--key", str(key)])
    sample, folders = out.read_text().splitlines(), [line.split()[1] for line in key.read_text().splitlines()]
    assert len(set(sample)) == len(sample) == 9 and sorted(folders) == [str(tmp_path / "mine")] * 5 + [str(tmp_path / "theirs")] * 4
    assert all(line.endswith(f"is {Path(folder).name}.") for line, folder in zip(sample, folders, strict=True))
