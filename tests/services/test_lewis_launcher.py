"""Tests the settings that launch/lewis.sh makes of its arguments and of each environment variable,
in the calling form of the seed. A stand-in for python reports the number of GPUs, prints the
command to start, and counts steps if COUNTS is set. launch/lewis_pair.sh is tested with a stand-in
that only prints."""

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_rl.config import ListenerSettings, ServiceSettings
from megatron_rl.config.task_options import LewisSpeakerOptions
from megatron_rl.services.service_launcher import check_service
from megatron_rl.services.supervised_process import make_environment
from megatron_rl.tasks.lewis.listener_client import ListenerClient
from megatron_rl.tasks.lewis.server.model_server import build_parser
from megatron_rl_sandbox.token import read_token
from megatron_rl_tools.data import dataset_dict
from megatron_rl_tools.data.dataset_dict import STRING
from tests.rewards.test_listener_client import held
from tests.support.fake_listener import FakeEngineHolder
from tests.support.listener_clients import listener_settings as listening_to
from tests.support.listener_clients import serve_listener

ROOT = Path(__file__).resolve().parents[2]
TELLS = f"""#!/bin/sh
if [ "$1" != -c ]; then printf '%s\\n' "$@"; exit 0; fi
case $2 in *device_count*) echo "$GPUS"; exit 0 ;; esac
if [ -z "$COUNTS" ]; then echo 13; exit 0; fi
PYTHONPATH={ROOT} exec {sys.executable} "$@"
"""
PAIR_TELLS = """#!/bin/sh
if [ "$1" = -m ]; then echo http://up "$@"; exec sleep 60; fi
printf '%s ' "$@"; echo
"""
NONE = "{kind: '', model: '', args: []}"
VARIABLES = (
    "LISTENER_URL", "LISTENER_MODEL", "LISTENER_TIMEOUT", "LISTENER_CHUNK_SIZE", "LISTENER_CHUNK_DELAY", "LISTENER_MAX_RETRIES",
    "LISTENER_BACKOFF_FACTOR", "LISTENER_REWARD_MODE", "NO_PROXY", "DEBUG_MODE", "LOG_PATH", "PICTURES", "EXPERIMENT",
)  # fmt: skip


def laid(tree: Path, script: str, python: str) -> Path:
    """Copy the script and this stand-in for python into the tree, and return the tree."""
    (tree / "launch").mkdir()
    (tree / "launch" / script).write_bytes((ROOT / "launch" / script).read_bytes())
    (tree / ".venv" / "bin").mkdir(parents=True)
    program = tree / ".venv" / "bin" / "python"
    program.write_text(python)
    program.chmod(0o755)
    return tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return laid(tmp_path, "lewis.sh", TELLS)


