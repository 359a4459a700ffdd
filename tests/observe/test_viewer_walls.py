"""The viewer with run folders of untrusted origin: no file can consume its time or memory or reach
other files, and no other machine or site gets access.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn
from PIL import Image as pil
from starlette.testclient import TestClient
from tokenizers import Regex, Tokenizer, decoders, models

from megatron_rl.observe.recorder import BestWorstRecorder, image_file_name, save_images
from megatron_rl.observe.rollout_store import SCHEMA, read_columns, step_path, write_step
from megatron_rl.observe.viewer import token_decoder
from megatron_rl.observe.viewer.__main__ import main
from megatron_rl.observe.viewer.store import RunFolder, label_folders
from megatron_rl.observe.viewer.token_decoder import TokenDecoder
from megatron_rl.observe.viewer.web_app import create_app
from megatron_rl.services.supervised_process import find_free_port
from megatron_rl_sandbox.connections import LimitedConnection
from tests.observe.test_recorder import picture
from tests.observe.test_viewer import found, rollout
from tests.support import bombs

TOKEN = "Aa0+/=;,\"'\\~!-word"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a run of one step with a rollout store."""
    folder = tmp_path / "run"
    save_images(folder / "rollouts", [rollout(0, 1.0, step=0)])
    write_step(step_path(folder / "rollouts", 0), [rollout(0, 1.0, step=0)], step=0, num_gen_batches=1)
    return folder


@pytest.fixture
def client(folder: Path) -> TestClient:
    return TestClient(create_app(label_folders([folder]), hosts=["testserver"]))


def test_settings_of_aliases_name_no_model(folder: Path, client: TestClient) -> None:
    """A config.yaml of 426 bytes with nested YAML aliases expanded to 10**8 words in model.path
    (security3.md, 8); the one here expands to 10**5. A model.path that is an alias to a list, or a
    list, names no model.
    """
    bombs.yaml_of_aliases(folder / "config.yaml")
    text = (folder / "config.yaml").read_text().partition("a5:")[0]
    for path in ("*a4", "[a, b]", "!!int ''"):
        (folder / "config.yaml").write_text(f"{text}model: {{path: {path}}}\n")
        assert RunFolder(folder).model_path() == "" and not RunFolder(folder).has_fixed_weights()
        assert found(client, "episode", step=0, row_index=0)["sequences"][0]["tokens"][:2] == ["1", "2"]
    (folder / "config.yaml").write_text("model: {path: a}\nrun: {mode: rollout_only}\n")
    assert RunFolder(folder).model_path() == "a" and RunFolder(folder).has_fixed_weights()


@pytest.mark.parametrize("kind", ["text", "link to a text", "link to a picture", "linked folder", "FIFO", "device", "sparse"])
def test_pictures_are_pictures_of_the_folder(kind: str, folder: Path, client: TestClient, tmp_path: Path) -> None:
    """Image requests for text files, links, FIFOs, devices and oversized files give status 404."""
    key = picture(1).key
    file = folder / "rollouts" / image_file_name(key)
    assert client.get(f"/picture/run/{key}.png").status_code == 200
    secret = tmp_path / "private" / f"{key}.png"
    secret.parent.mkdir()
    pil.new("RGB", (3, 3)).save(secret)
    if kind == "linked folder":
        file.parent.rename(tmp_path / "images")
        file.parent.symlink_to(secret.parent)
    else:
        file.unlink()
    if kind == "text":
        file.write_text("root:x:0:0")
    elif kind.startswith("link to"):
        file.symlink_to("/etc/passwd" if kind == "link to a text" else secret)
    elif kind == "FIFO":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "sparse":
        bombs.write_sparse_file(file, 1 << 40, b"\x89PNG\r\n\x1a\n")
    assert client.get(f"/picture/run/{key}.png").status_code == 404
    assert (key in found(client, "episode", step=0, row_index=0)["missing"]) == (kind not in ("text", "sparse"))


