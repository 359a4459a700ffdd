"""Mutants of megatron_rl/evaluation/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "an endpoint's words are lost",
        "megatron_rl/evaluation/endpoint_policy.py",
        'return truncate_at_stop(choice.message.content or "", sampling.stop)',
        'return ""',
        "tests/evaluation/test_endpoint_policy.py -k counted",
    ),
    Mutant(
        "an endpoint forgets what it said",
        "megatron_rl/evaluation/endpoint_policy.py",
        'self._messages.append({"role": "assistant", "content": text})',
        "pass",
        "tests/evaluation/test_endpoint_policy.py -k conversation",
    ),
    Mutant(
        "an evaluation goes on with other weights",
        "megatron_rl/evaluation/results_directory.py",
        "if weights == fingerprint_weights(settings)",
        "if weights",
        "tests/entrypoints/test_evaluate.py",
    ),
    Mutant(
        "an interval takes episodes of an example for independent",
        "megatron_rl/evaluation/evaluation_report.py",
        "[sum(each) / len(each) for each in solved]",
        "[value for each in solved for value in each]",
        "tests/evaluation/test_statistics.py",
    ),
)
