"""Addresses and commands contain no secrets: settings with a secret cannot be built, so no file,
error or tracker can reveal it.
"""

import traceback

import pytest
from omegaconf import OmegaConf

from megatron_rl.cli.config_errors import setting_keys
from megatron_rl.config import JudgeSettings, SandboxSettings, ServiceSettings, ServicesSettings, Settings
from megatron_rl.launcher.compose import compose_settings

SECRET = "pa55"
ADDRESSES = [key for key in setting_keys(Settings) if key.rpartition(".")[2] in ("url", "urls", "host")]
BAD = [
    f"http://me:{SECRET}@judge:1/v1",
    f"http://{SECRET}@judge/v1",
    f"http://me:{SECRET}/x@judge:1/v1",
    f"http://judge:1/v1?key={SECRET}",
    f"http://judge:1/v1#{SECRET}",
    f"me:{SECRET}@judge",
]


def test_what_takes_an_address_is_known() -> None:
    hosts = {f"services.{name}.host" for name in ("judge", "listener", "sandbox", "speaker")}
    asked = {"distill.server.urls", "task.judge.urls", "task.listener.urls", "task.speaker.urls", "task.sandbox.url"}
    assert set(ADDRESSES) == {"weight_publish.urls", "engine.urls", "evaluation.urls", *asked, *hosts}


@pytest.mark.parametrize("key", ADDRESSES)
@pytest.mark.parametrize("bad", BAD)
def test_an_address_with_a_secret_is_refused(key: str, bad: str) -> None:
    """The error names the key and the fix, and the whole traceback does not contain the secret."""
    service = {"kind": "vllm", "model": "7b"} if "sandbox" not in key else {"kind": "sandbox"}
    given = OmegaConf.create({"services": {key.split(".")[1]: service}} if key.startswith("services") else {})
    OmegaConf.update(given, key, ["http://well:1/v1", bad] if key.endswith("urls") else bad)
    chosen = OmegaConf.merge(OmegaConf.structured(Settings), given, {"task": {"name": "vqa"}, "run": {"dir": "x"}, "model": {"path": "x"}})
    with pytest.raises(ValueError, match=rf"^{key}=\.\.\.: contains @, \? or #; give only scheme, host, port and path") as caught:
        OmegaConf.to_object(chosen)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("word", ["--api-key", f"--api-key={SECRET}", f"--api_key={SECRET}", "--api-ke"])
@pytest.mark.parametrize("place", ["args", "command"])
def test_a_key_in_a_command_is_refused(word: str, place: str) -> None:
    with pytest.raises(ValueError, match=rf"^services.judge.{place}=\.\.\.: contains --api-key.*the run creates a key itself") as caught:
        ServicesSettings(judge=ServiceSettings(kind="vllm", model="7b", **{place: [word, SECRET]}))
    assert SECRET not in str(caught.value)


def test_what_is_no_secret_is_taken() -> None:
    urls = ["http://10.0.0.1:40123/v1", "https://judge/v1", "http://[::1]:8/v1", "service:judge"]
    assert JudgeSettings(urls=urls).urls == urls and SandboxSettings(url="http://box:8080").url == "http://box:8080"
    args = ["--api-server-count", "2", "--max-model-len", "4096"]
    assert ServicesSettings(judge=ServiceSettings(kind="vllm", model="7b", args=args, host="::1")).judge.args == args
    assert compose_settings(["experiment=numberline_grpo_cpu", "model.path=x", "run.dir=x"])
