"""Tests a box as an episode uses it: state across turns, images in and out, and errors with their
lines. The oracles are Pillow and plain Python."""

import hashlib
import re
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from megatron_rl_sandbox import BoxLimits, Fault
from tests.support.sandbox_pool import PoolRunner, start_pool

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def room() -> Iterator[PoolRunner]:
    yield from start_pool(BoxLimits(text=1000, images_total=8))


def test_state_lives_over_calls(room: PoolRunner):
    results = room.run_codes(
        "import math\nx = [1]\ndef f(a): return a + math.floor(2.9)",
        "x.append(f(3)); open('kept.txt', 'w').write('here')",
        "print(x, open('kept.txt').read(), __name__)",
    )
    assert [result.fault for result in results] == [Fault.NONE] * 3
    assert results[2].text == "[1, 5] here __main__\n"
    assert [result.id for result in results] == [1, 2, 3]
    assert results[1].files == {"kept.txt": 4}
    assert not any(result.state_lost for result in results)


def test_boxes_know_nothing_of_each_other(room: PoolRunner):
    """Two boxes share no variables, files, temporary files, processes or random numbers."""

    async def both():
        async with await room.pool.open() as one, await room.pool.open() as two:
            await one.run("import tempfile; secret = 1; open('a', 'w').write('a'); open(tempfile.gettempdir() + '/b', 'w').write('b')")
            look = "import os, tempfile; print('secret' in dir(), os.listdir('.'), os.listdir(tempfile.gettempdir()), os.getpid())"
            return await two.run(look), [
                await box.run("import random, numpy; print(random.random(), numpy.random.rand())") for box in (one, two)
            ]

    seen, (first, second) = room.run_coroutine(both())
    assert seen.text == "False [] [] 1\n"
    assert set(first.text.split()).isdisjoint(second.text.split())  # forks share random state unless they reseed


def test_images_come_in_as_variables_and_files(room: PoolRunner):
    buffer = BytesIO()
    NOISE.save(buffer, "WEBP", lossless=True)
    code = (
        "import numpy as np, hashlib\nfrom PIL import Image\n"
        "for name in ('image_0.png', 'photo.webp'):\n"
        "    print(hashlib.sha256(np.asarray(Image.open(name)).tobytes()).hexdigest())\n"
        "print(image_0.tobytes() == photo.convert('RGB').tobytes(), open('sub/a.txt').read(), ready)"
    )
    (result,) = room.run_codes(
        code, images={"image_0": NOISE, "photo.webp": buffer.getvalue()}, files={"sub/a.txt": b"text"}, preload="ready = image_0.size"
    )
    digest = hashlib.sha256(np.asarray(NOISE).tobytes()).hexdigest()
    assert result.text.split("\n") == [digest, digest, "True text (120, 90)", ""]
    assert result.files == {}


@pytest.mark.known_failure("sandbox-without-images")
def test_a_crop_shown_is_the_crop(room: PoolRunner):
    (result,) = room.run_codes("image_0.crop((10, 20, 60, 80)).show()", images={"image_0": NOISE})
    (picture,) = result.images
    assert (picture.source, picture.width, picture.height) == ("show", 50, 60)
    assert picture.to_pil().tobytes() == NOISE.crop((10, 20, 60, 80)).tobytes()


def test_figures_shown_left_open_continued_and_saved(room: PoolRunner):
    """Open figures are returned when they are new, changed or shown, and saved ones once. The
    oracles are sizes and colors of the images."""
    results = room.run_codes(
        "import matplotlib.pyplot as plt\nplt.figure(figsize=(2, 1), dpi=50, facecolor='red')",  # left open
        "print(plt.get_fignums())",  # unchanged: not returned again
        "plt.gcf().set_facecolor('blue')",  # changed: returned again
        "plt.figure(figsize=(1, 1), dpi=60, facecolor='lime'); plt.show(); print(plt.get_fignums())",  # both returned, and closed
        "plt.figure(figsize=(1, 1), dpi=60, facecolor='white'); plt.savefig('a.png')",  # returned once, as the file
        "from matplotlib.pyplot import show; plt.close('all'); plt.figure(figsize=(1, 2), dpi=50); show()",
        "import matplotlib; matplotlib.use('Agg'); plt.figure(figsize=(1, 1), dpi=70); plt.show()",
    )
    seen = [
        [(picture.source, picture.to_pil().size, picture.to_pil().getpixel((1, 1))[:3]) for picture in result.images] for result in results
    ]
    red, blue, lime, white = ((255, 0, 0), (0, 0, 255), (0, 255, 0), (255, 255, 255))
    assert seen[:6] == [
        [("figure", (100, 50), red)],
        [],
        [("figure", (100, 50), blue)],
        [("figure", (100, 50), blue), ("figure", (60, 60), lime)],
        [("a.png", (60, 60), white)],
        [("figure", (50, 100), white)],
    ]
    assert results[1].text == "[1]\n"
    assert results[3].text == "[]\n"
    assert seen[6] == [("figure", (70, 70), white)]


