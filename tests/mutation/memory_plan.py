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
        "max(passing.total_bytes + compared, step, rank_share.teacher_bytes)",
        "passing.total_bytes + compared",
        "tests/memory_plan/test_gpu_memory.py",
    ),
    Mutant(
        "the reference's pass takes no time",
        "megatron_rl/memory_plan/step_time.py",
        "needs_old_logprob_forward(inputs.settings) + needs_reference(inputs.settings.algo), inputs",
        "int(needs_old_logprob_forward(inputs.settings)), inputs",
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
        "keys of a long sequence are gathered",
        "megatron_rl/memory_plan/gpu_memory.py",
        "most_image_tokens(model, settings), kv_ratio=1)",
        "most_image_tokens(model, settings))",
        "tests/memory_plan/test_gpu_memory.py -k largest",
    ),
    Mutant(
        "unfinished episodes are resumed for nothing",
        "megatron_rl/memory_plan/step_time.py",
        '"resumed": resume_seconds(inputs),',
        '"resumed": 0.0,',
        "tests/memory_plan/test_step_time.py -k go_on",
    ),
    Mutant(
        "layers that are not recomputed save nothing",
        "megatron_rl/memory_plan/activations.py",
        "stored = num_tokens * (layers - recomputed) * layer_saved",
        "stored = num_tokens * (layers - recomputed) * hidden",
        "tests/memory_plan/test_activations.py -k some_layers",
    ),
    Mutant(
        "the plan forgets the workspace of flash attention",
        "megatron_rl/memory_plan/activations.py",
        "+ 2 * key + max(0, workspace - released)",
        "+ 2 * key",
        "-p tests.support.cuda.session tests/cuda/emulated/test_memory.py -k shared",
    ),
    Mutant(
        "a token computes with all experts",
        "megatron_rl/memory_plan/step_time.py",
        "language=total - vision - looked_up - unused,",
        "language=total - vision - looked_up,",
        "tests/memory_plan/test_step_time.py -k experts",
    ),
    Mutant(
        "a decoding step reads the experts of one token",
        "megatron_rl/memory_plan/step_time.py",
        "(1 - (1 - of_a_token) ** num_tokens - of_a_token)",
        "0",
        "tests/memory_plan/test_step_time.py -k experts",
    ),
    Mutant(
        "an expert saves one row for a token",
        "megatron_rl/memory_plan/activations.py",
        "    return experts.top_k * row + max",
        "    return row + max",
        "tests/memory_plan/test_activations.py -k decoder_layer_keeps",
    ),
)
