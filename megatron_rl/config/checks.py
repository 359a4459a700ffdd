"""The checks that settings use: each names the dotted key, the value and the remedy, because the user reads exactly that line."""


def require(condition: bool, key: str, value: object, remedy: str) -> None:
    """Raise the ValueError that the user reads. Example: `parallel.tp=3: must divide the 4 attention heads; use 1, 2 or 4`."""
    if not condition:
        raise ValueError(f"{key}={value}: {remedy}")


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    require(value in choices, key, value, f"choose one of {', '.join(choices)}")
