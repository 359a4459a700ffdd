"""Tests TextWorld players that raise, exit, crash, hang or are killed. They block no other episode
and leave no process behind."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.tasks.alfworld.game_files import GAME_FILE
from megatron_rl.tasks.alfworld.player_pool import PLAYER, make_player_pool
from megatron_rl.tasks.alfworld.scene_prompts import write_reply
from megatron_rl.tasks.alfworld.task import AlfworldTask
from megatron_rl.tasks.process_pool import EpisodeProcess
from megatron_rl.types import Example
from tests.conftest import ROOT
from tests.support.alfworld_episodes import make_task, run_replies

HOSTILE = {
    "raises": "{1 / 0}",
    "ends": "{__import__('os')._exit(3)}",
    "crashes": "{__import__('ctypes').string_at(0)}",
    "hangs": "{__import__('time').sleep(60)}",
}
"""Code that the grammar of a game can contain, because TextWorld evaluates it. Here it runs in
response to `inventory`."""


@pytest.fixture(scope="module")
def hostile(alfworld_games: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    source = next((alfworld_games / "train").glob("pick_and_place*/*"))
    for name, rule in {**HOSTILE, "slow": "{__import__('time').sleep(1)}"}.items():
        data = json.loads((source / GAME_FILE).read_text())
        data["grammar"] = data["grammar"].replace("You are not carrying anything.", rule)
        assert rule in data["grammar"]
        folder = root / "train" / source.parent.name / name
        folder.mkdir(parents=True)
        (folder / GAME_FILE).write_text(json.dumps(data))
    return root


def test_a_player_that_fails_fails_one_episode(hostile: Path) -> None:
    """Each kind of failure fails its own episode, while another episode continues. The next episode
    is played, by a new player if the old one has ended."""

    async def side_by_side() -> dict[str, str]:
        task = make_task(hostile, processes=3, call_s=4)
        examples = {example.id.split("/")[1]: example for example in task.examples("train")}
        look, inventory = write_reply("", "look"), write_reply("", "inventory")
        told = {}
        try:
            good = task.env(examples["slow"])
            await good.reset(0)
            (mine,) = players_of(task)
            for name in HOSTILE:
                with pytest.raises(InfraError) as fault:
                    await run_replies(task, examples[name], [look, inventory, look])
                told[name] = str(fault.value)
                assert not (await good.step(look)).tool_call.error
                _, steps = await run_replies(task, examples[name], [look])
                assert len(steps) == 1
            victim = task.env(examples["slow"])
            await victim.reset(0)
            working = asyncio.create_task(victim.step(inventory))
            await asyncio.sleep(0.2)
            (busy,) = [player for player in players_of(task) if player != mine]
            busy.kill()
            with pytest.raises(InfraError, match="the process exited after"):
                await working
            await victim.close()
            assert (await good.step(inventory)).reward == 0
            await good.close()
            keeper = task.player_pool._server
            keeper.kill()
            keeper.wait()
            await asyncio.sleep(0.1)
            _, steps = await run_replies(task, examples["slow"], [look])
            assert not steps[0].tool_call.error and task.player_pool._server is not keeper, "idle players went with their keeper"
        finally:
            everyone = [psutil.Process(task.player_pool._server.pid), *players_of(task)]
            await task.close()
        assert not psutil.wait_procs(everyone, timeout=5)[1], "nobody is left"
        return told

    told = asyncio.run(side_by_side())
    assert "ZeroDivisionError: division by zero" in told["raises"]
    for name in ("ends", "crashes", "hangs"):
        assert "task.options.call_s" in told[name] and '"command": "inventory"' in told[name]


def test_a_player_whose_process_has_ended_is_not_taken_again() -> None:
    """The pool reuses only idle players. Of three released players, the last one's channel is
    closed, and the one before was released in the middle of a response."""

    async def main() -> tuple[EpisodeProcess, list[EpisodeProcess], list[int]]:
        writers = [SimpleNamespace(close=lambda number=number: closed.append(number)) for number in range(3)]
        closed: list[int] = []
        players = make_player_pool(3, timeout_s=1)
        idle = [EpisodeProcess(asyncio.StreamReader(), writer, PLAYER, 1.0) for writer in writers]
        idle[1].is_idle = False
        for each in idle:
            players.release(each)
        idle[2].reader.feed_eof()
        return await players.acquire("game"), idle, closed

    taken, idle, closed = asyncio.run(main())
    assert taken is idle[0] and sorted(closed) == [1, 2]


def players_of(task: AlfworldTask) -> list[psutil.Process]:
    return psutil.Process(task.player_pool._server.pid).children()


def test_the_event_loop_does_not_wait(hostile: Path) -> None:
    """The event loop keeps running while a player takes a second for one command."""

    async def ticking() -> tuple[int, float]:
        task = make_task(hostile)
        (example,) = [example for example in task.examples("train") if example.id.endswith("/slow")]
        env = task.env(example)
        await env.reset(0)
        started, ticks = time.monotonic(), 0
        working = asyncio.create_task(env.step(write_reply("", "inventory")))
        while not working.done():
            await asyncio.sleep(0.01)
            ticks += 1
        spent = time.monotonic() - started
        await env.close()
        await task.close()
        return ticks, spent

    ticks, spent = asyncio.run(ticking())
    assert spent > 1 and ticks > 30


def test_a_game_that_is_none_fails_its_episode_alone(alfworld_games: Path, tmp_path: Path) -> None:
    """A broken game fails only its own episode. It is the first game of a new player server, which
    therefore does not load; the next episode gets a new player server."""
    task = make_task(alfworld_games)
    good = task.examples("train")[0]
    bad = Example(id="bad", payload={**good.payload, "game": str(tmp_path / "a-Mug-None-Desk-1" / "b" / GAME_FILE)})

    async def both() -> None:
        with pytest.raises(InfraError, match="failed to load"):
            await run_replies(task, bad, [])
        await run_replies(task, good, task.gold_replies(good))
        with pytest.raises(InfraError, match="FileNotFoundError"):
            await run_replies(task, bad, [])
        await run_replies(task, good, task.gold_replies(good))
        await task.close()

    asyncio.run(both())


ORPHANS = """
import asyncio, psutil, sys
from megatron_rl.tasks.alfworld.player_pool import make_player_pool

async def hold() -> None:
    players = make_player_pool(2, timeout_s=60)
    playing = [await players.acquire(sys.argv[1]) for _ in range(2)]
    for player in playing:
        await player.send_request(game=sys.argv[1])
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    await asyncio.sleep(60)

asyncio.run(hold())
"""


def test_a_keeper_that_hangs_while_it_loads_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A player server that hangs while it loads is killed after its timeout, and the game raises
    PermanentInfraError."""
    monkeypatch.setattr("megatron_rl.tasks.process_pool.LOAD_TIMEOUT_S", 0.2)
    players = make_player_pool(1, timeout_s=0.2)

    async def take() -> subprocess.Popen[bytes]:
        asked = asyncio.create_task(players.acquire("no game"))
        while players._server is None:
            await asyncio.sleep(0)
        keeper = players._server
        keeper.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(30):
            with pytest.raises(PermanentInfraError, match="failed to load no game"):
                await asked
        return keeper

    assert asyncio.run(take()).poll() == -signal.SIGKILL


def test_nobody_is_left_when_the_run_is_killed(alfworld_games: Path) -> None:
    """The player server and its players end when the run is killed."""
    game = next((alfworld_games / "train").rglob(GAME_FILE))
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(game)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        others = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
        run.kill()
    assert len(others) == 3, "a keeper and two players"
    assert not psutil.wait_procs(others, timeout=10)[1]
