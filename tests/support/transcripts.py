"""Builds rows of transcripts and loads them as the trainer does."""

from pathlib import Path

from megatron_rl.data.transcripts import load_transcripts
from tests.support.data_files import make_png, write_rows

COLORS = {(255, 0, 0): "RED", (0, 0, 255): "BLUE"}
USER, REPLY = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Red."}
SHAREGPT_MESSAGES = [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "Red."}]


def load_conversation(folder: Path, row: dict, *, suffix: str = ".jsonl") -> list[tuple]:
    """Return the row's conversation as (role, parts...), with the color of an image in place of the
    image. A masked response has the role MASKED.
    """
    for color in ("red", "blue"):
        (folder / f"{color}.png").write_bytes(make_png(color))
    (folder / "a.mp4").write_bytes(b"\0")
    (messages,) = load_transcripts([str(write_rows(folder / f"t{suffix}", [row]))], images_root="")
    return [
        (
            message["role"] if message.get("loss", True) else "MASKED",
            *(part["text"] if part["type"] == "text" else COLORS[part["image"].getpixel((0, 0))] for part in message["content"]),
        )
        for message in messages
    ]


def reply_pair_row(**flags: object) -> dict:
    """Return a row with two responses, the first of which has these flags."""
    return {"messages": [USER, {"role": "assistant", "content": "bad"} | flags, USER, REPLY]}


def user_row(content: object, **columns: object) -> dict:
    return {"messages": [{"role": "user", "content": content}, REPLY]} | columns


def assistant_row(content: object, **keys: object) -> dict:
    return {"messages": [USER, {"role": "assistant", "content": content} | keys]}
