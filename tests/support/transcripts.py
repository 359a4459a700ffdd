"""Rows of transcripts and what the trainer makes of them."""

from pathlib import Path

from megatron_rl.data.transcripts import load_transcripts
from tests.support.tables import png, write

COLORS = {(255, 0, 0): "RED", (0, 0, 255): "BLUE"}
USER, REPLY = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Red."}
TALK = [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "Red."}]


def taught(folder: Path, row: dict, *, suffix: str = ".jsonl") -> list[tuple]:
    """The row's conversation as (role, parts...), a color for a picture of it; a masked reply has the role MASKED."""
    for color in ("red", "blue"):
        (folder / f"{color}.png").write_bytes(png(color))
    (folder / "a.mp4").write_bytes(b"\0")
    (messages,) = load_transcripts([str(write(folder / f"t{suffix}", [row]))], images_root="")
    return [
        (
            message["role"] if message.get("loss", True) else "MASKED",
            *(part["text"] if part["type"] == "text" else COLORS[part["image"].getpixel((0, 0))] for part in message["content"]),
        )
        for message in messages
    ]


def pair(**flags: object) -> dict:
    """Two replies, the first with these flags."""
    return {"messages": [USER, {"role": "assistant", "content": "bad"} | flags, USER, REPLY]}


def asked(content: object, **columns: object) -> dict:
    return {"messages": [{"role": "user", "content": content}, REPLY]} | columns


def replied(content: object, **keys: object) -> dict:
    return {"messages": [USER, {"role": "assistant", "content": content} | keys]}
