"""Recompute published scores from raw answers and verdicts, with the scoring rules of this package.

    python benchmarks/published_scores.py --data DATA --answers DATA
    python benchmarks/published_scores.py --data DATA --answers MORE --differences differences.jsonl

DATA contains MATH-Vision's test.jsonl and LogicVista's dataset.json. The folder given with --answers
is searched for answers and verdicts of models (published_files.py). For MATH-Vision and LogicVista,
every raw answer is scored by the rules and compared with the authors' verdict. For DynaMath, the
average and the worst case are computed from the verdicts. Answers are not vetoed and no judge is
asked. What cannot be read is one line on standard error.
"""

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from published_files import ModelAnswers, PublishedAnswer, read_published

from megatron_rl.config import DataSettings
from megatron_rl.data.answers import MAX_ANSWER_CHARS, reference_answer
from megatron_rl.data.benchmarks.benchmark_scores import ItemScore, group_by_label, mean_credit, worst_case_accuracy
from megatron_rl.data.benchmarks.catalog import make_record_reader
from megatron_rl.data.records import RecordFiles
from megatron_rl.rewards.accuracy import score_by_rules
from megatron_rl.rewards.algebra import MathVerifier
from megatron_rl.rewards.answer import read_tagged

QUESTION_FILES = {"mathvision": "test.jsonl", "logicvista": "dataset.json"}
TITLES = {"mathvision": "MATH-Vision", "logicvista": "LogicVista"}
FIRST_COLUMNS = {"mathvision": "options", "logicvista": "imagename"}
"""Column by which the question file of each benchmark is recognized."""
WEBSITE = "data/results/model_scores.js and model_scores_worst.js of DynaMath/dynamath.github.io at 7b3d72d"
DYNAMATH_PUBLISHED = {
    "GPT-4o": (63.7, 34.7), "Claude-3.5": (64.8, 35.3), "Gemini 1.5 Pro": (60.5, 26.9), "Qwen2-72B": (55.1, 28.3), "Qwen2-7B": (42.1, 13.8),
    "InternVL2-76B": (54.0, 24.6), "InternVL2-40B": (41.8, 14.2), "InternVL2-26B": (41.0, 14.4), "InternVL2-8B": (39.7, 10.4),
    "Llama-3.2-90B": (44.0, 13.0), "Deepseek-7B": (21.5, 4.2), "Llava-v1.6-34B": (27.1, 6.0), "Llava-v1.6-vicuna-13B": (19.8, 2.8),
    "Llava-v1.5-7B": (16.6, 1.8),
}  # fmt: skip
"""Average and worst case, in percent, that the authors publish for each model (zero-shot)."""
SHOWN_IDS = 400
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)

Payload = Mapping[str, object]


@dataclass(slots=True)
class Comparison:
    """Scores of one model by the rules, compared with the authors' verdicts."""

    num_answers: int = 0
    num_verdicts: int = 0
    authors_right: int = 0
    rules_right: int = 0
    num_open: int = 0
    """Answers that the rules leave undecided."""
    num_decided: int = 0
    """Decided answers that have a verdict of the authors."""
    extracted: Counter[str] = field(default_factory=Counter)
    """Scores of the answers extracted by the authors' model: agreements, differences, open, right."""
    differences: list[dict[str, object]] = field(default_factory=list)


def load_questions(benchmark: str, folder: Path, problems: list[str]) -> tuple[dict[str, Payload], set[str]]:
    """Return the payloads of a benchmark's questions, keyed by ID, and the IDs of unusable questions.

    Images are not read.
    """
    for path in sorted(folder.rglob(QUESTION_FILES[benchmark])):
        try:
            settings = DataSettings(eval=[str(path)], benchmark=benchmark)
            rows = RecordFiles([str(path)], images_root="")
            if FIRST_COLUMNS[benchmark] not in rows[0].row:
                continue
        except (OSError, ValueError) as error:
            problems.append(f"{path}: cannot be read ({str(error).splitlines()[0][:200]}); skipped")
            continue
        convert, questions, unusable = make_record_reader(settings, "eval"), dict[str, Payload](), set[str]()
        assert convert is not None
        for number in range(len(rows)):
            key = ""
            try:
                record = rows[number]
                key = str(record.row["id"])
                record = convert(record)
                payload = {**record.row, "official": record.benchmark_info, "answer": reference_answer(record, {})}
            except (KeyError, ValueError) as error:
                problems.append(f"{path}: a question is left out: {error}")
                unusable.add(key)
                continue
            questions[key] = payload
        return questions, unusable
    problems.append(f"{folder}: there is no {QUESTION_FILES[benchmark]} with the questions of {benchmark}; its answers are skipped")
    return {}, set()


