"""The checks that settings use: each names the dotted key, the value and the remedy, because the user reads exactly that line."""


def require(condition: bool, key: str, value: object, remedy: str) -> None:
    """Raise the ValueError that the user reads. Example: `parallel.tp=3: must divide the 4 attention heads; use 1, 2 or 4`."""
    if not condition:
        raise ValueError(f"{key}={value}: {remedy}")


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    require(value in choices, key, value, f"choose one of {', '.join(choices)}")


def require_address(key: str, address: str) -> None:
    """An address says where and nothing else. It is not told, because what is wrong with it may be a secret in it."""
    remedy = "holds @, ? or #; give scheme, host, port and path alone: a password in it would be kept in config.yaml and told in errors"
    require(not set("@?#") & set(address), key, "...", remedy)


def require_no_key(key: str, words: list[str]) -> None:
    """Of a server's command: no --api-key, in any of the spellings that vLLM's parser takes (vllm/utils/argparse_utils.py)."""
    remedy = "holds --api-key, which config.yaml and the service's log would keep; the run makes a key of its own for it, leave it out"
    require(not any(word.replace("_", "-").startswith("--api-k") for word in words), key, "...", remedy)
