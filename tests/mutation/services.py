"""Mutants of megatron_rl/services/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a judge is believed without a proof",
        "megatron_rl/services/address.py",
        "if is_gated and not has_proven_token",
        "if not is_gated and not has_proven_token",
        "tests/services/test_services_token.py -k proves_itself",
    ),
    Mutant(
        "a proof is asked of servers without the gate",
        "megatron_rl/services/address.py",
        'return settings.kind != "vllm" or not settings.command',
        'return settings.kind != "vllm" or bool(settings.command)',
        "tests/services/test_services_token.py -k proves_itself",
    ),
    Mutant(
        "a proof is asked below the path of an address",
        "megatron_rl/services/address.py",
        'urljoin(url, "/health")',
        'f"{url}/health"',
        "tests/services/test_services_token.py -k proves_itself",
    ),
    Mutant(
        "a stranger at a port ends the wait for a service elsewhere",
        "megatron_rl/services/service_launcher.py",
        "if refusal and not self._settings.external:",
        "if refusal:",
        "tests/services/test_services.py -k another_job",
    ),
    Mutant(
        "a server that hangs is left beside the one that takes its place",
        "megatron_rl/services/engine_servers.py",
        "        engine.process.kill()\n",
        "",
        "tests/services/test_engine_servers.py -k hangs",
    ),
    Mutant(
        "a server is started again for ever",
        "megatron_rl/services/engine_servers.py",
        "engine.process is None and engine.consecutive_exits <= MAX_RESTARTS and",
        "engine.process is None and",
        "tests/services/test_engine_servers.py -k rests_grow",
    ),
    Mutant(
        "a service's token goes to whoever has its port",
        "megatron_rl/services/address.py",
        "if is_gated and not has_proven_token(",
        "if not is_gated and not has_proven_token(",
        "tests/services/test_services_token.py -k port_first",
    ),
    Mutant(
        "servers inherit the user's keys",
        "megatron_rl/services/supervised_process.py",
        " and name not in USER_KEY_VARIABLES",
        "",
        "tests/services/test_services_token.py -k port_first",
    ),
    Mutant(
        "a free port is one that connections use",
        "megatron_rl/services/supervised_process.py",
        "for port in tried:",
        "for port in ():",
        "tests/services/test_services.py -k free_port",
    ),
)
