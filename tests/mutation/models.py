"""Mutants of megatron_rl/models/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a folder with the name of a cached model is not used",
        "megatron_rl/models/model_folder.py",
        "    if Path(name).exists() or not HUB_NAME.fullmatch(name):\n",
        "    if not HUB_NAME.fullmatch(name):\n",
        "tests/models/test_model_folder.py -k cache",
    ),
    Mutant(
        "a field of config.json that nobody knows is accepted",
        "megatron_rl/models/config_fields.py",
        "        if name not in fields:\n            yield",
        "        if name not in fields:\n            continue\n            yield",
        "tests/models/test_config_fields.py -k four",
    ),
    Mutant(
        "a sliding window in layer_types is accepted",
        "megatron_rl/models/config_fields.py",
        'any(layer != "full_attention" for layer in layers)',
        'all(layer != "full_attention" for layer in layers)',
        "tests/models/test_config_fields.py -k path_and_value",
    ),
    Mutant(
        "false counts as the number 0 in config.json",
        "megatron_rl/models/config_fields.py",
        "return isinstance(value, bool) == isinstance(known, bool) and value == known",
        "return value == known",
        "tests/models/test_config_fields.py -k path_and_value",
    ),
    Mutant(
        "a size beside text_config may be another",
        "megatron_rl/models/config_fields.py",
        "        if stored.get(name) is not None and stored[name] != text.get(name):",
        "        if False:",
        "tests/models/test_config_fields.py -k path_and_value",
    ),
    Mutant(
        "a token beyond vocab_size is cut off as padding",
        "megatron_rl/models/vocabulary.py",
        "    if num_token_ids <= vocab_size <= least:",
        "    if num_token_ids <= least and vocab_size <= least:",
        "tests/models/test_vocabulary.py -k kept",
    ),
    Mutant(
        "tokens that were added to a tokenizer are not counted",
        "megatron_rl/models/vocabulary.py",
        '    yield from (token["id"] for token in stored.get("added_tokens") or [])\n',
        "",
        "tests/models/test_vocabulary.py -k loaded",
    ),
    Mutant(
        "sections of the rotary embedding may be more than half of a head",
        "megatron_rl/models/hf_config.py",
        "    if 2 * sum(sections) != head_dim:",
        "    if 2 * sum(sections) < head_dim:",
        "tests/models/test_hf_config.py -k no_model_has",
    ),
    Mutant(
        "a section of the rotary embedding may be empty",
        "megatron_rl/models/hf_config.py",
        "type(each) is int and each > 0 for each in sections",
        "type(each) is int and each >= 0 for each in sections",
        "tests/models/test_hf_config.py -k no_model_has",
    ),
    Mutant(
        "windows of the tower may cut vision tokens",
        "megatron_rl/models/hf_config.py",
        "    if vision.window_size % token_side:",
        "    if vision.window_size < 0:",
        "tests/models/test_hf_config.py -k no_model_has",
    ),
    Mutant(
        "a teacher's tokens may have other ids",
        "megatron_rl/models/vocabulary.py",
        "if given.get(token) != wanted.get(token)",
        "if token not in wanted",
        "tests/e2e/test_distill_run.py -k tokenizer",
    ),
)