async def compare(questions: Mapping[str, Payload], model: ModelAnswers, verifier: MathVerifier) -> Comparison:
    """Score a model's raw answers and compare the scores with the authors' verdicts."""
    found = Comparison()
    for key, answer in model.answers.items():
        if key not in questions:
            continue
        credit = await score_reply(questions[key], answer.response, verifier)
        found.num_answers += 1
        found.num_verdicts += answer.is_right is not None
        found.authors_right += answer.is_right is True
        found.rules_right += credit == 1
        found.num_open += credit is None
        if answer.is_right is None:
            continue
        if credit is not None:
            found.num_decided += 1
            if (credit == 1) != answer.is_right:
                found.differences.append(describe_difference(key, questions[key], answer, is_right=credit == 1))
        if answer.extracted is not None:
            again = await score_reply(questions[key], answer.extracted, verifier)
            found.extracted["open" if again is None else "same" if (again == 1) == answer.is_right else "different"] += 1
            found.extracted["right"] += again == 1
    return found


async def score_reply(payload: Payload, reply: str, verifier: MathVerifier) -> float | None:
    """Return the score of a reply, or None if the rules leave it undecided.

    The answer is the content of the last tag or box, or else the whole reply. A whole reply of
    MAX_ANSWER_CHARS characters is a solution without an answer in a known place.
    """
    tagged = read_tagged(reply)
    if tagged is None and len(reply) >= MAX_ANSWER_CHARS:
        return None
    return (await score_by_rules(payload, reply if tagged is None else tagged, verifier)).credit


async def compare_models(questions: Mapping[str, Payload], models: Mapping[str, ModelAnswers]) -> dict[str, Comparison]:
    """Return the comparison of every model, keyed by its name."""
    verifier = MathVerifier()
    return {name: await compare(questions, model, verifier) for name, model in models.items()}


def find_gaps(model: ModelAnswers, questions: Mapping[str, Payload], unusable: set[str]) -> list[str]:
    """Return one line for answers to unknown questions, and one for questions without an answer."""
    unknown, missing = model.answers.keys() - questions.keys() - unusable, questions.keys() - model.answers.keys()
    lines = [f"{len(unknown)} answers to unknown questions, such as {min(unknown)}; left out"] if unknown else []
    return lines + ([f"{len(missing)} questions without an answer, such as {min(missing)}"] if missing else [])


def describe_difference(key: str, payload: Payload, answer: PublishedAnswer, *, is_right: bool) -> dict[str, object]:
    """Return a difference between rules and authors, with the reason if the texts alone show it."""
    return {
        "id": key, "truth": payload["answer"], "response": answer.response, "rules": is_right, "authors": answer.is_right,
        "reason": find_reason(payload, answer.response.strip(), is_right=is_right),
    }  # fmt: skip


def find_reason(payload: Payload, reply: str, *, is_right: bool) -> str:
    """Return why the rules are right, or "" if the texts alone do not show it.

    No scoring rule is used here: texts are compared character by character (`bare`).
    """
    official, truth = payload["official"], str(payload["answer"])
    assert isinstance(official, Mapping)
    texts = {
        letter: bare(str(text)) for letter, text in zip("ABCDEFGHIJ", official["options"] or official.get("choices", ()), strict=False)
    }
    letter = re.match(r"\(?([A-Z])(?:[).:]|\Z)", reply)
    named = {name for name, text in texts.items() if text and text == bare(reply)}
    if is_right and truth in named:
        return "the answer is the text of the right option"
    if is_right and letter and letter[1] == truth:
        return "the answer begins with the letter of the right option"
    if is_right and bare(reply) == bare(truth):
        return "the answer is the truth"
    numbers = _NUMBER.findall(reply)
    if is_right and numbers and numbers == _NUMBER.findall(truth):
        return "the answer has the numbers of the truth"
    if not is_right and ((named and truth not in named) or (letter and letter[1] != truth)):
        return "the answer is another option"
    return ""


def bare(text: str) -> str:
    """Return a text without case, blanks, dollar signs, braces and LaTeX's text commands."""
    return re.sub(r"\\(?:text|mathrm|!|(?=%))|[\s${}~]", "", text.casefold())


def share(part: float, whole: float) -> str:
    """Return a percentage with two decimals, or a dash if there is nothing to divide by."""
    return f"{100 * part / whole:.2f}%" if whole else "-"


