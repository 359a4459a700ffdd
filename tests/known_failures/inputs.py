"""Failures of prompts, images and data."""

from tests.known_failures.failure import Failure

TOKENS = {
    "image-token-sampled": Failure(
        "The policy samples an image placeholder; the numbers of placeholders and image features differ, and the step crashes.",
        "verl#1640, verl#3469, verl-agent#202, EasyR1#110, trl#3847",
        "Vision tokens, and ids that the tokenizer lacks, have probability 0 in engine and trainer.",
    ),
    "later-images-unseen": Failure(
        "The model never sees images after the first turn of a dialogue.",
        "slime#1847",
        "Every turn continues one sequence of tokens and images; engine logprobs equal those of one forward pass.",
    ),
    "pixels-lost-before-training": Failure(
        "Images of the rollout do not reach the trainer, and the loss still looks normal.",
        "agent-lightning#559, agent-lightning#560, prime-rl#2786",
        "Images travel with their tokens; an image without patches ends the step with its key.",
    ),
    "truncation-splits-images": Failure(
        "Truncation or a long tool image cuts placeholders but not pixels, or exceeds the length limit.",
        "prime-rl#2013, Qwen3-VL#556, verl#4050",
        "An observation that does not fit as a whole is not appended, and the episode ends as truncated.",
    ),
    "two-image-processors": Failure(
        "Engine and trainer each process the image and disagree about its size.",
        "trl#6401, ms-swift#9668, vllm#15364, NeMo-RL#3940",
        "An image is resized once; the engine receives its patches, and a server must not resize it again.",
        "engines.md",
    ),
    "placeholders-expanded-otherwise": Failure(
        "The server expands image placeholders differently, so its prompt has other ids or another length.",
        "NeMo-RL#2360, tinker-cookbook#181",
        "The engine's prompt ids are compared with those that were sent; any difference is an error.",
    ),
    "history-retokenized": Failure(
        "A response is decoded and tokenized again for the next turn, and its ids are no longer the sampled ones.",
        "trl#5224, verl#3720, ms-swift#10012, rllm#272, slime#117",
        "Responses stay token ids; only new messages are tokenized, for OpenAI clients too.",
        "own_agents.md",
    ),
    "tool-images-dropped": Failure(
        "The chat template leaves out images in messages of tools.",
        "trl#5663",
        "Images of tool messages have placeholders and patches like those of users.",
    ),
    "images-assigned-wrongly": Failure(
        "In a batch with several images per sample, pixels are assigned to the wrong sample, or grids are missing.",
        "trl#6114, trl#6274, ms-swift#9287",
        "Each placeholder run belongs to one image by key; packed logits equal those of Hugging Face.",
    ),
    "text-only-samples": Failure(
        "Samples without images, or batches that mix them with others, crash on empty image lists.",
        "verl#3731, verl#5358",
        "Text, one image and several images are mixed in prompts, packed batches and micro-batches.",
    ),
    "mrope-positions": Failure(
        "Positions after an image continue from the wrong axis, or are wrong with two images.",
        "xtuner#2097, mlx-vlm#1282",
        "Positions equal Hugging Face's for any order of text and images.",
    ),
    "packed-mrope": Failure(
        "Packed sequences have wrong M-RoPE positions or lengths, and training logprobs are off.",
        "Megatron-Bridge#1776, Megatron-Bridge#3869, ROLL#452, verl#3998, prime-rl#3070",
        "Logits and logprobs of packed batches equal those of Hugging Face on single sequences, in every layout.",
        "numerics.md",
    ),
    "packed-attention": Failure(
        "Packed samples attend to each other.",
        "NeMo-RL#4167",
        "Attention of packed segments equals a loop over tokens, forward and backward.",
    ),
    "preprocessing-per-sample": Failure(
        "The image of a prompt is processed or encoded once per sample of its group.",
        "verl#5171",
        "A group renders its prompt once, and a micro-batch encodes each distinct image once.",
    ),
    "preprocessing-blocks": Failure(
        "Image preprocessing keeps the engine idle.",
        "prime-rl#1951, vllm#15869, EasyR1#392",
        "Images are rendered in threads while the engine continues to sample.",
    ),
    "template-not-found": Failure(
        "The chat template is in a file that is not read, or is missing.",
        "Qwen3-VL#1405, Qwen3-VL#1488",
        "Templates are read from every file in which transformers stores them; without one, the error has a remedy.",
    ),
    "thoughts-stripped": Failure(
        "The chat template or the loader removes the reasoning of earlier turns.",
        "verl#7807",
        "Templates that rewrite earlier turns are refused for several turns; unread reasoning is an error.",
    ),
    "slow-patch-embedding": Failure(
        "The vision tower is 10 to 50 times slower than expected, because of its 3-D convolution.",
        "lmms-engine#99, Qwen3-VL#1968, ms-swift#6232",
        "Patches are embedded by a matrix product, forward and backward.",
    ),
    "deep-images": Failure(
        "Images with 16 bits per channel are clipped or cannot be read.",
        "unsloth#10094",
        "16 bits become 8 with all levels; formats without a stated range are refused at the start.",
        "data.md",
    ),
}

DATA = {
    "messages-dropped": Failure(
        "Messages and images get out of step, and some are dropped.",
        "LlamaFactory#8734",
        "All messages before the answer are joined in order with their images; others are refused.",
        "data.md",
    ),
    "image-column-ignored": Failure(
        "A column with images has another name, and the model is trained on text alone.",
        "FAI-RL#79, FAI-RL#81",
        "Columns with images that nothing reads are an error that names the column and the setting.",
        "data.md",
    ),
    "masked-turns-learned": Failure(
        "Turns that are marked as not to be learned are learned.",
        "ms-swift#5215, verl#5316, verl#5472",
        "The flags of other trainers set the loss mask; a flag without effect is refused.",
        "data.md",
    ),
    "image-word-in-response": Failure(
        "A response that contains the image placeholder crashes tokenization without naming the row.",
        "LlamaFactory#8440",
        "Placeholders in responses are refused with file and row.",
    ),
    "stale-shards": Failure(
        "A data folder contains shards of an earlier save, or lacks some, and is read as it is.",
        "open-instruct#638, datasets#571",
        "Saved data sets are read as `datasets` reads them; incomplete or mixed shards are refused.",
        "data.md",
    ),
    "base64-in-messages": Failure(
        "Base64 images flood logs and error messages.",
        "agent-lightning#441",
        "Error messages about images are shorter than 240 characters, whatever the row contains.",
    ),
}
