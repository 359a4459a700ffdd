"""Mutants of megatron_rl/*.py."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a warm start does not name columns that nothing reads",
        "megatron_rl/sft.py",
        "for line in demonstrations.warnings if TRANSCRIPTS_SPLIT not in sft.splits[:stage] else ():",
        "for line in ():",
        "tests/test_sft.py -k not_read",
    ),
    Mutant(
        "the policy is always at temperature 1",
        "megatron_rl/build.py",
        "temperature=settings.algo.temperature if is_rl else 1.0",
        "temperature=1.0",
        "tests/test_build.py",
    ),
    Mutant(
        "episodes are always at temperature 1",
        "megatron_rl/build.py",
        "temperature=settings.algo.temperature, seed=settings.run.seed",
        "temperature=1.0, seed=settings.run.seed",
        "tests/test_build.py",
    ),
    Mutant(
        "the schedule spans one step",
        "megatron_rl/build.py",
        "optim=settings.optim, num_steps=num_steps",
        "optim=settings.optim, num_steps=1",
        "tests/test_build.py",
    ),
    Mutant(
        "the reference is of the current weights",
        "megatron_rl/training_batch.py",
        'partial(policy.logprobs, weights="reference")',
        'partial(policy.logprobs, weights="current")',
        "tests/test_training_loop.py tests/golden/test_recorded.py",
    ),
    Mutant(
        "AdamW counts the head's warm-up as the trunk's",
        "megatron_rl/training_loop.py",
        "                policy.restart_optimizer()",
        "                pass",
        "tests/test_training_loop_scripted.py",
    ),
    Mutant(
        "the loss keeps the first weight of the KL",
        "megatron_rl/training_loop.py",
        "make_updaters(step_settings, policy",
        "make_updaters(settings, policy",
        "tests/test_training_loop_scripted.py",
    ),
    Mutant(
        "the reward keeps the first weight of the KL",
        "megatron_rl/training_loop.py",
        "                rollouts, step_settings, policy, critic",
        "                rollouts, settings, policy, critic",
        "tests/test_training_loop_scripted.py",
    ),
    Mutant(
        "the weight of the KL follows the head's warm-up",
        "megatron_rl/training_loop.py",
        " and step >= settings.critic.warmup_steps:  # during",
        ":  # during",
        "tests/test_training_loop_scripted.py",
    ),
    Mutant(
        "the policy learns while its critic warms up",
        "megatron_rl/training_loop.py",
        "metrics = {} if warms_up else policy.update(",
        "metrics = policy.update(",
        "tests/test_training_loop.py",
    ),
    Mutant(
        "what was dealt is lost with its run",
        "megatron_rl/training_loop.py",
        "unfinished_prompts=rollout_manager.scheduler.unfinished_prompt_indices",
        "unfinished_prompts=[]",
        "tests/test_stale_run.py",
    ),
    Mutant(
        "the gap is that of older weights' tokens too",
        "megatron_rl/training_batch.py",
        '(gather_column(rollouts, batch, "weight_versions") == step) & batch.mask_T',
        "batch.mask_T",
        "tests/test_training_loop.py",
    ),
    Mutant(
        "the whole folder says whose an engine is",
        "megatron_rl/build.py",
        "absolute().parts[-2:]",
        "absolute().parts",
        "tests/test_build.py -k vllm_strikes",
    ),
)
