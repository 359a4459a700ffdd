"""Validation helpers for settings.

Each error message contains the dotted key, the value and the remedy, because users read exactly
this line.
"""


def require(condition: bool, key: str, value: object, remedy: str) -> None:
    """Raise ValueError with key, value and remedy unless `condition` holds.

    Example: `parallel.tp=3: must divide the 4 attention heads; use 1, 2 or 4`.
    """
    if not condition:
        raise ValueError(f"{key}={value}: {remedy}")


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    require(value in choices, key, value, f"choose one of {', '.join(choices)}")


def require_address(key: str, address: str) -> None:
    """Raise ValueError if `address` contains @, ? or #, which can carry credentials.

    The message omits the address, because the invalid part may be a secret.
    """
    remedy = "holds @, ? or #; give scheme, host, port and path alone: a password in it would be kept in config.yaml and told in errors"
    require(not set("@?#") & set(address), key, "...", remedy)


def require_no_key(key: str, words: list[str]) -> None:
    """Raise ValueError if the arguments of a server's command contain --api-key.

    All spellings that vLLM's parser accepts are rejected (vllm/utils/argparse_utils.py).
    """
    remedy = "holds --api-key, which config.yaml and the service's log would keep; the run makes a key of its own for it, leave it out"
    require(not any(word.replace("_", "-").startswith("--api-k") for word in words), key, "...", remedy)
