"""Mutants of megatron_rl/config/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a service's refusal names a key that there is not",
        "megatron_rl/config/services.py",
        'f"{key}.startup_timeout_s"',
        'f"{key}.start_s"',
        "tests/config/test_config.py -k key_that_exists",
    ),
    Mutant(
        "servers compute on the GPUs of the ranks",
        "megatron_rl/config/rollout.py",
        "firsts = [num_ranks + number * self.tp",
        "firsts = [number * self.tp",
        "tests/services/test_engine_servers.py -k behind",
    ),
    Mutant(
        "the engine of routing replay records no experts",
        "megatron_rl/config/__init__.py",
        '        self.engine.return_routed_experts |= self.algo.routing_replay == "rollout"\n',
        "",
        "tests/preflight/test_settings.py -k routing_replay",
    ),
    Mutant(
        "experts of a dense model are replayed",
        "megatron_rl/preflight/settings.py",
        '    require(has_experts or algo.routing_replay == "none", "algo.routing_replay", algo.routing_replay, remedy)\n',
        "",
        "tests/preflight/test_settings.py -k routing_replay",
    ),
    Mutant(
        "losses of routers of a dense model are accepted",
        "megatron_rl/preflight/settings.py",
        '        require(has_experts or coef == 0, f"algo.{key}", coef, remedy)\n',
        "        pass\n",
        "tests/preflight/test_settings.py -k losses_of_routers",
    ),
)
