"""Mutants of megatron_rl/batching/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "what was sampled is shared",
        "megatron_rl/batching/minibatches.py",
        "min(common_prefix(before, after), each.prompt_length)",
        "min(common_prefix(before, after), each.prompt_length + 1)",
        "tests/batching/test_packing.py -k tree",
    ),
    Mutant(
        "another picture is shared",
        "megatron_rl/batching/minibatches.py",
        "-1 - numbers.setdefault(key, len(numbers))",
        "-1",
        "tests/batching/test_packing.py -k shared",
    ),
    Mutant(
        "a shared prompt is counted again",
        "megatron_rl/batching/minibatches.py",
        "num_added_tokens=each.num_tokens - length",
        "num_added_tokens=each.num_tokens",
        "tests/batching/test_packing.py",
    ),
    Mutant(
        "what is read back is a token late",
        "megatron_rl/batching/packing.py",
        "enumerate(values[first:last], origin.start + 1)",
        "enumerate(values[first:last], origin.start)",
        "tests/batching/test_packing.py",
    ),
    Mutant(
        "advantages taken from the context's start",
        "megatron_rl/batching/packing.py",
        "slice(origin.start + 1, origin.start + 1 + last - first)",
        "slice(1, 1 + last - first)",
        "tests/batching/test_packing.py",
    ),
    Mutant(
        "a context that others leave is several",
        "megatron_rl/batching/packing.py",
        "sequence_R=batch.sequence_T[rows_R]",
        "sequence_R=torch.searchsorted(batch.cu_seqlens_S1[1:], rows_R.int(), right=True)",
        "tests/batching/test_packing.py -k tree",
    ),
    Mutant(
        "dropped rollouts are packed",
        "megatron_rl/batching/minibatches.py",
        "if rollout.is_trained_on and rollout.num_sampled",
        "if rollout.is_scored and rollout.num_sampled",
        "tests/batching/test_packing.py",
    ),
    Mutant(
        "idle contexts take their share along",
        "megatron_rl/batching/minibatches.py",
        "denominator=moving[0].denominator + spare",
        "denominator=moving[0].denominator",
        "tests/batching/test_packing.py",
    ),
    Mutant(
        "turns of a context are one",
        "megatron_rl/batching/packing.py",
        "(rows_R.diff(prepend=rows_R.new_full((1,), -2)) != 1)",
        "(rows_R.diff(prepend=rows_R.new_full((1,), -2)) > 99)",
        "tests/batching/test_packing.py",
    ),
    Mutant(
        "a later look at a token is taken for the first",
        "megatron_rl/batching/token_stats.py",
        "        key = tuple(batch.origin_S)\n",
        "        key = id(batch)\n",
        "tests/batching/test_token_stats.py",
    ),
    Mutant(
        "the last micro-batch may be tiny",
        "megatron_rl/batching/minibatches.py",
        "    return _fill_by_cost(loads, limit)\n",
        "    return _fill_by_cost(loads, max_tokens)\n",
        "tests/batching/test_packing.py -k similar_sizes",
    ),
    Mutant(
        "the rows of sampled targets are the other rows",
        "megatron_rl/batching/packing.py",
        "for row, sampled in enumerate(mask) if sampled]",
        "for row, sampled in enumerate(mask) if not sampled]",
        "tests/batching/test_packing.py -k shifts_once",
    ),
    Mutant(
        "prompts with other experts are shared",
        "megatron_rl/batching/minibatches.py",
        "    if not any(each.sequence.routed_experts for each in weighted):",
        "    if texts:",
        "tests/policy/test_routed_experts.py -k shared",
    ),
)