@pytest.mark.parametrize("key", ["x" * 65, "x" * 300, "../../../etc/passwd", "a b", "\u0660", "", "a/b", "a\\u0000"])
def test_a_key_that_names_no_file(key: str, tmp_path: Path) -> None:
    """A recorded rollout with an invalid image key, such as a path or a name that is too long, is
    omitted and reported.
    """
    folder = tmp_path / "run"
    BestWorstRecorder(folder, num_best=1, num_worst=1).record(4, [rollout(sample, float(sample), step=4) for sample in range(2)])
    lines = folder / "rollouts" / "step_000004.jsonl"
    best, worst = lines.read_text().splitlines()
    lines.write_text(f"{best.replace(picture(1).key, key)}\n{worst}\n")
    app = TestClient(create_app(label_folders([folder]), hosts=["testserver"]))
    told = found(app, "rollouts")
    assert [row["row_index"] for row in told["rows"]] == [1] and "not an image key" in told["skipped"][0]
    assert app.get("/api/episode", params={"run": "run", "step": 4, "row_index": 0}).status_code == 404
    assert app.get("/api/episode", params={"run": "run", "step": 10**300, "row_index": 0}).status_code == 404
    assert found(app, "episode", step=4, row_index=1)["sample_index"] == 0


def test_metrics_without_an_end(folder: Path, client: TestClient) -> None:
    """With a line of 10 GiB, a number that no float can hold, or a FIFO in place of metrics.jsonl,
    everything before it is shown and the rest is reported.
    """
    path = folder / "metrics.jsonl"
    bombs.write_sparse_file(path, 10 << 30, b'{"step": 0, "loss": 1}\n')
    assert [line["step"] for line in found(client, "curves")] == [0]
    assert client.get("/api/runs").json()[0]["skipped"] == [f"{path} line 2: has more than {1 << 20} bytes"]
    path.write_text(f'{{"step": {"9" * 400}}}\n{{"step": 1, "loss": {"9" * 400}}}\n{{"step": 2}}\n')
    assert [line["step"] for line in found(client, "curves")] == [2]
    path.unlink()
    os.mkfifo(path)
    assert found(client, "curves") == []
    assert client.get("/api/runs").json()[0]["skipped"] == [f"{path}: is not a regular file"]


def test_a_step_of_another_writer(folder: Path, client: TestClient) -> None:
    """A row group with more than 64 rows, which this program never writes, is refused: a
    dictionary-encoded text could expand to a million rows. FIFOs are refused too.
    """
    table = pq.read_table(step_path(folder / "rollouts", 0))
    pq.write_table(pa.concat_tables([table] * 65), step_path(folder / "rollouts", 1))
    os.mkfifo(step_path(folder / "rollouts", 2))
    os.mkfifo(folder / "rollouts" / "step_000003.jsonl")
    told = found(client, "rollouts")
    assert told["total"] == 1 and [line.rpartition("/")[2] for line in told["skipped"]] == [
        "step_000001.parquet: has a row group of 65 rows, more than 64: it was not written by this program",
        "step_000002.parquet: is not a regular file",
        "step_000003.jsonl: is not a regular file",
    ]
    for step in (1, 2, 3):
        assert client.get("/api/episode", params={"run": "run", "step": step, "row_index": 0}).status_code == 404


def tokenizer(path: Path, words: list[str], decoder: decoders.Decoder) -> Path:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    made.decoder = decoder
    made.save(str(path))
    return path


SLOW = Regex(r"(?:a|b|ab)*[!?][^!]")


def test_a_tokenizer_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    """Decoding stops at the time limit of 3 s and is not tried again. The decoder's regular
    expression backtracks, so that one token takes half a second (security3.md, 14).
    """
    decoder = TokenDecoder(tokenizer(tmp_path / "tokenizer.json", ["ab" * 20 + "!!"], decoders.Replace(SLOW, "")), timeout_s=3)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{tmp_path}/tokenizer.json is not used: decoding its tokens took longer than 3 s$"):
            decoder.decode([[0]] * 1000)
    assert time.monotonic() - began < 15 and decoder._process is None


