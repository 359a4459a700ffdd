"""Servers that a run starts for itself, and the settings that take their addresses."""

import math
from dataclasses import dataclass, field, fields

from megatron_rl.config.checks import require, require_address, require_choice, require_no_key
from megatron_rl.config.rollout import TaskSettings

SERVICE = "service:"
"""Begins an address that is that of a service: service:judge."""
NAMES = {"vllm": "judge", "sandbox": "sandbox", "listener": "listener", "speaker": "speaker"}
"""Kind -> the service that is meant to be one."""
WITH_MODEL = ("vllm", "listener", "speaker")
"""Kinds that serve a model."""
HIGHEST_PORT = 65535


@dataclass(kw_only=True, slots=True)
class ServiceSettings:
    """A server that starts before the run's first step and ends with it."""

    kind: str = ""
    """What is started: vllm (an OpenAI-compatible server of a model), sandbox (python -m sandbox serve), listener or speaker (of the Lewis
    game, python -m megatron_rl.tasks.lewis.server.listener_app); empty starts nothing."""
    model: str = ""
    """The model that a server of kind vllm, listener or speaker serves: a folder, or for vllm a name on the hub."""
    args: list[str] = field(default_factory=list)
    """Further arguments of its command: [--max-model-len, 4096]."""
    command: list[str] = field(default_factory=list)
    """How its command begins, where it has an environment of its own: [judge/bin/python, -m, vllm.entrypoints.openai.api_server]."""
    gpus: list[int] = field(default_factory=list)
    """GPUs that it sees, by their numbers on its node; empty: all that the run sees."""
    host: str = ""
    """Address that it listens at; empty: 127.0.0.1, and with several nodes the address by which they meet."""
    port: int = 0
    """Port that it listens at; 0 takes a free one."""
    startup_timeout_s: float = 900.0
    """Seconds until it must answer."""
    external: bool = False
    """Another job starts it (launch/serve.py, with the same run.dir): the run waits for its address."""

    def require_sound(self, name: str) -> None:
        key = f"services.{name}"
        plain = ServiceSettings()
        given = [each.name for each in fields(self) if getattr(self, each.name) != getattr(plain, each.name)]
        remedy = f"starts no server, and {key}.{''.join(given[:1])} is given; choose {', '.join(NAMES)}"
        require(not given or bool(self.kind), f"{key}.kind", self.kind, remedy)
        if not self.kind:
            return
        require_choice(f"{key}.kind", self.kind, tuple(NAMES))
        require_address(f"{key}.host", self.host)
        require_no_key(f"{key}.args", self.args)
        require_no_key(f"{key}.command", self.command)
        remedy = "holds --token-file: the run makes a service's token, and tells it to whoever asks it; leave it out"
        has_own = self.kind != "vllm" and any(map(_names_token_file, self.args))
        require(not has_own, f"{key}.args", self.args, remedy)
        remedy = f"is needed by kinds {', '.join(WITH_MODEL)}, and by no other: the model that it serves"
        require(bool(self.model) == (self.kind in WITH_MODEL), f"{key}.model", self.model, remedy)
        require(0 <= self.port <= HIGHEST_PORT, f"{key}.port", self.port, "is no port; 0 takes a free one")
        require(0 < self.startup_timeout_s < math.inf, f"{key}.startup_timeout_s", self.startup_timeout_s, "must be a number of seconds")
        require(all(gpu >= 0 for gpu in self.gpus), f"{key}.gpus", self.gpus, "are numbers of GPUs, from 0 on")


@dataclass(kw_only=True, slots=True)
class ServicesSettings:
    """Servers that the run starts for itself, and ends; settings that take an address are given service:NAME (docs/engines.md)."""

    judge: ServiceSettings = field(default_factory=ServiceSettings)
    listener: ServiceSettings = field(default_factory=ServiceSettings)
    sandbox: ServiceSettings = field(default_factory=ServiceSettings)
    speaker: ServiceSettings = field(default_factory=ServiceSettings)

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            getattr(self, name).require_sound(name)

    def require_asked(self, task: TaskSettings) -> None:
        """What is given the address of a service is given one that there is, of its kind."""
        asked = [("task.judge.urls", url, "vllm") for url in task.judge.urls] + [("task.sandbox.url", task.sandbox.url, "sandbox")]
        asked += [("task.listener.urls", url, "listener") for url in task.listener.urls]
        asked += [("task.speaker.urls", url, "speaker") for url in task.speaker.urls]
        kinds = {each.name: getattr(self, each.name).kind for each in fields(self)}
        for key, url, kind in asked:
            name = service_of(url)
            remedy = f"no such service is started; choose one, services.{name if name in kinds else NAMES[kind]}.kind={kind}"
            require(not name or kinds.get(name) == kind, key, url, remedy)
        token, remedy = task.sandbox.token_file, "is for servers of the world; the run makes that of a service, leave it out"
        require(not (token and service_of(task.sandbox.url)), "task.sandbox.token_file", token, remedy)
        for name, partner in (("judge", task.judge), ("listener", task.listener), ("speaker", task.speaker)):
            own, token = [url for url in partner.urls if service_of(url)], partner.token_file
            require(not (token and own), f"task.{name}.token_file", token, remedy)
            require(len(own) in (0, len(partner.urls)), f"task.{name}.urls", partner.urls, "one token is for all; name one service")


def service_of(address: str) -> str:
    """The service whose address it is; empty for one of the world's."""
    return address.removeprefix(SERVICE) if address.startswith(SERVICE) else ""


def _names_token_file(word: str) -> bool:
    """Whether argparse takes it for that option: what is short of a name will do."""
    name = word.partition("=")[0]
    return len(name) > 2 and "--token-file".startswith(name)
