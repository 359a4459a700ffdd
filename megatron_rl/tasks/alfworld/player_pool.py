"""Pool of processes (players), each of which runs the TextWorld game of one episode at a time."""

from megatron_rl.tasks.process_pool import ProcessKind, ProcessPool

PLAYER = ProcessKind(
    label="TextWorld",
    server_module="megatron_rl.tasks.alfworld.player_server",
    timeout_key="task.options.call_s",
    max_episodes=200,
)


def make_player_pool(size: int, *, timeout_s: float) -> ProcessPool:
    """Return a pool of at most `size` players.

    The argument of its `acquire` is a game file, which the server loads before it forks players.
    """
    return ProcessPool(size, kind=PLAYER, timeout_s=timeout_s)