def test_a_panic_ends_the_tokenizers_process_alone(tmp_path: Path) -> None:
    """A Rust panic in the tokenizer is not an Exception in Python. It becomes a ValueError that
    names it and ends only the decoder's process.
    """
    file = tokenizer(tmp_path / "tokenizer.json", ["ab" * 200 + "!!"], decoders.Replace(SLOW, ""))
    decoder = TokenDecoder(file, timeout_s=60)
    with pytest.raises(ValueError, match=rf"^{file} cannot be read \(pyo3_runtime.PanicException: .*\)$"):
        decoder.decode([[0]])
    assert decoder._process is None


def test_words_have_a_limit_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded token texts of more than MAX_RESPONSE_BYTES are refused."""
    monkeypatch.setattr(token_decoder, "MAX_RESPONSE_BYTES", 4000)
    file = tokenizer(tmp_path / "tokenizer.json", ["word", "x" * 3000], decoders.Fuse())
    decoder = TokenDecoder(file, timeout_s=60)
    assert decoder.decode([[1], [0, 0], []]) == ["x" * 3000, "wordword", ""]
    with pytest.raises(ValueError, match=rf"^{file} cannot be read \(the decoded texts exceed 4000 bytes\)$"):
        decoder.decode([[1], [1]])


def test_a_tokenizer_that_has_changed_is_read_again(folder: Path, client: TestClient) -> None:
    """A tokenizer that could not be read is read again after its file has changed. Until then,
    tokens are shown as numbers.
    """
    (folder / "final").mkdir()
    (folder / "final" / "tokenizer.json").write_text("{}")
    told = found(client, "episode", step=0, row_index=0)
    assert "final/tokenizer.json cannot be read" in told["no_words"] and told["sequences"][0]["tokens"][0] == "1"
    words = ["zero", "one", "two", "three", "four", "five"]
    tokenizer(folder / "final" / "tokenizer.json", words, decoders.Fuse())
    told = found(client, "episode", step=0, row_index=0)
    assert (told["no_words"], told["sequences"][0]["tokens"][:2]) == ("", ["one", "two"])


def test_a_token_is_asked_for(folder: Path) -> None:
    """Every route requires the token: in a header, or for browsers in a cookie that neither scripts
    nor other sites can read.
    """
    app = create_app(label_folders([folder]), hosts=["testserver"], token=TOKEN)
    client = TestClient(app, follow_redirects=False)
    routes = (
        "/",
        "/viewer.js",
        "/api/runs",
        "/api/curves?run=run",
        f"/picture/run/{picture(1).key}.png",
        "/nothing",
        "/?token=",
        "/?token=x",
    )
    for route in routes:
        for said in ({}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN}, {"Cookie": f"megatron_rl_viewer={'0' * 64}"}):
            refused = client.get(route, headers=said)
            assert refused.status_code == 401 and "content-security-policy" in refused.headers and "run" not in refused.text
    assert client.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert client.get("/?token=x", headers={"Host": "evil.example"}).status_code == 400
    entered = client.get("/", params={"token": TOKEN})
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    assert [client.get(route).status_code for route in routes[:5]] == [200] * 5  # the client has the cookie now


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "error: --host=0.0.0.0: other machines can reach this address; give --token-file=FILE, or use ssh -L\n"),
        (["--token-file", "{tmp}/none"], "error: --token-file={tmp}/none: [Errno 2] No such file or directory: '{tmp}/none'\n"),
        (
            ["--token-file", "/dev/null"],
            "error: --token-file=/dev/null: a token must consist of 16 to 256 characters without spaces; create one: ",
        ),
    ],
)
def test_nobody_else_without_a_token(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serving on all interfaces is refused without a valid token file."""
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: pytest.fail("the page is served"))
    (tmp_path / "metrics.jsonl").touch()
    given = [word.format(tmp=tmp_path) for word in words]
    assert main([str(tmp_path), "--host", "0.0.0.0", "--port", "0", *given]) == 2
    assert capsys.readouterr().err.startswith(said.format(tmp=tmp_path))


