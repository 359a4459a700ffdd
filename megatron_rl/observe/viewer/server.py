"""The page's server: a few questions about files, answered as JSON, and pictures. It writes nothing and runs nothing.

What a model wrote is data all the way: the page puts it on the screen as text (static/ has no innerHTML), and its policy for content lets
no script run but its own files.
"""

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any, Literal

import pyarrow.compute as pc
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import Field
from starlette.middleware.trustedhost import TrustedHostMiddleware
from tokenizers import Tokenizer

from megatron_rl.observe.recorder import FOLDER, name_of
from megatron_rl.observe.viewer.store import COLUMNS, Filters, Folder, page_of, readable
from megatron_rl.types import ATTACHED, Context, Image, Rollout, Turn

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
SORTED_BY = tuple(name for name in COLUMNS if name not in ("tools", "said"))
MOST_ROWS = 500
PADS = re.compile(r"(<\|(?:image|video)_pad\|>)\1*")
KEY = re.compile(r"[0-9A-Za-z]{1,64}")


class Page(Filters):
    """A page of the table of rollouts."""

    run: str
    sort: Literal[SORTED_BY] = "step"
    descending: bool = False
    offset: int = Field(0, ge=0)
    limit: int = Field(50, ge=1, le=MOST_ROWS)


def create_app(folders: Mapping[str, Folder], *, hosts: list[str]) -> FastAPI:
    """`hosts` are the names under which the page may be asked for: another one is a web page of a stranger's that points here."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    words = cache(_tokenizer)

    app.middleware("http")(_guarded)

    def folder(run: str) -> Folder:
        if run not in folders:
            raise HTTPException(404, f"no run of this name: {run[:80]!r}")
        return folders[run]

    @app.get("/api/runs")
    def runs() -> list[dict[str, Any]]:
        return [_about(name, each) for name, each in folders.items()]

    @app.get("/api/curves")
    def curves(run: str) -> list[dict[str, float | None]]:
        return [{name: _finite(value) for name, value in line.items()} for line in folder(run).metrics()]

    @app.get("/api/rollouts")
    def rollouts(asked: Annotated[Page, Query()]) -> dict[str, Any]:
        table = asked.of(folder(asked.run))
        rows = page_of(table, sort=asked.sort, descending=asked.descending, offset=asked.offset, limit=asked.limit)
        return {"total": table.num_rows, "rows": [_plain(row) for row in rows], "skipped": folder(asked.run).skipped}

    @app.get("/api/group")
    def group(run: str, step: int, group: int) -> dict[str, Any]:
        members = _asked(lambda: folder(run).rollouts(step, lambda row: row["group"] == group))
        rewards = [rollout.reward for _, rollout in members if rollout.reward is not None]
        told = {"mean": fmean(rewards), "std": pstdev(rewards)} if rewards else {"mean": None, "std": None}
        return _plain({**told, "members": [_member(place, rollout) for place, rollout in members]})

    @app.get("/api/episode")
    def episode(run: str, step: int, place: int) -> dict[str, Any]:
        return _plain(_told(folder(run), step, place, words))

    @app.get("/picture/{run:path}/{key}.png")
    def picture(run: str, key: str) -> FileResponse:
        path = folder(run).path / FOLDER / name_of(key) if KEY.fullmatch(key) else None
        if path is None or not path.is_file():
            raise HTTPException(404, "no such picture")
        return FileResponse(path, media_type="image/png")

    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def _told(folder: Folder, step: int, place: int, words: Callable[[Path, str], Tokenizer | str]) -> dict[str, Any]:
    """An episode, who is beside it, and which of its pictures are missing."""
    found = _asked(lambda: folder.rollouts(step, lambda row: row["place"] == place))
    if not found:
        raise HTTPException(404, f"step {step} has no rollout {place}")
    shown = _episode(found[0][1], words(folder.path, folder.model()))
    before, after = folder.beside(step, place)
    keys = [image.key for part in (*found[0][1].contexts, *found[0][1].turns) for image in part.images]
    return {**shown, "before": before, "after": after, "missing": folder.missing(keys)}


async def _guarded(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call(request)
    response.headers.update(HEADERS)
    return response


def _asked(read: Callable[[], list[tuple[int, Rollout]]]) -> list[tuple[int, Rollout]]:
    try:
        return read()
    except (ValueError, OSError, KeyError) as error:
        raise HTTPException(404, " ".join(str(error).split())[:400]) from error


def _about(name: str, folder: Folder) -> dict[str, Any]:
    table, metrics = folder.table(), folder.metrics()
    ends, sources = (sorted(filter(None, pc.unique(table[name]).to_pylist())) for name in ("end", "source"))
    tools = sorted(pc.unique(pc.list_flatten(table["tools"])).to_pylist())
    last = max((int(line["step"]) for line in metrics), default=None)
    choices = {"ends": ends, "tools": tools, "sources": sources[:MOST_ROWS]}
    return {"name": name, "rollouts": table.num_rows, "last_step": last, **choices, "skipped": folder.skipped}


def _member(place: int, rollout: Rollout) -> dict[str, Any]:
    sampled = [
        advantage
        for context in rollout.contexts
        if context.advantages
        for advantage, mask in zip(context.advantages, context.loss_mask, strict=True)
        if mask
    ]
    return {
        "place": place, "sample": rollout.sample, "reward": rollout.reward, "rewards": rollout.rewards, "status": str(rollout.status),
        "end": str(rollout.end), "dropped": rollout.dropped, "reason": rollout.reason,
        "advantage": fmean(sampled) if sampled else None, "turns": [_turn(turn) for turn in rollout.turns],
    }  # fmt: skip


def _turn(turn: Turn) -> dict[str, Any]:
    call = turn.call and {name: getattr(turn.call, name) for name in ("tool", "source", "text", "error", "frame")}
    return {
        "text": turn.text, "reward": turn.reward, "score": turn.score, "gain": turn.gain, "call": call, "context": turn.context,
        "reply_s": turn.reply_s, "environment_s": turn.environment_s,
        "span": list(turn.span), "images": [_image(image) for image in turn.images],
    }  # fmt: skip


def _image(image: Image) -> dict[str, Any]:
    return {"key": image.key, "tokens": image.num_tokens, "grid": list(image.grid)}


def _episode(rollout: Rollout, told: Tokenizer | str) -> dict[str, Any]:
    """`told`: the tokenizer, or why there is none."""
    tokenizer = None if isinstance(told, str) else told
    plain = (
        "task",
        "example_id",
        "source",
        "question",
        "answer",
        "extra",
        "group",
        "sample",
        "reason",
        "reward",
        "outcome",
        "dropped",
        "rewards",
    )
    seconds = ("wall_s", "environment_s", "scoring_s")
    return {
        **{name: getattr(rollout, name) for name in (*plain, *seconds)}, "status": str(rollout.status), "end": str(rollout.end),
        "verdicts": [asdict(each) for each in rollout.verdicts],
        "turns": [_turn(turn) for turn in rollout.turns], "contexts": [_context(context, tokenizer) for context in rollout.contexts],
        "no_words": told if isinstance(told, str) else "", "prompt": _prompt(rollout, tokenizer),
        "first": [_image(image) for image in _first_shown(rollout)],
    }  # fmt: skip


def _prompt(rollout: Rollout, tokenizer: Tokenizer | None) -> str:
    """What the policy read before its first reply, a picture's places as one; empty without a tokenizer."""
    if tokenizer is None or not rollout.contexts:
        return ""
    stop = rollout.turns[0].span[0] if rollout.turns else None
    words = tokenizer.decode(rollout.contexts[0].token_ids[:stop], skip_special_tokens=False)
    return PADS.sub(lambda found: f"{found[1]} \u00d7 {len(found[0]) // len(found[1])} ", words)


