"""Mutants of megatron_rl/entrypoints/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "what was done is lost where a key is refused",
        "megatron_rl/entrypoints/train.py",
        "    except RunDenied:\n        context.save_progress()\n",
        "    except RunDenied:\n",
        "tests/rollout/test_manager.py -k key_was_refused",
    ),
    Mutant(
        "what had failed is scored",
        "megatron_rl/entrypoints/rescore.py",
        "if not rollout.is_scored:",
        "if rollout.filter_reason:",
        "tests/entrypoints/test_rescore.py -k rule",
    ),
    Mutant(
        "every chunk of an evaluation has the first one's seeds",
        "megatron_rl/entrypoints/evaluate.py",
        "run_examples(examples, first_group=first)",
        "run_examples(examples, first_group=0)",
        "tests/entrypoints/test_evaluate.py",
    ),
    Mutant(
        "a judge's old verdicts stay in what is scored anew",
        "megatron_rl/entrypoints/rescore.py",
        "reward_terms={}, verdicts=[], scoring_s",
        "reward_terms={}, scoring_s",
        "tests/entrypoints/test_rescore.py -k by_rule",
    ),
    Mutant(
        "a rollout that fails anew counts as changed",
        "megatron_rl/entrypoints/rescore.py",
        "            if one is not None and other is not None:",
        "            if one is not None:",
        "tests/entrypoints/test_rescore.py -k by_a_judge",
    ),
)