@pytest.fixture
def url(folder: Path, tmp_path: Path) -> Iterator[str]:
    """Start the viewer's command on all interfaces with a memory limit of 1 GB; yield its URL."""
    port = find_free_port("127.0.0.1")
    (tmp_path / "token").write_text(TOKEN)
    words = [str(folder), "--host", "0.0.0.0", "--port", str(port), "--token-file", str(tmp_path / "token"), "--memory-gb", "1"]
    page = subprocess.Popen([sys.executable, "-m", "megatron_rl.observe.viewer", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout.readline() == f"http://0.0.0.0:{port}/\n"
        yield f"http://127.0.0.1:{port}"
        assert page.poll() is None, "it has ended"
    finally:
        page.kill()
        page.wait()


def test_a_file_that_stands_for_more_than_the_memory(folder: Path, url: str) -> None:
    """A file of 8 KB has 64 rows that all share one text of 64 MiB. The viewer reports the file and
    continues to serve. The viewer runs as a separate command with a token.
    """
    bomb = step_path(folder / "rollouts", 1)
    table = pq.read_table(step_path(folder / "rollouts", 0))
    table = pa.concat_tables([table] * 64)
    said = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array(["x" * (64 << 20)]))
    table = table.set_column(SCHEMA.get_field_index("responses"), "responses", said)
    pq.write_table(table, bomb, compression="zstd", store_schema=False)
    assert bomb.stat().st_size < 1 << 20 and read_columns(bomb, ["row_index"]).num_rows == 64
    with httpx.Client(trust_env=False, timeout=60, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        told = client.get(f"{url}/api/rollouts", params={"run": "run"}).json()
        assert told["total"] == 1 and len(told["skipped"]) == 1 and told["skipped"][0].startswith(f"{bomb}: ")
        assert client.get(f"{url}/api/runs").json()[0]["rollouts"] == 1
    assert httpx.get(f"{url}/api/runs", trust_env=False).status_code == 401


@pytest.mark.parametrize(
    ("site", "mode", "code"),
    [
        ("cross-site", "no-cors", 403), ("same-site", "cors", 403), ("cross-site", "", 403), ("cross-site", "navigate", 200),
        ("same-origin", "cors", 200), ("none", "navigate", 200), ("", "", 200),
    ],
)  # fmt: skip
def test_other_pages_embed_nothing(site: str, mode: str, code: int, client: TestClient) -> None:
    """Other sites cannot embed the page's images, which would reveal which images exist and their
    sizes. Following a link to the page works.
    """
    headers = {name: value for name, value in (("Sec-Fetch-Site", site), ("Sec-Fetch-Mode", mode)) if value}
    for route in ("/", "/api/runs", f"/picture/run/{picture(1).key}.png"):
        answer = client.get(route, headers=headers)
        assert answer.status_code == code and "content-security-policy" in answer.headers


def test_the_page_serves_with_the_bounds_of_our_servers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The viewer serves with LimitedConnection and a header timeout of 10 s. Without them, a client
    that sends its header slowly held a connection forever (benchmarks/probes). tests/sandbox tests
    the class itself.
    """
    served: list[uvicorn.Server] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, **_: served.append(server))
    monkeypatch.setattr("megatron_rl.observe.viewer.__main__.limit_memory", lambda gb: None)
    assert main([str(folder), "--port", "0"]) == 0
    assert served[0].config.http.func is LimitedConnection and served[0].config.http.keywords["registry"].header_timeout_s == 10.0
