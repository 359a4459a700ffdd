"""Tests that unread columns are named in one line, for questions and for transcripts. Oracles:
messages by hand and Hydra's own parser.
"""

import shlex
import tempfile
import zipfile
from pathlib import Path

import datasets
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from megatron_rl.config import ColumnSettings
from megatron_rl.data.questions import load_questions, open_questions
from megatron_rl.data.survey import QuestionSurvey, survey_questions
from megatron_rl.data.transcript_survey import TranscriptSurvey
from megatron_rl.data.transcripts import load_transcripts, open_transcripts, survey_transcripts
from megatron_rl.data.unread_names import UnreadColumns
from megatron_rl.launcher.compose import compose_settings
from megatron_rl_tools.data import make_easy_vqa, make_visual_search
from tests.support.data_files import make_png, write_rows
from tests.support.transcripts import REPLY, USER

ASKED = {"question": "What?", "answer": "B", "image": "red.png"}
TALK = {"messages": [USER, REPLY]}
OWN = "'task.data.columns={images: COLUMN}' reads one (likewise question, answer), and custom rewards receive them in extra"
LEARNED = "only messages are trained, and loss: false in a message masks a response"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    for color in ("red", "blue"):
        (tmp_path / f"{color}.png").write_bytes(make_png(color))


def look(tmp_path: Path, *rows: dict, ignored: tuple[str, ...] = (), name: str = "q.jsonl") -> QuestionSurvey:
    path = write_rows(tmp_path / name, [*rows])
    return survey_questions(open_questions([str(path)], images_root="", name="train", columns=ColumnSettings(ignored=[*ignored])))


def talks(tmp_path: Path, *rows: dict, ignored: tuple[str, ...] = ()) -> TranscriptSurvey:
    return survey_transcripts(open_transcripts([str(write_rows(tmp_path / "t.jsonl", [*rows]))], images_root="", ignored=ignored))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv", ".arrow"])
def test_one_line_names_all_columns_that_nothing_reads(suffix: str, tmp_path: Path) -> None:
    """The line names the first row that has such a column. Columns that first occur in later rows
    are in the same line.
    """
    rows = [ASKED, ASKED | {"distractors": "a cat"}, ASKED | {"level": "3"}]
    path = tmp_path / f"q{suffix}"
    if suffix == ".csv":
        path.write_text("question,answer,image,distractors,level\nWhat?,B,red.png,,\nWhat?,B,red.png,a cat,\nWhat?,B,red.png,,3\n")
    elif suffix == ".arrow":
        path = tmp_path / "saved"
        datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in rows[0] | rows[1] | rows[2]}).save_to_disk(path)
        (path / "red.png").write_bytes(make_png())
    else:
        write_rows(path, rows)
    found = survey_questions(open_questions([str(path)], images_root="", name="train"))
    (line,) = found.unread_columns
    where = "data-00000-of-00001.arrow" if suffix == ".arrow" else path.name
    setting = "'task.data.columns.ignored=[distractors,level]' ignores them"
    assert line == f"{where} row 1: columns distractors, level are not read: {OWN}; {setting}"
    assert found.errors == found.column_warnings == []
    assert load_questions([str(path)], images_root="", name="train").warnings == [line]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"wrong_1": "a cat"}, "wrong_1"), ({"ending0": "a cat"}, "ending0"), ({"sol1": "a cat"}, "sol1"), ({"masked": False}, "masked"),
        ({"train": 0}, "train"), ({"crop": [0, 0, 9, 9]}, "crop"), ({"temperature": 0.5}, "temperature"),
        ({"document": "Words."}, "document"),
        ({"story": "Words."}, "story"), ({"ocr": "Words."}, "ocr"), ({"question_2": "Why?"}, "question_2"),
        ({"Question": "Why?"}, "Question"),
        ({"extra_info": {"level": 3}}, "extra_info.level"), ({"reward_model": {"ground_truth": "B", "weight": 2}}, "reward_model.weight"),
        ({"mm_hint": {"hint_type": "image", "hint_path": "no.png"}}, "mm_hint.hint_path"),
        ({"mm_hint": {"hint_type": "image", "order": [1, 0]}}, "mm_hint.order"), ({"solution": r"So \boxed{C}."}, "solution"),
        ({"extra_info": {"answer": "C"}}, "answer"), ({"reward_model": {"ground_truth": "C"}}, "answer"), ({"id": [1, 2]}, ""),
        ({"source": {"url": "x"}}, "source"), ({"options": ["What?"]}, "options"), ({"bbox": [0, 0, 9, 9]}, ""), ({"split": "train"}, ""),
        ({"image": {"path": "red.png", "bbox": [0, 0, 9, 9]}}, "image.bbox"), ({"split": "x" * 101}, "split"),
        ({"license": False}, "license"),
        ({"extra_info": {"question": "Why?"}}, "question"), ({"extra_info": {"question": "what?"}}, ""),
        ({"question": None, "prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": "<image>Why?"}],
          "extra_info": {"question": "Which?"}}, "prompt"),
        ({"question": None, "prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": "<image>Why? Think."}],
          "extra_info": {"question": "Why?"}}, ""),
        ({"question": None, "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "C"}]}, "messages.assistant"),
        ({"question": None, "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So b."}]}, ""),
        ({"solution": r"So \boxed{B}."}, ""), ({"level": None}, ""), ({"level": [""], "more": {"a": []}}, ""), ({"ability": "x"}, ""),
    ],
)  # fmt: skip
def test_columns_of_questions_that_are_named(row: dict, column: str, tmp_path: Path) -> None:
    """Empty columns, identifiers of the row, and columns that repeat the answer are not named."""
    if row.get("id"):
        with pytest.raises(ValueError, match="index: must be text or a whole number"):
            load_questions([str(write_rows(tmp_path / "q.jsonl", [ASKED | row]))], images_root="", name="train")
        return
    assert [line.partition(" is not read: ")[0] for line in look(tmp_path, ASKED | row).unread_columns] == (
        [f"q.jsonl row 0: column {column}"] if column else []
    )


