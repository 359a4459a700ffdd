"""Mutants of megatron_rl/explain/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a layer is blamed for what is added to its output in place",
        "megatron_rl/explain/layer_outputs.py",
        "return value.detach().float().cpu().clone()",
        "return value.detach().float().cpu()",
        "tests/explain/test_step_explanation.py -k trainer_does_is_named",
    ),
    Mutant(
        "pictures before the last token that agrees are suspected, and later ones are not",
        "megatron_rl/explain/hypotheses.py",
        "if last_right < place <= first + 1:",
        "if place <= last_right:",
        "tests/explain/test_step_explanation.py -k second_is_found",
    ),
    Mutant(
        "the first suspect that holds is named, however loose the bound",
        "megatron_rl/explain/hypotheses.py",
        "if mean <= MIN_GAP_RATIO * least)",
        "if name)",
        "tests/explain/test_bfloat16.py -k best_is_named",
    ),
    Mutant(
        "a token within the bound of bfloat16 proves that its pictures are right",
        "megatron_rl/explain/hypotheses.py",
        "if row < first and case.tolerance.is_per_token)",
        "if row < first)",
        "tests/explain/test_bfloat16.py -k rounded_numbers",
    ),
    Mutant(
        "a recorded picture need not have the pixels of its key",
        "megatron_rl/explain/sequence_checks.py",
        "elif found != key:",
        "elif not found:",
        "tests/explain/test_step_explanation.py -k swapped_or_resized",
    ),
)
