"""Settings of the servers that a run starts itself, and validation of references to them."""

import math
from dataclasses import dataclass, field, fields

from megatron_rl.config.checks import require, require_address, require_choice, require_no_key
from megatron_rl.config.rollout import TaskSettings

SERVICE = "service:"
"""Prefix of an address that refers to a service of the run, as in service:judge."""
NAMES = {"vllm": "judge", "sandbox": "sandbox", "listener": "listener", "speaker": "speaker"}
"""Maps each kind of server to its default service name."""
WITH_MODEL = ("vllm", "listener", "speaker")
"""Kinds of servers that serve a model."""
HIGHEST_PORT = 65535


@dataclass(kw_only=True, slots=True)
class ServiceSettings:
    """A server that is started before the first step of a run and stopped when the run ends."""

    kind: str = ""
    """Kind of server: vllm (OpenAI-compatible model server), sandbox (python -m
    megatron_rl_sandbox serve), listener or speaker (Lewis game, megatron_rl.tasks.lewis.server);
    empty starts no server."""
    model: str = ""
    """Directory of the model for a vllm, listener or speaker server. A vllm server also accepts a
    model name on the Hugging Face Hub."""
    args: list[str] = field(default_factory=list)
    """Additional command-line arguments of the server, e.g. [--max-model-len, 4096]."""
    command: list[str] = field(default_factory=list)
    """Command that starts the server in its own Python environment, e.g. [judge/bin/python, -m,
    vllm.entrypoints.openai.api_server]; the run appends the server's arguments. Empty uses the
    trainer's environment."""
    gpus: list[int] = field(default_factory=list)
    """Indices of the GPUs on the server's node that the server may use; empty uses all GPUs visible
    to the run."""
    host: str = ""
    """Address on which the server listens; empty uses 127.0.0.1 on a single node and the rendezvous
    address on several nodes."""
    port: int = 0
    """Port on which the server listens; 0 chooses a free port."""
    startup_timeout_s: float = 900.0
    """Maximum startup time of the server, in seconds."""
    external: bool = False
    """Set this if another job starts the server (launch/serve.py with the same run.dir); the run
    then waits for the server's address."""

    def require_sound(self, name: str) -> None:
        """Raise ValueError if the settings are invalid. `name` is the key in `services`."""
        key = f"services.{name}"
        plain = ServiceSettings()
        given = [each.name for each in fields(self) if getattr(self, each.name) != getattr(plain, each.name)]
        remedy = f"starts no server, but {key}.{''.join(given[:1])} is set; choose {', '.join(NAMES)}"
        require(not given or bool(self.kind), f"{key}.kind", self.kind, remedy)
        if not self.kind:
            return
        require_choice(f"{key}.kind", self.kind, tuple(NAMES))
        require_address(f"{key}.host", self.host)
        require_no_key(f"{key}.args", self.args)
        require_no_key(f"{key}.command", self.command)
        remedy = "contains --token-file: the run creates the token of a service and passes the token to the clients; remove this option"
        has_own = self.kind != "vllm" and any(map(_names_token_file, self.args))
        require(not has_own, f"{key}.args", self.args, remedy)
        remedy = f"is required for the kinds {', '.join(WITH_MODEL)} and must be empty for others"
        require(bool(self.model) == (self.kind in WITH_MODEL), f"{key}.model", self.model, remedy)
        require(0 <= self.port <= HIGHEST_PORT, f"{key}.port", self.port, "is not a valid port; 0 selects a free port")
        require(
            0 < self.startup_timeout_s < math.inf,
            f"{key}.startup_timeout_s",
            self.startup_timeout_s,
            "must be a positive, finite number of seconds",
        )
        require(all(gpu >= 0 for gpu in self.gpus), f"{key}.gpus", self.gpus, "must contain non-negative GPU indices")


@dataclass(kw_only=True, slots=True)
class ServicesSettings:
    """Servers that the run starts and stops; address settings refer to a server as service:NAME."""

    judge: ServiceSettings = field(default_factory=ServiceSettings)
    listener: ServiceSettings = field(default_factory=ServiceSettings)
    sandbox: ServiceSettings = field(default_factory=ServiceSettings)
    speaker: ServiceSettings = field(default_factory=ServiceSettings)

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            getattr(self, name).require_sound(name)

    def require_asked(self, task: TaskSettings) -> None:
        """Raise ValueError if `task` refers to a missing service or to a service of the wrong kind.

        A client of a service must not set a token file, because the run creates the token of each
        service. A client must not mix URLs that refer to services with other URLs.
        """
        asked = [("task.judge.urls", url, "vllm") for url in task.judge.urls] + [("task.sandbox.url", task.sandbox.url, "sandbox")]
        asked += [("task.listener.urls", url, "listener") for url in task.listener.urls]
        asked += [("task.speaker.urls", url, "speaker") for url in task.speaker.urls]
        kinds = {each.name: getattr(self, each.name).kind for each in fields(self)}
        for key, url, kind in asked:
            name = service_of(url)
            remedy = f"no such service is configured; set services.{name if name in kinds else NAMES[kind]}.kind={kind}"
            require(not name or kinds.get(name) == kind, key, url, remedy)
        token, remedy = task.sandbox.token_file, "must be empty for a service, because the run creates its token; remove this setting"
        require(not (token and service_of(task.sandbox.url)), "task.sandbox.token_file", token, remedy)
        for name, partner in (("judge", task.judge), ("listener", task.listener), ("speaker", task.speaker)):
            own, token = [url for url in partner.urls if service_of(url)], partner.token_file
            require(not (token and own), f"task.{name}.token_file", token, remedy)
            require(
                len(own) in (0, len(partner.urls)),
                f"task.{name}.urls",
                partner.urls,
                "must not mix services with other servers, because all URLs share one token",
            )


def service_of(address: str) -> str:
    """Return the service name in `address`, or "" if `address` does not start with SERVICE."""
    return address.removeprefix(SERVICE) if address.startswith(SERVICE) else ""


def _names_token_file(word: str) -> bool:
    """Return True if argparse interprets `word` as --token-file or as an abbreviation of it."""
    name = word.partition("=")[0]
    return len(name) > 2 and "--token-file".startswith(name)