def _first_shown(rollout: Rollout) -> list[Image]:
    """The pictures of the first prompt: those of its context that no turn has brought."""
    if not rollout.contexts:
        return []
    stayed = [turn for turn, after in pairwise(rollout.turns) if turn.context == after.context == 0]
    images = rollout.contexts[0].images
    return images[: len(images) - sum(len(turn.images) for turn in stayed)]


def _context(context: Context, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Tokens with their columns; without a tokenizer they are numbers."""
    ids = context.token_ids
    texts = [str(token) for token in ids] if tokenizer is None else [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    columns = {name: getattr(context, name) for name in ("loss_mask", "engine_logprobs", "versions", *ATTACHED) if getattr(context, name)}
    return {"tokens": texts, "columns": columns, "images": [_image(image) for image in context.images]}


def _tokenizer(run: Path, model: str) -> Tokenizer | str:
    """Of the model that the run began with, or of what it left; where neither can be read, why."""
    for folder in (Path(model) if model else run / "final", run / "final"):
        file = folder / "tokenizer.json"
        if file.is_file():
            try:
                return Tokenizer.from_file(str(file))
            except Exception as error:  # tokenizers 0.23 raises nothing more precise
                return f"{file} cannot be read ({' '.join(str(error).split())[:200]})"
    return "no tokenizer is at hand"


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinities: the page is told null."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return readable(_finite(value))
