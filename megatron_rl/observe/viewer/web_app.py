"""Web server of the viewer page; it answers requests with data and images from files.

Data is sent as JSON. The server writes no files and starts no program except the token decoder.

Model output is treated as data throughout. The page inserts it as text (static/ has no innerHTML).
The content security policy allows only scripts from the page's own files.
"""

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.staticfiles import StaticFiles
from pyarrow import compute
from pydantic import Field
from starlette.middleware.trustedhost import TrustedHostMiddleware

from megatron_rl.io.bounded_files import is_regular
from megatron_rl.io.rollout_codec import IMAGE_KEY_PATTERN
from megatron_rl.observe.viewer.filters import RolloutFilters
from megatron_rl.observe.viewer.overview import make_example_rows, make_overview
from megatron_rl.observe.viewer.store import TABLE_COLUMNS, RunFolder, page_rows, replace_surrogates
from megatron_rl.observe.viewer.token_access import TokenAccess
from megatron_rl.observe.viewer.token_decoder import TokenDecoder
from megatron_rl.types import TOKEN_COLUMNS, Image, Rollout, TokenSequence, Turn

pc = cast(Any, compute)  # pyarrow creates these functions when it is imported, so their types are unknown
STATIC = Path(__file__).parent / "static"
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
OTHER_SITES = ("cross-site", "same-site")
"""Values of the header Sec-Fetch-Site in requests from pages of other sites.

Such requests are rejected unless they result from following a link.
"""
SORTABLE_COLUMNS = tuple(name for name in TABLE_COLUMNS if name not in ("tools", "question", "answer", "responses"))
if TYPE_CHECKING:
    SortColumn = str
else:
    SortColumn = Literal[SORTABLE_COLUMNS]
HIDDEN_IF_CONSTANT = (
    "source", "sample_index", "status", "stop_reason", "num_turns", "num_images", "num_errors", "oldest_version", "question", "answer",
)  # fmt: skip
"""Columns that the table leaves out if all rollouts of the run have the same value."""
MAX_ROWS = 500
TOKENIZER_FILE = "tokenizer.json"
PAD_TOKEN_RUN = re.compile(r"(<\|(?:image|video)_pad\|>)\1*")


class RolloutPageQuery(RolloutFilters):
    """Request for one page of the rollout table."""

    run: str
    sort: SortColumn = "step"
    descending: bool = False
    offset: int = Field(0, ge=0)
    limit: int = Field(50, ge=1, le=MAX_ROWS)