def test_image_files_saved_or_named_come_back_once(room: PoolRunner):
    """Image files that a call saves, or whose names it prints, are returned once."""
    results = room.run_codes(
        "from PIL import Image\nfor name in ('b.jpg', 'a.png'): Image.new('RGB', (30, 30), 'red').save(name)\nprint('a.png')",
        "print('nothing new')",
        "print('see ./a.png, and /nowhere/x.png')",
        "print('image_0.png')",
        "open('broken.png', 'wb').write(b'no image'); open('data.csv', 'w').write('1,2')",
        images={"image_0": NOISE},
    )
    assert [[picture.source for picture in result.images] for result in results] == [["b.jpg", "a.png"], [], ["a.png"], ["image_0.png"], []]
    assert set(results[4].files) == {"broken.png", "data.csv"}
    assert "broken.png: cannot be read" in str(results[4].dropped[0])


def test_limits_on_images_are_told(room: PoolRunner):
    results = room.run_codes(
        "from PIL import Image\nfor k in range(7): Image.new('L', (28, 28)).show()",
        "Image.new('L', (27, 50)).show(); Image.new('L', (28, 2801)).show(); Image.new('L', (2001, 2000)).show()\n"
        "Image.new('L', (0, 9)).show()",
        "for k in range(4): Image.new('L', (28, 28)).show()",
        "import matplotlib.pyplot as plt; plt.figure(figsize=(1000, 1000)); print('still here')",
    )
    assert [len(result.images) for result in results] == [5, 0, 3, 0]
    told = [[str(drop) for drop in result.dropped] for result in results]
    assert told[0] == ["image left out: show: only 5 images are returned per call"] * 2
    assert [words.split(": ")[2] for words in told[1]] == ["27x50 pixels", "28x2801 pixels", "2001x2000 pixels", "0x9 pixels"]
    assert told[2] == ["image left out: show: only 8 images are returned in total"]
    assert results[3].text == "still here\n"


def test_long_output_keeps_its_ends(room: PoolRunner):
    """Output beyond the limit keeps its beginning and its end."""
    results = room.run_codes(
        "print('a' * 600 + 'b' * 600)",
        "import sys\nfor k in range(10**5): print(k, file=sys.stderr)",
        "print('c' * 1000, end='')",
        "print('\\udc00')",
    )
    assert results[0].text == "a" * 500 + "\n[... 201 characters left out ...]\n" + "b" * 499 + "\n"
    assert str(results[0].dropped[0]) == "text left out: 201 characters in the middle; 1000 are kept"
    assert results[1].stderr.startswith("0\n1\n2\n")
    assert results[1].stderr.endswith("\n99999\n")
    assert results[1].dropped[0].what == "stderr"
    assert (results[2].text, results[2].dropped) == ("c" * 1000, ())
    assert results[3].text == "?\n"


@pytest.mark.parametrize(
    ("code", "kind", "message", "line"),
    [
        ("a = 1\nb = a / 0", "ZeroDivisionError", "division by zero", 2),
        ("def f():\n    return {}['k']\n\nf()", "KeyError", "'k'", 2),
        ("import json\njson.loads('{')", "JSONDecodeError", "Expecting property name", 2),
        ("x = 1\nif x\n", "SyntaxError", "expected ':'", 2),
        ("a\0b", "SyntaxError|ValueError", "null bytes", None),
        ("print('\ud800')", "UnicodeEncodeError", "surrogates not allowed", None),
        ("raise SystemExit(3)", "SystemExit", "3", 1),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "", 1),
        ("input()", "EOFError", "EOF", 1),
        ("exec('1/0')", "ZeroDivisionError", "division by zero", 1),
        ("(" * 1000 + ")" * 1000, "SyntaxError|MemoryError|RecursionError", "", None),
        ("def f(): f()\nf()", "RecursionError", "maximum recursion depth", 1),
        ("class E(Exception):\n    def __str__(self): raise MemoryError\nraise E", "E", "cannot be printed", 3),
        ("raise type('N' * 5000, (Exception,), {})('m' * 5000)", "N{100}", "m{2000}$", 1),
    ],
)
def test_errors_have_type_message_and_line(room: PoolRunner, code: str, kind: str, message: str, line: int | None):
    failed, after = room.run_codes(code, "print('fine')")
    assert failed.fault is Fault.CODE
    assert re.fullmatch(kind, failed.error.type)
    assert re.search(message, failed.error.message)
    assert line is None or failed.error.line == line
    assert failed.limit is None
    assert (after.text, after.state_lost) == ("fine\n", False)


