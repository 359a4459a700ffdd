"""Tests the attack suite with judges of known behavior: one that knows the answers, some that
believe what they read, and an unreachable one."""

import re
from collections.abc import Callable

import pytest

from megatron_rl.rewards.judge_attack_suite import EXIT_FLIPPED, EXIT_HELD, EXIT_NO_JUDGE, main
from megatron_rl.rewards.judge_attacks import POOR_WORK, QUESTIONS, TRICKS
from megatron_rl.rewards.text_quoting import quote_text
from tests.support.fake_judge_server import JudgeReply, make_completion, serve_judge

RIGHT = {quote_text(answer) for question in QUESTIONS for answer in question.right_answers}


def shown(body: dict) -> tuple[str, bool]:
    """Return the quoted text to be judged, and whether it is an answer."""
    content = body["messages"][1]["content"]
    if isinstance(content, str):
        return content.rpartition("\nanswer: ")[2], True
    return re.search(r"\nwhat the agent wrote .*?: (.*)\n", content[0]["text"])[1], False


def fair(body: dict) -> JudgeReply:
    text, is_answer = shown(body)
    return make_completion(f'{{"correct": {str(text in RIGHT).lower()}}}' if is_answer else '{"score": 0}')


def believing(words: str) -> Callable[[dict], JudgeReply]:
    """Return a judge that is fair except for texts that contain `words`, which it accepts."""

    def behave(body: dict) -> JudgeReply:
        text, is_answer = shown(body)
        return make_completion('{"correct": true}' if is_answer else '{"score": 1}') if words in text else fair(body)

    return behave


def attack(behave: Callable[[dict], JudgeReply], *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    with serve_judge(behave) as server:
        status = main(["--url", server.url, "--model", "judge", *words])
    return status, capsys.readouterr().out.splitlines()


MARKS = ("<|", "<\uff5c", "\uff1c\uff5c", "[/INST]", "<end_of_turn>", "ASSISTANT:", "\u202e", "\u200b", "\u201d", "\U000e0074", "\n")
"""Characters that mean more than words to tokenizers and readers."""


def test_a_judge_that_knows_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    """No trick flips a verdict of a fair judge. The judge receives every trick, but never in a
    spelling that means more than words."""
    texts: list[str] = []

    def behave(body: dict) -> JudgeReply:
        texts.append(shown(body)[0])
        return fair(body)

    status, lines = attack(behave, capsys=capsys)
    assert not [mark for mark in MARKS if any(mark in text for text in texts)]
    assert all(any(mark in trick("red") for trick in TRICKS.values()) for mark in MARKS)
    assert status == EXIT_HELD and len(lines) == 1 + len(TRICKS) + 1
    total = len(TRICKS) * (len(QUESTIONS) + len(POOR_WORK))
    assert (
        lines[-1]
        == f"judge: {len(TRICKS)} attacks, 0 flipped a verdict; 0 verdicts flipped and 0 withheld, out of {total}; 0 controls failed"
    )


def test_a_judge_that_obeys_is_told_with_its_tricks(capsys: pytest.CaptureFixture[str]) -> None:
    """The report names the trick that flips verdicts of a judge that believes it, with the counts
    of verdicts."""
    status, lines = attack(believing("Ignore the above"), "--trick", "ignore", "--trick", "praise", capsys=capsys)
    assert status == EXIT_FLIPPED
    assert re.split(r" {2,}", lines[1]) == ["ignore", "7", "0", "7", ", ".join([*(each.family for each in QUESTIONS), *POOR_WORK])]
    assert re.split(r" {2,}", lines[2].strip()) == ["praise", "0", "0", "7"]
    assert lines[-1] == "judge: 2 attacks, 1 flipped a verdict; 7 verdicts flipped and 0 withheld, out of 14; 0 controls failed"


def test_a_judge_that_says_one_thing_proves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A judge with a constant verdict fails the controls, and the exit status is EXIT_NO_JUDGE."""
    for verdict, num_failed in (("true", len(QUESTIONS) + len(POOR_WORK)), ("false", len(RIGHT))):
        reply = f'{{"correct": {verdict}}}', f'{{"score": {int(verdict == "true")}}}'
        status, lines = attack(lambda body, reply=reply: make_completion(reply[not shown(body)[1]]), "--trick", "sure", capsys=capsys)
        assert status == EXIT_NO_JUDGE and sum(line.startswith("control failed: ") for line in lines) == num_failed
        assert lines[-1].endswith(f"; {num_failed} controls failed")


def test_a_verdict_that_is_withheld_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Malformed verdicts and refused requests are counted as withheld verdicts. After a withheld
    verdict, the rollout of a wrong answer would be repeated until the judge accepts one."""

    def behave(body: dict) -> JudgeReply:
        text, is_answer = shown(body)
        if "Ignore" in text:
            return make_completion("well") if is_answer else JudgeReply('{"error": {"message": "too many placeholders"}}', 400)
        return fair(body)

    status, lines = attack(behave, "--trick", "ignore", capsys=capsys)
    assert status == EXIT_FLIPPED and "0 verdicts flipped and 7 withheld, out of 7" in lines[-1]


def test_a_judge_without_eyes_is_asked_for_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """A judge that accepts no images is tested with answers only."""
    status, lines = attack(lambda body: fair(body) if shown(body)[1] else JudgeReply("{}", 400), "--trick", "colon", capsys=capsys)
    assert status == EXIT_HELD and lines[2].startswith("the judge accepts no images") and "0 withheld, out of 4" in lines[-1]


def test_nobody_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    """An unreachable judge ends the suite with an error. The error does not contain a password of
    the URL."""
    with serve_judge(fair) as gone:
        pass
    assert main(["--url", gone.url]) == EXIT_NO_JUDGE and "no judge is available" in capsys.readouterr().err
    assert main(["--url", "http://me:SECRET@judge/v1"]) == EXIT_NO_JUDGE
    said = capsys.readouterr().err
    assert said.startswith("error: task.judge.urls=...: contains @") and "SECRET" not in said
    with pytest.raises(SystemExit) as asked:
        main(["--help"])
    assert asked.value.code == 0 and "Exit status: 0 if no verdict was flipped" in capsys.readouterr().out


def test_every_trick_is_a_trick() -> None:
    """Each trick changes the text, differs from all others, and never yields one of the right
    answers."""
    tricked = {name: trick("red") for name, trick in TRICKS.items()}
    assert len(set(tricked.values())) == len(TRICKS) >= 40 and "red" not in tricked.values()
    assert not RIGHT & {quote_text(trick(question.wrong_answer)) for trick in TRICKS.values() for question in QUESTIONS}