def called(tree: Path, *words: str, gpus: int = 4, **variables: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = ["bash", str(tree / "launch" / "lewis.sh"), *words]
    return subprocess.run(command, env={**plain, "GPUS": str(gpus), **variables}, capture_output=True, text=True, check=False, timeout=120)


def settings_of(tree: Path, *words: str, gpus: int = 4, processes: int = 4, **variables: str) -> dict[str, str]:
    told = called(tree, *words, gpus=gpus, **variables)
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert lines[:4] == ["launch/launch.py", "--nproc_per_node", str(processes), "launch/train.py"]
    return dict(line.split("=", 1) for line in lines[4:])


def test_the_seeds_words(tree: Path) -> None:
    """The seed's positional arguments become the expected settings."""
    plain = settings_of(tree, "gpu07")
    assert plain == {
        "experiment": "lewis_speaker_7b_h100x4", "run.seed": "23", "task.data.images": "data/emoji", "run.steps": "13",
        "task.data.train": "[data/lewis/speaker:train]", "task.data.eval": "[data/lewis/speaker:test]",
        "task.listener.urls": "[http://gpu07:9000]", "services.listener": NONE,
    }  # fmt: skip
    given = settings_of(tree, "gpu07", "9100", "2", "mine", "7", "batch.prompts_per_step=16", "model.path=7b", PICTURES="p")
    assert given["task.listener.urls"] == "[http://gpu07:9100]" and given["run.seed"] == "7"
    assert given["task.data.train"] == "[mine/speaker:train]" and given["model.path"] == "7b" and given["task.data.images"] == "p"


def test_epochs_become_steps_by_the_rounds_and_the_recipe(tree: Path) -> None:
    """With 100 rounds, four epochs are 25 steps of 16 prompts (the CPU recipe); three epochs are
    9.4 steps of 32 prompts, so 10. Rounds that cannot be counted lead to an error of one line."""
    dataset_dict.write_dataset_dict(
        tree / "mine" / "speaker", {split: [{"solution": "A"}] * 100 for split in ("train", "test")}, {"solution": STRING}
    )
    steps = [
        settings_of(tree, "h", "9000", "4", "mine", COUNTS="1", EXPERIMENT="lewis_cpu")["run.steps"],
        settings_of(tree, "h", "9000", "3", "mine", "23", "batch.prompts_per_step=32", COUNTS="1")["run.steps"],
    ]
    assert steps == ["25", "10"]
    none = called(tree, "h", "9000", "4", "nowhere", COUNTS="1")
    assert none.returncode == 1 and none.stderr.startswith("error: task.data.train=") and none.stderr.count("\n") == 1


def test_without_a_host_the_listener_is_elsewhere_or_its_own(tree: Path) -> None:
    """Without a host, the listener's addresses come from LISTENER_URL. Without either, the launcher
    exits with an error."""
    assert settings_of(tree, "", LISTENER_URL="http://a:1,http://b:1")["task.listener.urls"] == "[http://a:1,http://b:1]"
    seeds = settings_of(tree, "", LISTENER_URL="http://a:1/batch_score,http://b:1/score")
    assert seeds["task.listener.urls"] == "[http://a:1,http://b:1]", "as the game's own has it"
    none = called(tree)
    assert none.returncode == 1 and none.stderr.startswith("error: LISTENER_HOST=: no listener is configured; give its host")


@pytest.mark.parametrize(
    ("gpus", "processes", "service"), [(0, 1, ""), (1, 1, ""), (2, 1, ", gpus: [1]"), (4, 3, ", gpus: [3]"), (8, 7, ", gpus: [7]")]
)
def test_a_listener_of_its_own_has_the_last_gpu_and_the_run_the_others(tree: Path, gpus: int, processes: int, service: str) -> None:
    """A listener that the run starts gets the last GPU, and the ranks get the others. The oracles
    are services/service_launcher.py, which finds no conflict with the run's GPUs, and
    supervised_process.py, which makes only that GPU visible."""
    own = settings_of(tree, "", "9100", gpus=gpus, processes=processes, LISTENER_MODEL="runs/l")
    assert own["services.listener"] == f"{{kind: listener, model: 'runs/l', port: 9100{service}}}"
    assert own["task.listener.urls"] == "[service:listener]" and "task.listener.proxy" not in own
    if service:
        settings = ServiceSettings(**yaml.safe_load(own["services.listener"]))
        check_service("listener", replace(settings, port=0), num_used_gpus=processes, num_gpus=gpus)
        assert make_environment({}, settings.gpus)["CUDA_VISIBLE_DEVICES"] == str(gpus - 1)


@pytest.mark.parametrize(
    ("variables", "key", "value"),
    [
        ({"LISTENER_TIMEOUT": "45"}, "task.listener.timeout_s", "45"),
        ({"LISTENER_CHUNK_SIZE": "9"}, "task.listener.chunk_size", "9"),
        ({"LISTENER_CHUNK_DELAY": "0.5"}, "task.listener.chunk_delay_s", "0.5"),
        ({"LISTENER_MAX_RETRIES": "7"}, "task.listener.max_attempts", "7"),
        ({"LISTENER_BACKOFF_FACTOR": "2.0"}, "task.listener.backoff_s", "2.0"),
        ({"LISTENER_REWARD_MODE": "binary"}, "task.options.accuracy", "binary"),
        ({"DEBUG_MODE": "true", "LOG_PATH": "x.jsonl"}, "task.options.log", "x.jsonl"),
        ({"DEBUG_MODE": "true"}, "task.options.log", "runs/lewis/predictions.jsonl"),
    ],
)
def test_each_variable_is_one_setting(tree: Path, variables: dict[str, str], key: str, value: str) -> None:
    """Each variable sets one existing field of its dataclass, and changes no other setting."""
    plain, given = settings_of(tree, "gpu07"), settings_of(tree, "gpu07", **variables)
    assert given == {**plain, key: value}
    room, name = key.split(".")[1:]
    assert name in {"listener": ListenerSettings, "options": LewisSpeakerOptions}[room].__dataclass_fields__


def test_what_is_true_to_a_service_is_true_to_the_launcher(tree: Path) -> None:
    """The launcher and the services agree on which values of DEBUG_MODE are true. The oracle is the
    services' own command line (model_server.py)."""
    for word in ("TRUE", "Yes", "On", "on", "1", "True", "0", "False", "off", "y", ""):
        log = build_parser("", port=0, variables={"DEBUG_MODE": word, "LOG_PATH": "x"}).get_default("log")
        assert settings_of(tree, "gpu07", DEBUG_MODE=word, LOG_PATH="x").get("task.options.log") == log, word


def test_a_path_alone_logs_nothing(tree: Path) -> None:
    assert settings_of(tree, "gpu07", LOG_PATH="x") == settings_of(tree, "gpu07", DEBUG_MODE="false") == settings_of(tree, "gpu07")


@pytest.mark.parametrize(
    ("excepted", "host", "trusts"),
    [
        ("gpu07", "gpu07", True), ("a,gpu07 ,b", "gpu07", True), (".cluster", "gpu07.cluster", True), ("cluster", "gpu07.cluster", True),
        ("*", "gpu07", True), ("gpu07:9000", "gpu07", True), ("", "gpu07", False), ("gpu08,gpu0", "gpu07", False), ("pu07", "gpu07", False),
    ],
)  # fmt: skip
def test_no_proxy_has_the_seeds_effect(tree: Path, excepted: str, host: str, trusts: bool) -> None:
    """As in the seed, proxies of the environment are considered only if NO_PROXY names the
    listener's host or, with several listeners, the hosts of all of them."""
    plain, given = settings_of(tree, host), settings_of(tree, host, NO_PROXY=excepted)
    assert given == ({**plain, "task.listener.proxy": "true"} if trusts else plain)
    both = settings_of(tree, "", LISTENER_URL=f"http://{host}:1/score,http://other:1", NO_PROXY=excepted)
    assert ("task.listener.proxy" in both) == (excepted == "*")


def test_no_proxy_of_the_environment_takes_the_way_to_a_listener(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although HTTP_PROXY points to a closed port, the listener is reached if NO_PROXY names it,
    names another host or is empty, as in the game."""

    async def version_of(client: ListenerClient) -> str:
        return client.version

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with serve_listener(FakeEngineHolder()) as url:
        for excepted in ("127.0.0.1", "elsewhere", ""):
            monkeypatch.setenv("NO_PROXY", excepted)
            told = settings_of(tree, "", LISTENER_URL=url, NO_PROXY=excepted)
            assert held(listening_to(url, proxy=told.get("task.listener.proxy") == "true"), version_of), "it has said what it is"


def test_a_setting_of_one_run_of_a_pair_reaches_that_run_alone(tmp_path: Path) -> None:
    """A plain setting reaches both runs of a pair, `speaker:` only the speaker's run (here a value
    with blanks, held_out_listeners) and `listener:` only the listener's run. Both modes are tested.
    """
    tree = laid(tmp_path, "lewis_pair.sh", PAIR_TELLS)
    witnesses = "+task.options.held_out_listeners={frozen: http://127.0.0.1:9002}"
    for mode in ("alternating", "simultaneous"):
        words = ["S", "L", str(tmp_path / "out"), "run.steps=2", f"speaker:{witnesses}", "listener:optim.lr=1"]
        told = subprocess.run(
            ["bash", str(tree / "launch" / "lewis_pair.sh"), mode, *words], env={**os.environ, "TURNS": "1"}, capture_output=True,
            text=True, check=True, timeout=60,
        )  # fmt: skip
        heard = tmp_path / "out" / "listener_run.log"
        lines = [*told.stdout.splitlines(), *(heard.read_text().splitlines() if heard.exists() else [])]
        (speaks,) = [line for line in lines if "experiment=lewis_cpu" in line]
        (hears,) = [line for line in lines if "experiment=lewis_listener_cpu" in line]
        assert "run.steps=2" in speaks and witnesses in speaks and "optim.lr" not in speaks
        assert "run.steps=2" in hears and "witnesses" not in hears and " optim.lr=1 " in hears


NANO_ARGS = "--min-pixels 7056 --max-pixels 7100 --max-model-len 512 --kv-cache-mib 64"


@pytest.mark.parametrize("given", ["", "--dtype bfloat16 --max-model-len 2048"])
def test_the_services_of_a_pair_are_started_with_the_users_words(tmp_path: Path, given: str) -> None:
    """Services of a pair start with the user's SERVICE_ARGS or, without any, with arguments for
    nano models. Their own command line parses these arguments."""
    tree = laid(tmp_path, "lewis_pair.sh", PAIR_TELLS)
    variables = {name: value for name, value in os.environ.items() if name != "SERVICE_ARGS"} | ({"SERVICE_ARGS": given} if given else {})
    told = subprocess.run(
        ["bash", str(tree / "launch" / "lewis_pair.sh"), "simultaneous", "S", "L", str(tmp_path / "out")], env=variables, check=True,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    token = tmp_path / "out" / "services.token"
    for kind, model, port in (("listener", "L", "9000"), ("speaker", "S", "9001")):
        _, *words = (tmp_path / "out" / f"{kind}.log").read_text().split()
        taken = ["--trained", "--token-file", str(token)]
        program = f"megatron_rl.tasks.lewis.server.{kind}_app"
        expected = ["-m", program, "--model", model, "--port", port, *taken, *(given or NANO_ARGS).split()]
        assert words == expected and build_parser("", port=0, variables={}).parse_args(words[2:]).trained
    assert read_token(token) and stat.S_IMODE(token.stat().st_mode) == 0o600
    runs = told.stdout + (tmp_path / "out" / "listener_run.log").read_text()
    for key in ("task.speaker", "task.listener", "weight_publish"):
        assert f" {key}.token_file={token} " in runs, key


DYING = """#!/bin/sh
echo $$ >>"$PIDS"
if [ "$1" = -m ]; then
    echo http://up "$@"
    case $2 in *.$DIES) sleep 1; exit 3 ;; esac
    exec sleep 60
