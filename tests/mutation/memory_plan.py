"""Mutants of megatron_rl/memory_plan/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "the copy of the reference is forgotten",
        "megatron_rl/memory_plan/host_memory.py",
        "references = int(",
        "references = 0 * int(",
        "tests/memory_plan/test_gpu_memory.py",
    ),
    Mutant(
        "AdamW's passing copy is forgotten",
        "megatron_rl/memory_plan/gpu_memory.py",
        "max(passing.total_bytes, step)",
        "passing.total_bytes",
        "tests/memory_plan/test_gpu_memory.py",
    ),
    Mutant(
        "the reference's pass takes no time",
        "megatron_rl/memory_plan/step_time.py",
        "minibatches * batch.epochs) + needs_reference(algo)",
        "minibatches * batch.epochs)",
        "tests/memory_plan/test_step_time.py -k passes_before",
    ),
    Mutant(
        "rounds on an engine are rounded down",
        "megatron_rl/memory_plan/image_memory.py",
        "episode * batch.group_size * -(-batch.prompts_per_step // num_engines)",
        "episode * batch.group_size * (batch.prompts_per_step // num_engines)",
        "tests/memory_plan/test_image_memory.py -k one_group_more",
    ),
    Mutant(
        "the engine's buffers in a sync are single",
        "megatron_rl/memory_plan/gpu_memory.py",
        "buckets = 2 * int(",
        "buckets = int(",
        "tests/memory_plan/test_gpu_memory.py -k two_buckets",
    ),
    Mutant(
        "groups of one rank are not counted",
        "megatron_rl/memory_plan/gpu_memory.py",
        "num_groups = 3 + sum(",
        "num_groups = sum(",
        "tests/memory_plan/test_gpu_memory.py -k groups_in_use",
    ),
    Mutant(
        "the plan forgets the workspace of flash attention",
        "megatron_rl/memory_plan/activations.py",
        "+ 2 * key + max(0, workspace - released)",
        "+ 2 * key",
        "-p tests.support.cuda.session tests/cuda/emulated/test_memory.py -k shared",
    ),
)