def test_a_traceback_shows_the_code_and_not_the_sandbox(room: PoolRunner):
    (result,) = room.run_codes("def inner():\n    raise ValueError('no')\n\ninner()")
    assert result.error.traceback.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<call 1>", line 4, in <module>',
        "    inner()",
        '  File "<call 1>", line 2, in inner',
        "    raise ValueError('no')",
        "ValueError: no",
    ]


def test_a_quiet_exit_is_no_error_and_keeps_the_state(room: PoolRunner):
    results = room.run_codes("x = 5\nimport sys\nsys.exit()", "exit(0)", "print(x)")
    assert [result.fault for result in results] == [Fault.NONE] * 3
    assert results[2].text == "5\n"


def test_what_the_code_does_to_its_streams_ends_with_the_call(room: PoolRunner):
    """Code that replaces or closes its streams affects only its own call."""
    results = room.run_codes(
        "import sys, os, io\nsys.stdout = io.StringIO()\nprint('lost')",
        "print('back')\nos.close(1)\nos.close(2)",
        "print('again')\nsys.stdout.close()",
        "import subprocess\nprint('one', flush=True)\nsubprocess.run(['/bin/sh', '-c', 'echo two; echo three >&2'])\nprint('four')",
    )
    assert [result.text for result in results] == ["", "back\n", "again\n", "one\ntwo\nfour\n"]
    assert results[3].stderr == "three\n"


def test_libraries_are_there_and_agree_with_numbers_by_hand(room: PoolRunner):
    code = """
import asyncio, multiprocessing, tempfile, threading
import cv2, matplotlib, numpy as np, pandas as pd, scipy.stats, sympy
print(int(np.linalg.det(np.array([[2.0, 0], [0, 3]])) + 0.5), sympy.diff(sympy.Symbol('x') ** 3), pd.DataFrame({'a': [1, 2]})['a'].sum())
print(round(scipy.stats.norm.cdf(0), 3), cv2.resize(np.zeros((4, 4), np.uint8), (2, 2)).shape)
print(cv2.cvtColor(np.zeros((2, 2, 3), np.uint8), 6).ndim)
print(asyncio.run(asyncio.sleep(0, 'slept')), tempfile.mkstemp()[1].startswith('/'))
with multiprocessing.get_context('fork').Pool(2) as workers: print(workers.map(abs, [-1, -2]))
thread = threading.Thread(target=print, args=('threaded',)); thread.start(); thread.join()
"""
    (result,) = room.run_codes(code)
    assert result.text == "6 3*x**2 3\n0.5 (2, 2)\n2\nslept True\n[1, 2]\nthreaded\n", result
    assert result.error is None


def test_files_are_fetched_by_name(room: PoolRunner):
    async def calls():
        async with await room.pool.open(files={"in.txt": b"in"}) as box:
            await box.run("import os; os.mkdir('d'); open('d/x', 'wb').write(bytes(range(256))); os.symlink('/usr/lib/os-release', 'link')")
            return await box.fetch_files(["d/x", "in.txt", "missing", "d", "a\0b"]), (await box.run("print(1)")).text

    assert room.run_coroutine(calls()) == ({"d/x": bytes(range(256)), "in.txt": b"in"}, "1\n")


def test_a_child_that_comes_home_does_not_answer_for_its_parent(room: PoolRunner):
    """A forked child that returns from the code of a call does not send a reply."""
    results = room.run_codes(
        "import os\nchild = os.fork()\nif child: os.waitpid(child, 0)\nprint('parent' if child else 'child')", "print('next')"
    )
    assert results[0].text == "child\nparent\n"
    assert results[1].text == "next\n"


def test_usage_is_measured(room: PoolRunner):
    (result,) = room.run_codes(
        "import time\nwhile time.process_time() < 0: pass\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    )
    assert 0.2 <= result.usage.cpu_s <= 0.4
    assert result.usage.wall_s >= 0.2
    assert 50 << 20 < result.usage.memory < 1 << 30