def create_app(folders: Mapping[str, RunFolder], *, hosts: list[str], token: str = "") -> FastAPI:
    """Return the web application.

    Args:
        folders: run directories by label.
        hosts: accepted host names. A request with any other host name may come from a foreign web
            page with a domain that resolves to this machine (DNS rebinding).
        token: secret that every request must contain; "" if only this machine can reach the page.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if token:
        app.add_middleware(TokenAccess, token=token)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    decoders = _DecoderCache()

    app.middleware("http")(_add_security_headers)
    app.exception_handler(MemoryError)(_out_of_memory)

    def folder(run: str) -> RunFolder:
        if run not in folders:
            raise HTTPException(404, f"no run with this name: {run[:80]!r}")
        return folders[run]

    @app.get("/api/runs")
    def runs() -> list[dict[str, Any]]:
        return [_run_summary(name, each) for name, each in folders.items()]

    @app.get("/api/overview")
    def overview() -> dict[str, Any]:
        return _to_json_value(make_overview(folders))

    @app.get("/api/curves")
    def curves(run: str) -> list[dict[str, float | None]]:
        return [{name: _finite_or_none(value) for name, value in line.items()} for line in folder(run).metrics()]

    @app.get("/api/rollouts")
    def rollouts(asked: Annotated[RolloutPageQuery, Query()]) -> dict[str, Any]:
        return _rollout_page(asked, folder(asked.run))

    @app.get("/api/examples")
    def examples(run: str) -> list[dict[str, Any]]:
        return _to_json_value(make_example_rows(folder(run), limit=MAX_ROWS))

    @app.get("/api/group")
    def group(run: str, step: int, group: int) -> dict[str, Any]:
        return _group_response(_read_or_404(lambda: folder(run).load_rollouts(step, lambda row: row["group"] == group)))

    @app.get("/api/episode")
    def episode(run: str, step: int, row_index: int) -> dict[str, Any]:
        return _to_json_value(_episode_response(folder(run), step, row_index, decoders))

    @app.get("/picture/{run:path}/{key}.png")
    def picture(run: str, key: str) -> Response:
        content = folder(run).read_image(key) if IMAGE_KEY_PATTERN.fullmatch(key) else None
        if content is None:
            raise HTTPException(404, "no such image")
        return Response(content, media_type="image/png")

    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def _rollout_page(query: RolloutPageQuery, folder: RunFolder) -> dict[str, Any]:
    table = query.apply(folder)
    rows = page_rows(table, sort=query.sort, descending=query.descending, offset=query.offset, limit=query.limit)
    return {"total": table.num_rows, "rows": [_to_json_value(row) for row in rows], "skipped": folder.skipped}


def _group_response(members: list[tuple[int, Rollout]]) -> dict[str, Any]:
    """Return the members of a group, with the mean and standard deviation of their rewards."""
    rewards = [rollout.reward for _, rollout in members if rollout.reward is not None]
    figures = {"mean": fmean(rewards), "std": pstdev(rewards)} if rewards else {"mean": None, "std": None}
    first = members[0][1] if members else None
    shown = {} if first is None else {
        "question": first.question, "answer": first.answer, "first": [_image_record(image) for image in _prompt_images(first)],
    }  # fmt: skip
    return _to_json_value({**figures, **shown, "members": [_member_record(row_index, rollout) for row_index, rollout in members]})


class _DecoderCache:
    """Cache of the token decoder of each run.

    The tokenizer comes from the run's initial model or, if missing there, from its final model. A
    tokenizer file that has changed is read again.
    """

    def __init__(self) -> None:
        self._found: dict[Path, tuple[tuple[Path, int, int], TokenDecoder]] = {}

    def get_decoder(self, folder: RunFolder) -> TokenDecoder | None:
        final, model = folder.path / "final", folder.model_path()
        file = next((each for each in (Path(model or final) / TOKENIZER_FILE, final / TOKENIZER_FILE) if is_regular(each)), None)
        if file is None:
            return None
        stamp = (file, file.stat().st_mtime_ns, file.stat().st_size)
        if folder.path not in self._found or self._found[folder.path][0] != stamp:
            if folder.path in self._found:
                self._found.pop(folder.path)[1].close()
            self._found[folder.path] = (stamp, TokenDecoder(file))
        return self._found[folder.path][1]


def _episode_response(folder: RunFolder, step: int, row_index: int, decoders: _DecoderCache) -> dict[str, Any]:
    """Return an episode, the previous and the next episode, and the keys of missing images."""
    found = _read_or_404(lambda: folder.load_rollouts(step, lambda row: row["row_index"] == row_index))
    if not found:
        raise HTTPException(404, f"step {step} has no rollout {row_index}")
    shown = _episode_record(found[0][1], decoders.get_decoder(folder))
    before, after = folder.neighbors(step, row_index)
    keys = [image.key for part in (*found[0][1].sequences, *found[0][1].turns) for image in part.images]
    return {**shown, "before": before, "after": after, "missing": folder.missing_images(keys)}


async def _add_security_headers(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
    is_embedded = request.headers.get("sec-fetch-site") in OTHER_SITES and request.headers.get("sec-fetch-mode") != "navigate"
    response = Response("requests from other pages are rejected", 403) if is_embedded else await call(request)
    response.headers.update(SECURITY_HEADERS)
    return response


def _out_of_memory(request: Request, error: Exception) -> Response:
    return Response("reading this requires more memory than --memory-gb", 503, headers=SECURITY_HEADERS)


def _read_or_404(read: Callable[[], list[tuple[int, Rollout]]]) -> list[tuple[int, Rollout]]:
    try:
        return read()
    except (ValueError, OSError, KeyError) as error:
        raise HTTPException(404, " ".join(str(error).split())[:400]) from error


def _run_summary(name: str, folder: RunFolder) -> dict[str, Any]:
    table, metrics = folder.rollout_table(), folder.metrics()
    ends, sources = (sorted(filter(None, pc.unique(table[name]).to_pylist())) for name in ("stop_reason", "source"))
    tools = sorted(pc.unique(pc.list_flatten(table["tools"])).to_pylist())
    last = max((int(line["step"]) for line in metrics), default=None)
    choices = {"stop_reasons": ends, "tools": tools, "sources": sources[:MAX_ROWS]}
    rewards = pc.min_max(table["reward"]).as_py()
    constant = [each for each in HIDDEN_IF_CONSTANT if pc.count_distinct(table[each], mode="all").as_py() <= 1]
    return {
        "name": name, "rollouts": table.num_rows, "last_step": last, **choices, "skipped": folder.skipped, "constant": constant,
        "rewards": [_finite_or_none(rewards["min"]), _finite_or_none(rewards["max"])],
    }  # fmt: skip


def _member_record(row_index: int, rollout: Rollout) -> dict[str, Any]:
    sampled = [
        advantage
        for context in rollout.sequences
        if context.advantages
        for advantage, mask in zip(context.advantages, context.loss_mask, strict=True)
        if mask
    ]
    return {
        "row_index": row_index, "sample_index": rollout.sample_index, "reward": rollout.reward, "reward_terms": rollout.reward_terms,
        "status": str(rollout.status),
        "stop_reason": str(rollout.stop_reason), "filter_reason": rollout.filter_reason, "reason": rollout.reason,
        "advantage": fmean(sampled) if sampled else None, "turns": [_turn_record(turn) for turn in rollout.turns],
    }  # fmt: skip


def _turn_record(turn: Turn) -> dict[str, Any]:
    call = turn.tool_call and {name: getattr(turn.tool_call, name) for name in ("tool", "source", "text", "error", "frame")}
    return {
        "text": turn.text, "reward": turn.reward, "step_score": turn.step_score, "reward_delta": turn.reward_delta, "tool_call": call,
        "sequence": turn.sequence,
        "generation_s": turn.generation_s, "env_s": turn.env_s,
        "token_span": list(turn.token_span), "images": [_image_record(image) for image in turn.images],
    }  # fmt: skip


def _image_record(image: Image) -> dict[str, Any]:
    return {"key": image.key, "tokens": image.num_tokens, "grid": list(image.grid)}


def _episode_record(rollout: Rollout, decoder: TokenDecoder | None) -> dict[str, Any]:
    prompt, texts, no_words = _decode_prompt_and_tokens(rollout, decoder)
    plain = (
        "task",
        "example_id",
        "source",
        "question",
        "answer",
        "extra",
        "group",
        "sample_index",
        "reason",
        "reward",
        "outcome_reward",
        "filter_reason",
        "reward_terms",
    )
    seconds = ("wall_s", "env_s", "scoring_s")
    return {
        **{name: getattr(rollout, name) for name in (*plain, *seconds)}, "status": str(rollout.status),
        "stop_reason": str(rollout.stop_reason),
        "verdicts": [asdict(each) for each in rollout.verdicts],
        "turns": [_turn_record(turn) for turn in rollout.turns], "sequences": [_sequence_record(context,
        texts) for context in rollout.sequences],
        "no_words": no_words, "prompt": prompt,
        "first": [_image_record(image) for image in _prompt_images(rollout)],
    }  # fmt: skip


def _decode_prompt_and_tokens(rollout: Rollout, decoder: TokenDecoder | None) -> tuple[str, dict[int, str], str]:
    """Return the text of the prompt, the text of each token id, and an error message.

    The error message is "" unless decoding failed. Consecutive image placeholders in the prompt are
    merged into one.
    """
    if decoder is None:
        return "", {}, "no tokenizer was found"
    stop = rollout.turns[0].token_span[0] if rollout.turns else None
    first = rollout.sequences[0].token_ids[:stop] if rollout.sequences else []
    tokens = sorted({token for context in rollout.sequences for token in context.token_ids})
    try:
        words, *texts = decoder.decode([first, *([token] for token in tokens)])
    except ValueError as error:
        return "", {}, str(error)
    prompt = PAD_TOKEN_RUN.sub(lambda found: f"{found[1]} \u00d7 {len(found[0]) // len(found[1])} ", words)
    return prompt, dict(zip(tokens, texts, strict=True)), ""


def _prompt_images(rollout: Rollout) -> list[Image]:
    """Return the images of the first prompt.

    The prompt's images are the images in the first sequence that were not added by a turn.
    """
    if not rollout.sequences:
        return []
    stayed = [turn for turn, after in pairwise(rollout.turns) if turn.sequence == after.sequence == 0]
    images = rollout.sequences[0].images
    return images[: len(images) - sum(len(turn.images) for turn in stayed)]


def _sequence_record(context: TokenSequence, texts: Mapping[int, str]) -> dict[str, Any]:
    """Return a sequence's tokens and their columns; a token without text is replaced by its id."""
    columns = {
        name: getattr(context, name)
        for name in ("loss_mask", "rollout_logprobs", "weight_versions", *TOKEN_COLUMNS)
        if getattr(context, name)
    }
    return {
        "tokens": [texts.get(token, str(token)) for token in context.token_ids],
        "columns": columns,
        "images": [_image_record(image) for image in context.images],
    }


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _to_json_value(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot represent, with None."""
    if isinstance(value, dict):
        return {name: _to_json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(each) for each in value]
    return replace_surrogates(_finite_or_none(value))
