"""Mutants of megatron_rl/io/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a FIFO is waited for",
        "megatron_rl/io/bounded_files.py",
        "os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC",
        "os.O_RDONLY | os.O_CLOEXEC",
        "tests/io/test_bounded_files.py -k a_fifo_is_no_file",
    ),
    Mutant(
        "a file that grows while it is read has no limit",
        "megatron_rl/io/bounded_files.py",
        "file.read(at_most + 1)",
        "file.read(at_most)",
        "tests/io/test_bounded_files.py -k no_more_than",
    ),
    Mutant(
        "YAML is read with its aliases",
        "megatron_rl/io/bounded_files.py",
        "if self.check_event(yaml.AliasEvent):",
        "if not self:",
        "tests/io/test_bounded_files.py -k yaml",
    ),
    Mutant(
        "other errors of the YAML parser than its own pass through",
        "megatron_rl/io/bounded_files.py",
        "LookupError, AttributeError, ",
        "",
        "tests/io/test_bounded_files.py -k no_yaml",
    ),
    Mutant(
        "a picture's key names any file",
        "megatron_rl/io/rollout_codec.py",
        "_require(IMAGE_KEY_PATTERN.fullmatch(key) is not None, ",
        "_require(bool(key), ",
        "tests/observe/test_viewer_walls.py -k key",
    ),
    Mutant(
        "YAML has numbers of any length",
        "megatron_rl/io/bounded_files.py",
        "if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER_CHARACTERS:",
        "if node.tag in _NUMBERS and not node.value:",
        "tests/io/test_bounded_files.py -k number_of_yaml",
    ),
    Mutant(
        "words of files move the terminal",
        "megatron_rl/io/bounded_files.py",
        'letter if letter.isprintable() else "?"',
        "letter",
        "tests/io/test_bounded_files.py -k terminal",
    ),
    Mutant(
        "blocks of a file of weights are sampled from its first half alone",
        "megatron_rl/io/sampled_digest.py",
        "for start in range(0, size, max",
        "for start in range(0, size // 2, max",
        "tests/weights/test_model_digests.py",
    ),
    Mutant(
        "a broken disk is told to have no room",
        "megatron_rl/io/jsonl.py",
        "os.strerror(number) in str(error)",
        "number == error.errno",
        "tests/tools/test_commands.py -k broken_disk",
    ),
    Mutant(
        "experts of a record may be any text",
        "megatron_rl/io/rollout_codec.py",
        "base64.b64decode(text, validate=True)",
        'base64.b64decode(text + "==")',
        "tests/io/test_rollout_codec.py -k told_in_a_line",
    ),
)