def answer_table(models: Mapping[str, ModelAnswers], found: Mapping[str, Comparison]) -> list[str]:
    """Return the lines of a table with one row per model."""
    head = [
        "model",
        "answers",
        "authors' total",
        "authors' verdicts",
        "rules",
        "undecided",
        "decided: agree",
        "extracted: rules, undecided, agree",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, each in found.items():
        agree = each.num_decided - len(each.differences)
        again, num_again = each.extracted, sum(each.extracted[kind] for kind in ("same", "different", "open"))
        agree_again = f"{again['same']} of {again['same'] + again['different']}"
        cells = [name, str(each.num_answers), models[name].total or "-"]
        cells += [f"{each.authors_right} ({share(each.authors_right, each.num_verdicts)})" if each.num_verdicts else "-"]
        cells += [f"{each.rules_right} ({share(each.rules_right, each.num_answers)})", share(each.num_open, each.num_answers)]
        cells += [f"{agree} of {each.num_decided} ({share(agree, each.num_decided)})" if each.num_verdicts else "-"]
        cells += [f"{share(again['right'], num_again)}, {share(again['open'], num_again)}, {agree_again}" if num_again else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def difference_lines(found: Mapping[str, Comparison]) -> list[str]:
    """Return one line per model and reason, with the IDs of the questions."""
    lines = []
    for name, each in found.items():
        ids: dict[str, list[str]] = {}
        for difference in each.differences:
            sides = "right by the rules" if difference["rules"] else "right by the authors"
            reason = f"the rules are right: {difference['reason']}" if difference["reason"] else "to be read"
            ids.setdefault(f"{sides}; {reason}", []).append(str(difference["id"]))
        lines += [f"- {name}, {len(keys)} {reason}: {', '.join(keys[:SHOWN_IDS])}" for reason, keys in ids.items()]
    return lines or ["- none"]


def dynamath_table(models: Mapping[str, Sequence[ItemScore]]) -> list[str]:
    """Return the lines of a table with average and worst case of each model, and by level."""
    lines = ["| model | questions | average | published | worst case | published | by level: average, worst case |", "|" + "---|" * 7]
    known = {model_key(name): scores for name, scores in DYNAMATH_PUBLISHED.items()}
    for name, scores in models.items():
        published = [f"{value:.1f}%" for value in known.get(model_key(name), ())] or ["-", "-"]
        average, worst = f"{100 * mean_credit(scores):.2f}%", f"{100 * worst_case_accuracy(scores):.2f}%"
        levels = [
            f"{level} {mean_credit(each):.1%}, {worst_case_accuracy(each):.1%}" for level, each in group_by_label(scores, "level").items()
        ]
        cells = [name, str(len({each.unit_id for each in scores})), average, published[0], worst, published[1], "; ".join(levels)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def model_key(name: str) -> str:
    """Return a model's name without punctuation, case and the words VL and chat."""
    return re.sub(r"vl|chat|[^a-z\d]", "", name.casefold())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables; exit with an error if there are no answers at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the questions")
    parser.add_argument("--answers", type=Path, required=True, help="folder with answers and verdicts of models")
    parser.add_argument("--differences", type=Path, help="file to which every difference is written as a JSON line")
    given = parser.parse_args(arguments)
    for name in ("data", "answers"):
        if not getattr(given, name).is_dir():
            parser.error(f"--{name} {getattr(given, name)}: no such folder")
    published, differences = read_published(given.answers), list[dict[str, object]]()
    problems = published.problems
    for benchmark, models in (("mathvision", published.mathvision), ("logicvista", published.logicvista)):
        questions, unusable = load_questions(benchmark, given.data, problems) if models else ({}, set())
        if not questions:
            continue
        found = asyncio.run(compare_models(questions, models))
        for name, model in models.items():
            problems += [f"{benchmark} {name}: {each}" for each in find_gaps(model, questions, unusable)]
        print(f"## {TITLES[benchmark]}: {len(questions)} questions\n", *answer_table(models, found), sep="\n")
        print("\nDifferences:\n", *difference_lines(found), "", sep="\n")
        differences += [{"benchmark": benchmark, "model": name, **each} for name, one in found.items() for each in one.differences]
    if published.dynamath:
        scored = {name: scores for name, scores in published.dynamath.items() if scores}
        problems += [f"dynamath {name}: has no row that can be read" for name in published.dynamath.keys() - scored.keys()]
        print("## DynaMath\n", *dynamath_table(scored), f"\nPublished: {WEBSITE}.", "", sep="\n")
    if given.differences:
        given.differences.write_text("".join(json.dumps(each) + "\n" for each in differences), encoding="utf-8")
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    if not (published.mathvision or published.logicvista or published.dynamath):
        sys.exit(f"{given.answers}: there are no published answers or verdicts")


if __name__ == "__main__":
    main()
