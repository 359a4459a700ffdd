"""Failures of logprobs, rewards, advantages and losses."""

from tests.known_failures.failure import Failure

NUMERICS = {
    "mismatch-unnoticed": Failure(
        "Engine and trainer compute different logprobs, and training collapses later.",
        "verl#3597, vllm#12699, vllm#47425",
        "A run ends before its first update if the mean difference is above a bound, and keeps the rollouts.",
        "debugging.md",
    ),
    "mismatch-grows": Failure(
        "The difference between engine and trainer grows over the steps.",
        "open-instruct#1473, vime#64",
        "Every step's differences stay below 1e-4 in fp32, after every weight update.",
        "numerics.md",
    ),
    "temperature-ignored": Failure(
        "Logprobs of the trainer are not those of the sampling temperature.",
        "trl#3029, trl#4159, OpenRLHF#853, tinker-feedback#148",
        "Engine, policy and reference use the sampling temperature in logprobs and gradients.",
    ),
    "shifted-logprobs": Failure(
        "Logprobs are read at shifted positions, because one placeholder stands for many tokens.",
        "strands-sglang#33",
        "All columns of a sequence have the length of the expanded ids, and are shifted once, when packed.",
    ),
    "layouts-disagree": Failure(
        "A Megatron run learns differently from a run of one process or of another backend.",
        "verl#5187, verl#5317",
        "Gradients and three optimizer steps of every layout equal those of Hugging Face and of one process.",
        "numerics.md",
    ),
    "packed-linear-attention": Failure(
        "Linear attention passes the state of a packed sequence on to the next one, or packing is not supported.",
        "slime#2233",
        "State and convolution start anew with each sequence; outputs and gradients equal one token at a time.",
        "qwen3_5.md",
    ),
    "routing-replay-without-images": Failure(
        "Routing replay leaves out the tokens of images.",
        "AReaL#1496",
        "Engines return the experts of all tokens; replayed logprobs and gradients equal those of Hugging Face.",
        "experts.md",
    ),
    "text-only-micro-batch": Failure(
        "A micro-batch without images stalls the other ranks, or changes the gradient of the vision tower.",
        "miles#2406, prime-rl#1918, cosmos-rl#606, Megatron-LM#6260",
        "Ranks without images take part; gradients of every layout and cut equal Hugging Face's.",
    ),
    "bf16-updates-lost": Failure(
        "Small updates are rounded away in bfloat16.",
        "AReaL#1634",
        "Main weights and gradients are fp32, so that updates add up.",
    ),
    "ratio-overflow": Failure(
        "The importance ratio of a stale token overflows, and masked infinities become NaN.",
        "prime-rl#2972, OpenRLHF#1314",
        "Log ratios are bounded before the exponential; weights, losses and gradients stay finite.",
    ),
    "kl-overflow": Failure(
        "The k3 estimate of the KL overflows where policy and reference differ much.",
        "trl#6549",
        "The estimate and its gradient are bounded.",
    ),
    "upgrade-changes-results": Failure(
        "An upgrade of vLLM or Megatron-Core changes caches or results.",
        "slime#1411, vllm#46125",
        "Versions are locked, and tests of what was read in their source fail after an upgrade.",
    ),
}

REWARDS = {
    "judge-failure-is-zero": Failure(
        "A judge, grader or reward function that fails or times out counts as reward 0.",
        "AReaL#548, NeMo-Gym#2015",
        "A failed judge fails the rollout, which has no reward; it is retried or left out.",
        "judges.md",
    ),
    "sandbox-failure-is-an-answer": Failure(
        "Failures of the sandbox are hidden: the policy reads them as tool output and is scored for them.",
        "ToRL#27",
        "Failures of the host fail the rollout; too many of them end the run.",
        "agents.md",
    ),
    "tool-output-earns-reward": Failure(
        "The reward function reads tool output as if the policy had written it.",
        "verl#6392",
        "Answers are read from the last response only.",
    ),
    "unicode-minus": Failure(
        "A Unicode minus sign is dropped, so that -5 and 5 are equal.",
        "PrairieLearn#808, mathquill#95",
        "All signs are read, in numeric sources too.",
        "answers.md",
    ),
    "times-are-arithmetic": Failure(
        "Times, dates and scores are evaluated as ratios.",
        "Knwl#89",
        "Times and dates are compared as such: 2:20 is not 1:10.",
        "answers.md",
    ),
    "latex-around-choices": Failure(
        "A right choice in LaTeX dress, such as \\text{B}, earns 0.",
        "ROLL#371, ROLL#390, ROLL#391, verl#1109",
        "Text commands and Markdown around words and letters are removed.",
        "answers.md",
    ),
    "unicode-forms": Failure(
        "Composed and decomposed characters are different answers.",
        "deepeval#3096, deja-vu#1098",
        "Both sides are normalized; invisible characters and typographic quotes do not count.",
        "answers.md",
    ),
    "unreachable-references": Failure(
        "Reference answers cannot be matched by any response, or every response matches.",
        "lm-eval#4038, open-r1#55",
        "Empty, overlong and unreadable references are refused at the start, with file and row.",
        "answers.md",
    ),
    "number-lists-fused": Failure(
        "Lists of numbers and thousands separators are confused: 0,1 becomes 01.",
        "lm-eval#4038, lm-eval#4039",
        "Groups of three digits are thousands, and other commas separate a list.",
        "answers.md",
    ),
    "judge-behind-proxy": Failure(
        "A judge on the same machine is not reached if a proxy is set.",
        "rosclaw#221, ms-swift#4272",
        "Local judges are asked directly; errors of a proxy name it.",
        "judges.md",
    ),
}

ADVANTAGES = {
    "rounding-is-signal": Failure(
        "Groups with equal rewards up to rounding count as groups that teach.",
        "NeMo-RL#4158, NeMo-RL#4161",
        "They are dropped as `zero_std`, and their advantages are exactly 0.",
    ),
    "group-of-one": Failure(
        "A group with one scored rollout, or with equal rewards, has NaN or huge advantages.",
        "NeMo-RL#1518, UniRL#335",
        "Such rollouts are left out, or their advantage is exactly 0.",
    ),
    "micro-batch-means": Failure(
        "The loss is averaged per micro-batch, so that its weight depends on how the batch is cut.",
        "open-instruct#1161, prime-rl#583, trl#5619, ms-swift#10117",
        "Denominators are those of the whole step; losses and gradients do not depend on cuts or ranks.",
        "algorithm.md",
    ),
    "observation-ends-return": Failure(
        "A tool observation ends the return of the tokens before it, or adds its own KL.",
        "verl#6376, slime#1370",
        "Returns skip observed tokens and follow the turns of an episode.",
    ),
    "observations-learned": Failure(
        "Tokens of tools are trained on.",
        "Search-R1#21",
        "The loss mask is 1 exactly at sampled tokens.",
    ),
    "truncated-is-terminated": Failure(
        "An episode that was cut off is treated like one that ended.",
        "NeMo-Gym and verifiers (adapters of gymnasium)",
        "Both ends are kept apart from the environment to the stop reason, and PPO can bootstrap truncated episodes.",
        "gymnasium.md",
    ),
}