fi
case " $* " in
    *" experiment=$ENDS "*) exit "$CODE" ;;
    *" experiment=$STAYS "*) trap '' TERM; exec sleep 60 ;;
esac
trap 'echo asked to end; kill $!; exit 75' TERM
sleep 60 &
wait
"""
SPEAKS, HEARS = "lewis_cpu", "lewis_listener_cpu"


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ({"ENDS": HEARS, "CODE": "137"}, 1, "the listener's run exited with code 137"),
        ({"ENDS": SPEAKS, "CODE": "1"}, 1, "the speaker's run exited with code 1"),
        ({"ENDS": SPEAKS, "CODE": "75"}, 75, "the speaker's run exited with code 75"),
        ({"DIES": "listener_app"}, 1, "the listener exited with code 3"),
        ({"ENDS": SPEAKS, "CODE": "1", "STAYS": HEARS}, 1, "the speaker's run exited with code 1"),
    ],
)
def test_a_half_that_ends_ends_the_pair(how: dict[str, str], code: int, told: str, tmp_path: Path) -> None:
    """If one process of a pair ends, the command ends with an error of one line. The others get
    SIGTERM, one that ignores it is killed, and none is left when the command returns."""
    tree, pids = laid(tmp_path, "lewis_pair.sh", DYING), tmp_path / "pids"
    given = {"ENDS": "", "CODE": "", "DIES": "nobody", "STAYS": "", **how}
    ended = subprocess.run(
        ["bash", str(tree / "launch" / "lewis_pair.sh"), "simultaneous", "S", "L", "out"], check=False, capture_output=True, text=True,
        env={**os.environ, "PIDS": str(pids), "GRACE_S": "2", **given}, timeout=50,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: OUT={tree}/out: {told}; ") and line.endswith("the same command resumes the runs")
    assert "asked to end" in ended.stdout + (tree / "out" / "listener_run.log").read_text() or "STAYS" in how
    assert len(pids.read_text().split()) == 4 and not [pid for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]


def test_a_service_of_a_run_that_is_finished_has_what_it_became(tmp_path: Path) -> None:
    """If a pair resumes after one half has finished, the service of that half loads its final
    weights instead of its initial ones."""
    tree = laid(tmp_path, "lewis_pair.sh", PAIR_TELLS)
    (tree / "out" / "speaker").mkdir(parents=True)
    (tree / "out" / "speaker" / "eval.json").write_text("{}")
    subprocess.run(["bash", str(tree / "launch" / "lewis_pair.sh"), "simultaneous", "S", "L", "out"], check=True, timeout=50)
    models = {kind: (tree / "out" / f"{kind}.log").read_text().split()[4] for kind in ("listener", "speaker")}
    assert models == {"listener": "L", "speaker": "out/speaker/final"}
