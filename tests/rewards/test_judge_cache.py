"""Tests the cache of verdicts, and the images and prompts that a judge receives."""

import asyncio
import base64
import io
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from megatron_rl.config import JudgeSettings
from megatron_rl.rewards.judge import Judge, encode_data_url, make_judge
from megatron_rl.rewards.judge_prompt import MalformedVerdict, load_judge_prompt
from tests.conftest import ROOT
from tests.support.fake_judge_server import PROMPT, answer_correct, make_judge_settings, prompt_fields, run_judge, serve_judge


def test_verdicts_are_kept_by_everything_they_depend_on(tmp_path: Path) -> None:
    """A second run with the same file makes no known request again. Another model, prompt, field or
    pixel makes another request."""
    cache = str(tmp_path / "verdicts.sqlite")
    red, blue = Image.new("RGB", (40, 40), "red"), Image.new("RGB", (40, 40), "blue")
    old = load_judge_prompt("answer_equivalence", examples="chart")

    async def ask(judge: Judge) -> None:
        await judge.score(PROMPT, fields=prompt_fields())
        await judge.score(old, fields=prompt_fields())
        await judge.score(PROMPT, fields=prompt_fields("scarlet"))
        await judge.score(PROMPT, fields=prompt_fields(), images=[red])
        await judge.score(PROMPT, fields=prompt_fields(), images=[blue])
        await judge.score(PROMPT, fields=prompt_fields(), images=[red, blue])

    with serve_judge(answer_correct) as server:
        run_judge(make_judge_settings(server, cache=cache), ask)
        assert len(server.bodies) == 6
        again = run_judge(make_judge_settings(server, cache=cache), ask)
        assert len(server.bodies) == 6 and again.cache_hits == 6
        run_judge(make_judge_settings(server, cache=cache, model="other"), ask)
        assert len(server.bodies) == 12
    assert run_judge(make_judge_settings(cache=cache), ask).endpoints.requests == 0, "recorded verdicts need no server"


def test_processes_share_a_cache(tmp_path: Path) -> None:
    """Four processes open one file that does not exist yet and write 50 verdicts each, half of them
    the same. The file then has all of them, once each."""
    path = str(tmp_path / "verdicts.sqlite")
    code = (
        "import sys; from megatron_rl.rewards.verdict_cache import VerdictCache\n"
        "kept = VerdictCache(sys.argv[1], read_only=False)\n"
        "for index in range(50):\n"
        "    key = f'{index}' if index % 2 else f'{sys.argv[2]} {index}'\n"
        "    kept.store(key, model='m', prompt='p', fields='{}', verdict=index / 50); assert kept.find(key) == index / 50\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, path, str(number)]) for number in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM verdicts").fetchone() == (25 + 4 * 25,)


def test_a_cache_that_is_none(tmp_path: Path) -> None:
    """A cache file that is no database or cannot be created raises ValueError."""
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to be looked at as one " * 20)
    for wrong in (str(path), str(tmp_path / "missing" / "file")):
        with pytest.raises(ValueError, match=r"task.judge.cache=.*; give an existing verdict file"):
            run_judge(JudgeSettings(urls=["http://127.0.0.1:9/v1"], model="judge", cache=wrong), lambda _: asyncio.sleep(0))
    with pytest.raises(ValueError, match="task.judge.model=: recorded verdicts are keyed by model"):
        make_judge(JudgeSettings(cache=str(path)))


@pytest.mark.parametrize(
    ("size", "expected"), [((100, 50), (100, 50)), ((2048, 1024), (1024, 512)), ((20_000, 100), (1024, 28)), ((1, 1), (1, 1))]
)
def test_pictures_are_bounded(size: tuple[int, int], expected: tuple[int, int]) -> None:
    picture = Image.open(io.BytesIO(base64.b64decode(encode_data_url(Image.new("RGB", size, "red")).split(",")[1])))
    assert picture.size == expected and picture.format == "JPEG"
    assert all(abs(seen - meant) < 4 for seen, meant in zip(picture.getpixel((0, 0)), (255, 0, 0), strict=True))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "CMYK", "I;16", "F"])
def test_pictures_of_any_mode(mode: str) -> None:
    """Images of every mode are encoded. Transparent pixels become white."""
    picture = Image.new(mode, (30, 30), 0)
    seen = Image.open(io.BytesIO(base64.b64decode(encode_data_url(picture).split(",")[1])))
    corner = seen.getpixel((3, 3))
    assert corner == ((255, 255, 255) if mode in ("RGBA", "LA", "CMYK") else (0, 0, 0))


@pytest.mark.parametrize("path", sorted((ROOT / "megatron_rl" / "rewards" / "prompts").iterdir()), ids=lambda path: path.stem)
def test_prompts_are_complete(path: Path) -> None:
    """Each prompt has a version, parses a verdict of every value that it lists, and has no field
    that recipes do not fill."""
    prompt = load_judge_prompt(path.stem, examples="general" if path.stem == "answer_equivalence" else "")
    assert prompt.version >= 1
    for value in prompt.values:
        assert prompt.parse_verdict(json.dumps({prompt.key: value})) == float(value)
    text = prompt.render({name: f"<{name}>" for name in ("question", "reference", "answer", "response", "metadata")})
    assert "< question>" in text and f'{{"{prompt.key}":' in text and text.isascii()
    with pytest.raises(MalformedVerdict):
        prompt.parse_verdict(json.dumps({prompt.key: 0.3}))
