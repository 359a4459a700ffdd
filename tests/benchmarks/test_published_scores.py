"""Tests benchmarks/published_scores.py on hand-made files in the layouts of the authors: counts,
shares and differences are computed by hand, and what cannot be read is one line.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[object, str, list[str]]]
VARIANTS = [f"Variant {number}" for number in range(1, 11)]
LOGIC = ["", "id", "reasoning skill", "capability", "true answer", "M answer extracted", "M answer raw", "match?"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the script in this process: exit code, output, lines of problems."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    main = importlib.import_module("published_scores").main

    def start(data: Path, given: Path, *more: str) -> tuple[object, str, list[str]]:
        code: object = 0
        try:
            main(["--data", str(data), "--answers", str(given), *more])
        except SystemExit as error:
            code = error.code
        printed = capsys.readouterr()
        return code, printed.out, [*printed.err.splitlines(), *([code] if isinstance(code, str) else [])]

    return start


def table(path: Path, rows: list[list[str]]) -> None:
    path.write_text("".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows))


def questions(folder: Path) -> Path:
    """Write four questions of MATH-Vision and three of LogicVista, one of them unusable."""
    choice = {"question": "Which?", "options": ["$4 \\mathrm{~cm}$", "$5 \\mathrm{~cm}$"], "answer": "B", "image": "images/1.jpg"}
    free = {"question": "How many?", "options": [], "answer": "12", "image": "images/2.jpg"}
    rows = [{"id": "1", **choice}, {"id": "2", **free}, {"id": "3", **free, "answer": "\\frac{1}{2}"}, {"id": "4", **choice}]
    folder.mkdir()
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    logic = {"imagename": "x.png", "question": "Which (A-D)?", "answer": "C", "skill": ["spatial"], "broad_capability": ["diagram"]}
    (folder / "dataset.json").write_text(json.dumps({"v1_0": logic, "v1_1": {**logic, "answer": "A, C"}, "v1_2": {**logic, "answer": ""}}))
    return folder


def answers(folder: Path) -> Path:
    """Write answers of a model of each benchmark, in one folder and with names of our own.

    MATH-Vision: 1 is the text of the right option, which the authors count as wrong; 2 agrees; 3
    agrees by mathematics; 4 is undecided.
    """
    folder.mkdir()
    said = [
        ("1", "$5 \\mathrm{~cm}$", False),
        ("2", "The answer is 12.", True),
        ("3", "0.5", True),
        ("4", "I cannot see the picture", False),
    ]
    lines = [json.dumps({"id": key, "model": "m", "response": reply, "model_answer": "", "correct": right}) for key, reply, right in said]
    (folder / "Some-Model.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "Some-Model_result.json").write_text(json.dumps({"-all": "2/4=50.0%"}))
    rows = [
        ["0", "v1_0", "['s']", "['d']", "['c']", "['c']", "The third one", "1"],
        ["1", "v1_1", "", "", "", "['a', 'b']", "A and B", "0"],
    ]
    table(folder / "M-accuracy-results.csv", [LOGIC, *rows])
    (folder / "M-answers.json").write_text(json.dumps({"v1_0": {"answer": "x ASSISTANT: The third one"}, "v1_1": {"answer": "A or B"}}))
    (folder / "N-answers.json").write_text(json.dumps({"v1_0": {"answer": "c"}, "v1_1": {"answer": "D"}}))
    solved, half = ["correct"] * 10, ["correct"] * 5 + ["fail"] * 5
    header = ["Question ID", *VARIANTS, "# of correct per question", "Topic", "Difficulty Level"]
    lists = [["Q1", *solved, "10", "algebra", "high school"], ["Q2", *half, "5", "algebra", "elementary school"]]
    table(folder / "GPT4o-result.csv", [header, *lists, ["# of correct per variant", *["2"] * 10], [""] * 14])
    return folder


def test_scores_of_hand_made_answers(run: Run, tmp_path: Path) -> None:
    code, out, problems = run(questions(tmp_path / "data"), answers(tmp_path / "answers"), "--differences", str(tmp_path / "found.jsonl"))
    assert code == 0
    assert "| Some-Model | 4 | 2/4=50.0% | 2 (50.00%) | 3 (75.00%) | 25.00% | 2 of 3 (66.67%) | - |" in out
    assert "- Some-Model, 1 right by the rules; the rules are right: the answer is the text of the right option: 1\n" in out
    assert "## MATH-Vision: 4 questions" in out and "## LogicVista: 2 questions" in out
    assert "| M | 2 | - | 1 (50.00%) | 0 (0.00%) | 50.00% | 1 of 1 (100.00%) | 50.00%, 0.00%, 2 of 2 |" in out
    assert "| N | 2 | - | - | 1 (50.00%) | 0.00% | - | - |" in out
    assert "| GPT4o | 2 | 75.00% | 63.7% | 50.00% | 34.7% | elementary school 50.0%, 0.0%; high school 100.0%, 100.0% |" in out
    (difference,) = map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
    assert (difference["model"], difference["id"], difference["rules"], difference["authors"]) == ("Some-Model", "1", True, False)
    assert len(problems) == 2 and "a question is left out: dataset.json row 2: answer: is empty in row v1_2" in problems[1]
    assert problems[0] == "M-answers.json: 1 answers differ from those of the scored file, which are used"


BROKEN = {
    "A.jsonl": '{"id": "1", "response": "5", "correct": "yes"}\n{"id": "1", "respons',
    "B.jsonl": '{"id": "9", "response": "5", "correct": true}\n' * 2 + '{"id": "2", "response": null}\n',
    "C_result.json": '{"-all": "1/1"}',
    "D_result.json": "[]",
    "E-answers.json": '{"v1_0": {"reasoning": "none"}}',
    "F-answers.json": '{"v1_0": ',
    "G.csv": ",".join(LOGIC[:-2]) + ",match?\n0,v1_0,,,,,1\n",
    "H.csv": ",".join(LOGIC) + "\n0,v1_0,,,,[,C,maybe\n0,v1_0,,,,[,C,1\n1,v1_0,,,,,C,1\n",
    "I-result.csv": ",".join(["Question ID", *VARIANTS]) + "\nQ1,correct\nQ2" + ",correct" * 9 + ",perhaps\nQ3" + ",fail" * 10 + "\n",
    "J.csv": "a,b\n1,2\n",
    "K.jsonl": "\xff",
    "L.json": "{}",
}
PROBLEMS = [
    'A.jsonl line 1: correct is "yes"; skipped',
    "A.jsonl line 2: is not a JSON object; skipped",
    "B.jsonl line 2: the id 9 occurs twice; skipped",
    "B.jsonl line 3: response is null; skipped",
    "D_result.json: cannot be read (there is no total under the key -all); skipped",
    "E-answers.json v1_0: answer is missing or is not text; skipped",
    "F-answers.json: cannot be read (is not one JSON object); skipped",
    "G.csv: cannot be read (has no columns `id` and `... answer raw`); skipped",
    "H.csv row 1: id is 'v1_0', match? is 'maybe', 8 columns; skipped",
    "H.csv row 3: the id occurs twice; skipped",
    "I-result.csv row 1: Q1 has 1 verdicts; skipped",
    "I-result.csv row 2: Q2 has 10 verdicts, one is 'perhaps'; skipped",
    "K.jsonl: cannot be read ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); skipped",
    "C_result.json: there is no C.jsonl with its answers; skipped",
    "mathvision A: 4 questions without an answer, such as 1",
    "mathvision B: 1 answers to unknown questions, such as 9; left out",
    "mathvision B: 4 questions without an answer, such as 1",
]


def test_files_that_cannot_be_read_are_one_line_each(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    folder.mkdir()
    for name, text in BROKEN.items():
        (folder / name).write_bytes(text.encode("latin-1"))
    code, out, problems = run(questions(tmp_path / "data"), folder)
    assert code == 0 and not [line for line in problems if "Traceback" in line]
    shortened = [line.removeprefix(f"{folder}/") for line in problems]
    assert [line for line in PROBLEMS if line not in shortened] == []
    assert "| H.csv | 1 |" in out and "| I | 1 | 0.00% | - | 0.00% | - | any 0.0%, 0.0% |" in out


@pytest.mark.parametrize("missing", ["data", "answers", "questions", "both"])
def test_missing_folders_and_questions(missing: str, run: Run, tmp_path: Path) -> None:
    data, given = tmp_path / "data", tmp_path / "answers"
    if missing == "questions":
        data.mkdir()
        answers(given)
        code, out, problems = run(data, given)
        assert code == 0 and "MATH-Vision" not in out and "## DynaMath" in out
        assert f"{data}: there is no test.jsonl with the questions of mathvision; its answers are skipped" in problems
        return
    for folder in {"data": (given,), "answers": (data,), "both": (data, given)}[missing]:
        folder.mkdir()
    code, _, problems = run(data, given)
    lines = {"data": f"--data {data}: no such folder", "answers": f"--answers {given}: no such folder"}
    assert code != 0 and problems[-1].endswith(lines.get(missing, f"{given}: there are no published answers or verdicts"))
