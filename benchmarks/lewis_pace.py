"""Throughput of a listener in candidate images per second, and time outside the listener's engine.

Outside the engine, the listener spends time on HTTP, image decoding and prompt rendering.
"""

import asyncio
import base64
import random
import re
import time
from pathlib import Path

import httpx

REQUESTS, ITEMS, CANDIDATES, AT_ONCE = 40, 4, 3, 8
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "gray", "white")


def pace(url: str, pictures: Path) -> str:
    """Measure the listener at `url` and return a one-line summary.

    As in the later steps of a run, the server has already received every image but has not scored
    any of the descriptions.
    """
    return asyncio.run(_pace(url, sorted(pictures.glob("*/*/*.png"))[:60]))


async def _pace(url: str, paths: list[Path]) -> str:
    dice = random.Random(0)
    files = [{"base64": base64.b64encode(path.read_bytes()).decode()} for path in paths]

    def body(number: int) -> dict[str, object]:
        return {"batch": [_item(dice.sample(files, CANDIDATES), f"{number} {item}", dice) for item in range(ITEMS)]}

    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=600) as http:
        await asyncio.gather(*(http.post("/batch_score", json=body(-1 - number)) for number in range(AT_ONCE)))
        before, began, slots = await _engine_s(http), time.perf_counter(), asyncio.Semaphore(AT_ONCE)

        async def ask(number: int) -> None:
            async with slots:
                (await http.post("/batch_score", json=body(number))).raise_for_status()

        await asyncio.gather(*map(ask, range(REQUESTS)))
        seconds, engine = time.perf_counter() - began, await _engine_s(http) - before
    num = REQUESTS * ITEMS * CANDIDATES
    return f"{num} candidates in {seconds:.2f} s: {num / seconds:.1f} per second; engine {engine:.2f} s, other {1 - engine / seconds:.1%}"


def _item(candidates: list[dict[str, str]], name: str, dice: random.Random) -> dict[str, object]:
    colors = dice.sample(COLORS, 3)
    said = f'"a photo of a {colors[0]} thing The thing {name} is {colors[0]}, {colors[1]} and {colors[2]}."'
    question = f"Does this description, {said}, describe the main subject of the image? Answer yes or no."
    return {"question": question, "candidates": candidates}


async def _engine_s(http: httpx.AsyncClient) -> float:
    return float(re.search(r"^listener_engine_seconds (\S+)", (await http.get("/metrics")).text, re.MULTILINE)[1])
