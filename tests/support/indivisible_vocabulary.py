"""Creates a model with a vocabulary that no tensor-parallel size divides, because its user has
added tokens.
"""

from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

ADDED = 3


def add_tokens(folder: Path, out: Path) -> Path:
    """Resize the model with transformers: add the tokens that its tokenizer lacks, and
    three more.
    """
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    size, processor = model.config.text_config.vocab_size, AutoProcessor.from_pretrained(folder)
    processor.tokenizer.add_tokens([f"<own_{number}>" for number in range(size + ADDED - len(processor.tokenizer))])
    assert len(processor.tokenizer) == size + ADDED and size % 64 == 0
    torch.manual_seed(0)
    model.resize_token_embeddings(size + ADDED, mean_resizing=False)
    with torch.no_grad():
        for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            table[size:].normal_(std=0.1)
    model.save_pretrained(out)
    processor.save_pretrained(out)
    return out
