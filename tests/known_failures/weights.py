"""Failures of weights, converters and adapters."""

from tests.known_failures.failure import Failure

WEIGHTS = {
    "round-trip-loses-weights": Failure(
        "Conversion to Megatron and back loses or reorders weights of a vision-language model.",
        "Megatron-Bridge#1776, Megatron-Bridge#1871, Megatron-Bridge#1926, Megatron-Bridge#3746",
        "Conversion there and back is equal to the bit, and transformers loads the result without missing keys.",
        "converters.md",
    ),
    "plausible-export": Failure(
        "A wrong export has valid files and passes a round-trip test.",
        "Model-Optimizer#2276, Model-Optimizer#2334",
        "`--verify` compares logits with images; swapped heads, gates or images are found.",
        "converters.md",
    ),
    "export-incomplete": Failure(
        "A merge succeeds although tensors are missing or have wrong names.",
        "verl#2319, verl#4338, verl#2024",
        "Missing, unknown, misshapen and duplicate tensors are refused by name, and nothing is written.",
        "converters.md",
    ),
    "tensor-names-renamed": Failure(
        "Readers and writers disagree about the names that transformers 4.52 changed.",
        "verl#1710, verl#3325, ms-swift#5265, vllm#19149",
        "Both spellings are read, and the merger writes the one that is asked for.",
        "converters.md",
    ),
    "checkpoint-not-mergeable": Failure(
        "The trainer's checkpoint of a vision-language model cannot be converted to Hugging Face.",
        "verl#3057, verl#4362, verl#4498, verl#5603",
        "Runs write Hugging Face folders; files in verl's Megatron and FSDP formats are merged too.",
        "converters.md",
    ),
    "sharded-qkv-order": Failure(
        "Fused QKV and gate/up weights are cut in the wrong order under tensor parallelism.",
        "AReaL#1281",
        "Logits of every layout equal Hugging Face's, and the shards of a fused tensor are checked row by row.",
    ),
    "vocabulary-resized": Failure(
        "Embeddings were resized but the config has the old size, or tokens have no row.",
        "LlamaFactory#8823, Qwen3-VL#1402, unsloth#1628",
        "Rows, config and tokenizer are compared before anything is built; a mismatch is refused with a remedy.",
    ),
    "rope-scaling-ignored": Failure(
        "RoPE scaling of the config is applied by the engine or by the trainer only.",
        "vllm#25384, unsloth#3083",
        "Config fields that change the model and are not implemented are refused with path and value.",
    ),
    "tied-embeddings": Failure(
        "Engine and trainer disagree about whether the output layer is tied to the embedding.",
        "vllm#20550, sglang#18024",
        "Tied and untied models have Hugging Face's logprobs before and after an update.",
    ),
    "lora-not-updated": Failure(
        "The engine samples from the base model or from an old adapter.",
        "verl#3516",
        "Adapters are merged into the weights that are sent, and engine and trainer are compared in every step.",
    ),
    "adapter-differs-from-peft": Failure(
        "An exported adapter does not give the trained model, or the adapters of the vision tower are ignored.",
        "ms-swift#9077, vllm#23796",
        "PEFT loads the exported adapter bit for bit, for the vision tower too, and computes the same logits.",
    ),
    "frozen-tower": Failure(
        "The vision tower cannot be frozen or trained at a rate of its own.",
        "verl#2526, verl#6104, OpenRLHF#1070",
        "Frozen parts do not change and need no gradients; other parts move at their own rates.",
    ),
    "final-model-pixels": Failure(
        "The saved model has other image limits than the training, and is worse when it is served.",
        "ms-swift#3721, ms-swift#6318",
        "The limits are written to every processor file of the folder; transformers then resizes as in training.",
    ),
}