@pytest.mark.parametrize("name", ["level", "a.b", "Unnamed: 0", "null", "True", "3", "a,b", 'a"b', "a'b", "a\\", "\u00e4", "x]", "$x", ""])
def test_the_setting_that_the_line_names(name: str, tmp_path: Path) -> None:
    """Hydra parses the setting in the message to the names of the columns. With this setting,
    nothing is named any more, and the values stay in extra.
    """
    (line,) = look(tmp_path, ASKED | {name: "x", "more": "y"}).unread_columns
    (setting, *words) = shlex.split(line.partition("in extra; ")[2])
    assert words == ["ignores", "them"]
    (override,) = OverridesParser.create().parse_overrides([setting])
    value = override.value()
    assert override.key_or_group == "task.data.columns.ignored" and value == [name, "more"]
    assert look(tmp_path, ASKED | {name: "x", "more": "y"}, ignored=(*value,)).unread_columns == []
    path = str(tmp_path / "q.jsonl")
    read = load_questions([path], images_root="", name="train", columns=ColumnSettings(ignored=value))
    assert read[0].payload["extra"] == {name: "x", "more": "y"} and read.warnings == []


def test_what_is_ignored_and_what_is_not(tmp_path: Path) -> None:
    """An ignored column causes no warnings, but still causes errors. A column that is read cannot
    be ignored.
    """
    choices = {"A": "a cat", "B": "a dog", "options": ["a cat", "a dog"]}
    assert len(look(tmp_path, ASKED | choices).column_warnings) == 2
    quiet = look(tmp_path, ASKED | choices, ignored=("A", "B", "options", "typo"))
    assert (quiet.column_warnings, quiet.unread_columns, quiet.errors) == ([], [], [])
    (line,) = look(tmp_path, ASKED | choices | {"level": 1}, ignored=("options",)).unread_columns
    assert "'task.data.columns.ignored=[options,A,B,level]'" in line, "what is ignored already stays so"
    (error,) = look(tmp_path, {"question": "?", "answer": "a", "shot": "red.png"}, ignored=("shot",)).errors
    assert error.startswith("q.jsonl row 0: column shot looks like paths of pictures that exist and is not read")
    (error,) = look(tmp_path, ASKED, ignored=("image",)).errors
    assert error == "task.data.columns.ignored=image: the column is read; remove it from this list, or remove the column"


def test_many_columns_are_one_line(tmp_path: Path) -> None:
    names = UnreadColumns()
    names.add({f"c{number}": 1 for number in range(59)} | {"a\nb": 1}, "q.jsonl row 0")
    (line,) = names.format_lines("REMEDY")
    assert line.startswith("q.jsonl row 0: columns c0, c1, ") and ", c49 and 10 more are not read: REMEDY; " in line


def test_rows_without_a_picture_beside_others(tmp_path: Path) -> None:
    bare = {"question": "?", "answer": "a"}
    remedy = "the policy sees only their text; name their images, or remove the rows that need one"
    found = look(tmp_path, ASKED, bare, ASKED | {"image": None}, ASKED | {"image": []})
    assert found.column_warnings == [f"q.jsonl row 1: 3 of 4 rows have no image in column image: {remedy}"]
    asked = {"prompt": [{"role": "user", "content": [{"type": "image", "image": "red.png"}, {"type": "text", "text": "?"}]}], "answer": "a"}
    found = look(tmp_path, asked, bare, ASKED)
    assert found.column_warnings == [f"q.jsonl row 1: 1 of 3 rows have no image in columns prompt or image: {remedy}"]
    assert look(tmp_path, ASKED, ASKED).column_warnings == []
    found = talks(tmp_path, TALK | {"images": ["red.png"]}, TALK)
    assert found.warnings == [f"t.jsonl row 1: 1 of 2 rows have no image in column images: {remedy}"]
    path = write_rows(tmp_path / "c.jsonl", [bare | {"pic": "red.png"}, bare | {"pic": ""}])
    found = survey_questions(open_questions([str(path)], images_root="", name="train", columns=ColumnSettings(images="pic")))
    assert [line.partition(": the")[0] for line in found.column_warnings] == ["c.jsonl row 1: 1 of 2 rows have no image in column pic"]


