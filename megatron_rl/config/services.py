"""Servers that a run starts for itself, and the settings that take their addresses."""

import math
from dataclasses import dataclass, field, fields

from megatron_rl.config.checks import require, require_choice
from megatron_rl.config.rollout import TaskSettings

SERVICE = "service:"
"""Begins an address that is that of a service: service:judge."""
NAMES = {"vllm": "judge", "sandbox": "sandbox"}
HIGHEST_PORT = 65535


@dataclass(kw_only=True, slots=True)
class ServiceSettings:
    """A server that starts before the run's first step and ends with it."""

    kind: str = ""
    """What is started: vllm (an OpenAI-compatible server of a model) or sandbox (python -m sandbox serve); empty starts nothing."""
    model: str = ""
    """The model that a server of kind vllm serves, by the name of its service: a folder, or a name on the hub."""
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
    start_s: float = 900.0
    """Seconds until it must answer."""
    elsewhere: bool = False
    """Another job starts it (launch/serve.py, with the same run.dir): the run waits for its address."""

    def require_sound(self, name: str) -> None:
        key = f"services.{name}"
        plain = ServiceSettings()
        given = [each.name for each in fields(self) if getattr(self, each.name) != getattr(plain, each.name)]
        remedy = f"starts no server, and {key}.{''.join(given[:1])} is given; choose vllm or sandbox"
        require(not given or bool(self.kind), f"{key}.kind", self.kind, remedy)
        if not self.kind:
            return
        require_choice(f"{key}.kind", self.kind, ("vllm", "sandbox"))
        remedy = "is needed by kind=vllm, and by no other: the model that it serves"
        require(bool(self.model) == (self.kind == "vllm"), f"{key}.model", self.model, remedy)
        require(0 <= self.port <= HIGHEST_PORT, f"{key}.port", self.port, "is no port; 0 takes a free one")
        require(0 < self.start_s < math.inf, f"{key}.start_s", self.start_s, "must be a number of seconds")
        require(all(gpu >= 0 for gpu in self.gpus), f"{key}.gpus", self.gpus, "are numbers of GPUs, from 0 on")


@dataclass(kw_only=True, slots=True)
class ServicesSettings:
    """Servers that the run starts for itself, and ends; settings that take an address are given service:NAME (docs/running.md)."""

    judge: ServiceSettings = field(default_factory=ServiceSettings)
    listener: ServiceSettings = field(default_factory=ServiceSettings)
    sandbox: ServiceSettings = field(default_factory=ServiceSettings)

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            getattr(self, name).require_sound(name)

    def require_asked(self, task: TaskSettings) -> None:
        """What is given the address of a service is given one that there is, of its kind."""
        asked = [("task.judge.urls", url, "vllm") for url in task.judge.urls] + [("task.sandbox.url", task.sandbox.url, "sandbox")]
        kinds = {each.name: getattr(self, each.name).kind for each in fields(self)}
        for key, url, kind in asked:
            name = service_of(url)
            remedy = f"no such service is started; choose one, services.{name if name in kinds else NAMES[kind]}.kind={kind}"
            require(not name or kinds.get(name) == kind, key, url, remedy)


def service_of(address: str) -> str:
    """The service whose address it is; empty for one of the world's."""
    return address.removeprefix(SERVICE) if address.startswith(SERVICE) else ""
