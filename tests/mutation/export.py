"""Mutants of megatron_rl/export/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "links of strangers are exported",
        "megatron_rl/export/sft_transcripts.py",
        "if (folder / name).is_symlink():",
        "if not name:",
        "tests/io/test_bounded_files.py -k exported",
    ),
    Mutant(
        "a transcript holds a reply that was cut off",
        "megatron_rl/export/chat_messages.py",
        "last - first >= max_new_tokens and",
        "last - first > max_new_tokens and",
        "tests/export/test_sft_transcripts.py -k cut_off",
    ),
    Mutant(
        "a token's reward on the board leaves the outcome out",
        "megatron_rl/export/rl_logging_board.py",
        "rewards[-1] += rollout.outcome_reward",
        "rewards[-1] += 0.0",
        "tests/export/test_rl_logging_board.py",
    ),
    Mutant(
        "a NUL character is written into transcripts",
        "megatron_rl/export/chat_messages.py",
        'if "\\0" in words:',
        "if not words:",
        "tests/export/test_sft_transcripts.py -k go_along",
    ),
    Mutant(
        "of equal rollouts the earlier is exported",
        "megatron_rl/export/sft_transcripts.py",
        "sorted(of_example.values(), reverse=True)[:max_per_example]",
        "sorted(of_example.values(), key=lambda each: -each.reward)[:max_per_example]",
        "tests/export/test_sft_transcripts.py -k equal_rollouts",
    ),
    Mutant(
        "a rollout of exactly the least reward is left out",
        "megatron_rl/export/sft_transcripts.py",
        'if row["reward"] >= min_reward:',
        'if row["reward"] > min_reward:',
        "tests/export/test_sft_transcripts.py -k equal_rollouts",
    ),
    Mutant(
        "the board keeps files of an earlier export",
        "megatron_rl/export/rl_logging_board.py",
        "        stale.unlink()\n",
        "        pass\n",
        "tests/export/test_rl_logging_board.py -k bounded",
    ),
)
