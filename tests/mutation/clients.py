"""Mutants of megatron_rl/clients/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a judge's refused key is tried again",
        "megatron_rl/clients/endpoint_pool.py",
        'raise AccessDenied(f"{self.name}',
        'raise InfraError(f"{self.name}',
        "tests/rewards/test_judge.py -k key_that",
    ),
    Mutant(
        "a judge's refused key is a warning where another is well",
        "megatron_rl/clients/health_check.py",
        "if greeting.is_denied]",
        "if not greeting.error]",
        "tests/rewards/test_judge_start.py -k key_that",
    ),
    Mutant(
        "a judge on this machine is asked through a proxy",
        "megatron_rl/clients/proxies.py",
        "or _is_own(host) or",
        "or",
        "tests/clients/test_proxies.py -k directly",
    ),
    Mutant(
        "networks of NO_PROXY are not read",
        "megatron_rl/clients/proxies.py",
        "any(address in network for network in _networks(words))",
        "False",
        "tests/clients/test_proxies.py -k who_is",
    ),
    Mutant(
        "a busy server is asked",
        "megatron_rl/clients/endpoint_pool.py",
        "min(rested",
        "max(rested",
        "tests/clients/test_endpoint_pool.py",
    ),
    Mutant(
        "a judge of the run is sent the user's key",
        "megatron_rl/clients/openai.py",
        "return read_token(token_file) if token_file else os",
        "return os",
        "tests/services/test_services_token.py -k key_of_its_own",
    ),
)