@pytest.mark.parametrize(
    "row",
    [
        {"trainable_turns": [1]}, {"turn_loss": [0, 1]}, {"no_loss": True}, {"labels": [-100, 3]}, {"developer": "Be kind."},
        {"reward": 0.0},
        {"tool_schema": [{"name": "zoom"}]}, {"kto_label": False}, {"is_rejected": True}, {"answer": "B"}, {"instruction": "Be kind."},
        {"images.bbox": [0, 0, 9, 9]},
    ],
    ids=lambda row: next(iter(row)),
)  # fmt: skip
def test_columns_of_transcripts_that_are_named(row: dict, tmp_path: Path) -> None:
    ((name, value),) = row.items()
    column, _, key = name.partition(".")
    row = {column: [{"path": "red.png", key: value}]} if key else row
    first = TALK | {column: ["red.png"]} if key else TALK
    found = talks(tmp_path, first, TALK | row, TALK | row)
    line = f"t.jsonl row 1: column {name} is not read: {LEARNED}; 'task.data.columns.ignored=[{name}]' ignores it"
    assert (found.warnings, found.errors, found.num_replies) == ([line], [], 3)
    assert load_transcripts([str(tmp_path / "t.jsonl")], images_root="")[1:].warnings == [line]
    assert talks(tmp_path, TALK | row, ignored=(name,)).warnings == []


def test_columns_of_transcripts_that_are_read(tmp_path: Path) -> None:
    """No column of any format is named, and neither are identifiers, empty columns and the columns
    of exported rollouts.
    """
    for row in (
        {"messages": [USER | {"id": 3, "date": "1 May"}, REPLY | {"turn": 0}], "images": {"path": "red.png", "width": None}},
        TALK | {"system": "Be kind.", "id": 3, "source": "x", "level": None, "tools": [], "loss": 1},
        {"instruction": "a", "output": "b", "input": "c", "history": [["d", "e"]], "system_prompt": "f", "image": "red.png"},
        {"query": "a", "response": "b", "history": []}, {"prompt": [USER], "completion": [REPLY]},
        TALK | {"id": "train/3", "source": "x", "question": "?", "answer": "B", "step": 3, "reward": 1.0},
    ):  # fmt: skip
        found = talks(tmp_path, row)
        assert (found.warnings, found.errors) == ([], [])
    (error,) = talks(tmp_path, TALK, ignored=("messages",)).errors
    assert error.startswith("task.data.columns.ignored=messages: the column is read; ")


def test_a_column_that_is_not_read_in_every_row_may_be_ignored(tmp_path: Path) -> None:
    """The first row has an instruction next to its messages; in the second it is the prompt."""
    rows = (TALK | {"instruction": "Be kind."}, {"instruction": "a", "output": "b"})
    for each in (rows, rows[::-1]):
        found = talks(tmp_path, *each, ignored=("instruction",))
        assert (found.warnings, found.errors, found.num_replies) == ([], [], 2)


def test_data_that_the_tools_make_is_quiet(tmp_path: Path) -> None:
    """The settings of the visual search experiment ignore `things`. No other column of the
    generated data is unread.
    """
    sprites = make_visual_search.split_sprites("shapes", source=None)["train"]
    rows = [*make_visual_search.make_rows("train", num=2, seed=0, level="easy", sprites=sprites, images=None)]
    with (tmp_path / "wheel").open("wb") as file, zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("easy_vqa/data/train/questions.json", '[["What color?", "red", 7]]')
        wheel.writestr("easy_vqa/data/train/images/7.png", make_png())
    easy = [*make_easy_vqa.read_rows((tmp_path / "wheel").read_bytes(), "train", num=1, seed=0)]
    ignored = compose_settings(["experiment=visual_search_3b_lora_1gpu", "model.path=3b"]).task.data.columns.ignored
    for name, given, chosen in (("q.parquet", rows, ignored), ("e.parquet", easy, ())):
        found = look(tmp_path, *given, ignored=chosen, name=name)
        assert (found.errors, found.column_warnings, found.unread_columns, found.num_images) == ([], [], [], len(given))
    (line,) = look(tmp_path, *rows, name="r.parquet").unread_columns
    assert line.startswith("r.parquet row 0: column extra_info.things is not read: ")
