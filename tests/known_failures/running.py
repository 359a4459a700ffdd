"""Failures of engines, tools and runs."""

from tests.known_failures.failure import Failure

ENGINES = {
    "stale-image-embeddings": Failure(
        "After a weight update, the engine serves image embeddings of the old vision tower.",
        "trl#7198, trl#7200, verl#6523, vllm#44910, vllm#48762",
        "Updates empty the encoder cache; every token's logprob equals that of the weights of its version.",
        "engines.md",
    ),
    "stale-prefix-cache": Failure(
        "After a weight update, the engine continues from keys and values of the old weights.",
        "NeMo-RL#4018, SkyRL#1431",
        "Cached keys and values of old weights are never read; a response that an update interrupts is computed again.",
        "engines.md",
    ),
    "sleep-loses-weights": Failure(
        "An engine that slept returns garbage, because its weights or buffers were dropped.",
        "vllm#16564, vllm#29341, trl#4571, ms-swift#7017, NeMo-RL#2631, OpenRLHF#723",
        "After sleep level 2, an engine needs all weights before it samples; samples are then equal.",
    ),
    "weights-sent-partly": Failure(
        "A weight update leaves out tensors, sends them twice, or reuses a buffer before it was read.",
        "verl#7136, verl#7987",
        "Every tensor arrives exactly once, and its checksum is compared before anything is sampled.",
    ),
    "equal-seeds": Failure(
        "Requests, engines or runs have equal seeds and sample the same responses.",
        "trl#7040",
        "Each request has a seed of its own, from run, step, group, sample and turn.",
    ),
    "async-text-only": Failure(
        "Asynchronous rollouts do not support images or several turns.",
        "trl#6028, trl#6515, AReaL#931",
        "Episodes with images continue over weight updates, and each token has its version.",
        "engines.md",
    ),
    "flag-without-effect": Failure(
        "A setting is accepted and does nothing, such as asynchronous mode that runs synchronously.",
        "NeMo-RL#3740",
        "Unknown keys are refused, every key is read, and contradicting modes are errors.",
    ),
    "dead-engines": Failure(
        "The engines are dead, and the run waits for hours as running.",
        "Relax#10",
        "Dead engines are restarted; if none is healthy for a limited time, the run saves and ends with one line.",
        "engines.md",
    ),
    "silent-hang": Failure(
        "A run hangs after random steps until NCCL times out, without a word about the cause.",
        "verl#2325, verl#3873, verl#7180, ms-swift#4703",
        "The rank that lags is named, the stacks of all ranks are saved, and the job ends.",
        "troubleshooting.md",
    ),
    "stop-text-missed": Failure(
        "Generation continues after the closing tag of a tool call.",
        "DeepEyes#65",
        "A stop text ends the response at its last token, also if it is cut over two requests.",
        "agents.md",
    ),
}

TOOLS = {
    "sandbox-without-images": Failure(
        "Code in a sandbox cannot return images.",
        "verl#4554",
        "Shown images and figures are returned and become an observation.",
        "agents.md",
    ),
    "boxes-by-eval": Failure(
        "Boxes and arguments of the policy are parsed with eval.",
        "DeepEyes#127",
        "Arguments are JSON; text that is no list of four numbers is explained to the policy.",
    ),
    "agent-loses-images": Failure(
        "An agent behind an OpenAI endpoint loses images, or its history is re-encoded.",
        "agent-lightning#559, agent-lightning#560",
        "Histories are found by decoded pixels and continued token for token; branches are kept.",
        "own_agents.md",
    ),
}

RUNS = {
    "host-memory-grows": Failure(
        "Host memory grows with the images of a run until the process is killed.",
        "Mini-o3#23, DeepEyes#113, verl#4995, verl#5206, verl-tool#131",
        "Image caches have a limit in bytes, evicted images are freed, and engines keep none after sleep.",
    ),
    "memory-unknown": Failure(
        "Nobody says beforehand whether a run fits into memory.",
        "ms-swift#2536, EasyR1#552, Megatron-Bridge#5508",
        "A plan of GPU and host memory refuses runs that do not fit before anything is built.",
        "recipes.md",
    ),
    "resume-loses-state": Failure(
        "A resumed run has other random states, or lost moments of the optimizer.",
        "Megatron-LM#6858, ms-swift#9935, AReaL#1468",
        "The update after a load equals that of the unbroken run, bitwise in the same layout.",
        "running.md",
    ),
    "resume-skips-data": Failure(
        "A resumed run skips or repeats prompts.",
        "Megatron-Bridge#4521, Megatron-Bridge#5637",
        "Every prompt is trained on once, also if asynchronous rollouts were killed.",
        "running.md",
    ),
    "interrupted-save": Failure(
        "A run that is killed while it saves leaves a checkpoint that cannot be resumed.",
        "Automodel#3254, pytorch-lightning#688",
        "Checkpoints are published when complete; damaged ones are moved aside, and an older one is used.",
        "running.md",
    ),
    "dead-rank": Failure(
        "One dead rank leaves the others waiting, and days of work are lost.",
        "verl#7910",
        "The other ranks end soon after, and the same command resumes from the last checkpoint.",
        "running.md",
    ),
    "orphaned-processes": Failure(
        "Processes survive a killed run and keep GPUs and memory.",
        "AReaL#622, vllm#34643, vllm#55510",
        "Workers and services end with the process that started them, also if it was killed.",
    ),
    "rollouts-not-reproducible": Failure(
        "A step cannot be repeated, so that a wrong update cannot be examined.",
        "NeMo-Gym#775, verl#5180, verl#6570",
        "Recorded rollouts are trained on again with equal metrics and weights, bit for bit on a CPU.",
        "rollouts.md",
    ),
    "images-not-logged": Failure(
        "The images that an agent saw are not in its log.",
        "slime#85, NeMo-RL#938",
        "Recorded rollouts contain all images of all turns; the viewer shows them with the tokens.",
        "rollouts.md",
    ),
}
