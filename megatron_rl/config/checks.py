"""Validation helpers for settings.

Each error message contains the dotted key, the value and the fix, because users see only this line.
"""

from urllib.parse import urlsplit


def require(condition: bool, key: str, value: object, remedy: str) -> None:
    """Raise ValueError unless `condition` is true; the error message is `key=value: remedy`.

    Example: `parallel.tp=3: must divide the 4 attention heads; use 1, 2 or 4`.
    """
    if not condition:
        raise ValueError(f"{key}={value}: {remedy}")


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    require(value in choices, key, value, f"choose one of {', '.join(choices)}")


def require_address(key: str, address: str) -> None:
    """Raise ValueError if `address` contains @, ? or #.

    Such an address may contain credentials, so the error message omits the address.
    """
    remedy = "contains @, ? or #; give only scheme, host, port and path: a password would appear in config.yaml and in errors"
    require(not set("@?#") & set(address), key, "...", remedy)


def require_url(key: str, url: str, *, path: str = "") -> None:
    """Raise ValueError unless `url` is an HTTP address without credentials.

    `path` is the path in the example of the error message.
    """
    require_address(key, url)
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    require(is_valid, key, url, f"is not a valid URL; use http://HOST:PORT{path}")


def require_no_key(key: str, words: list[str]) -> None:
    """Raise ValueError if the command-line arguments of a server contain --api-key.

    Every spelling and abbreviation of --api-key that vLLM's parser accepts is rejected
    (vllm/utils/argparse_utils.py).
    """
    remedy = "contains --api-key, which would appear in config.yaml and logs; the run creates a key itself, so remove this option"
    require(not any(word.replace("_", "-").startswith("--api-k") for word in words), key, "...", remedy)
