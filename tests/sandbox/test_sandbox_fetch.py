"""Tests the bounds of `Box.fetch_files` for an honest and a hostile box."""

import asyncio

import pytest

from megatron_rl_sandbox import BoxLimits, SandboxPool

LIMITS = BoxLimits(disk=4 << 20, input_bytes=1 << 20, file=2 << 20)


def fetched(code: str, names: list[str]) -> tuple[dict[str, int], bool]:
    """Return the sizes of the fetched files by name, and whether the box was killed for its reply.
    Without isolation layers, a box can hold more than its disk limit."""

    async def calls() -> tuple[dict[str, int], bool]:
        async with SandboxPool(size=1, limits=LIMITS, isolation="none") as pool, await pool.open() as box:
            made = await box.run(code)
            assert made.error is None, made
            files = await box.fetch_files(names)
            return {name: len(content) for name, content in files.items()}, (await box.run("1")).state_lost

    return asyncio.run(calls())


def test_an_honest_box_leaves_out_what_goes_past_the_sum():
    """A box leaves out files that would exceed the total of disk and input_bytes, 5 MiB."""
    sizes = {"a": 2 << 20, "b": 2 << 20, "c": (1 << 20) + 1, "d": (1 << 20) - 2, "e": 2, "f": 1}
    code = f"for name, size in {sizes}.items(): open(name, 'wb').write(bytes(size))"
    taken = {name: sizes[name] for name in "abde"}  # 5 MiB together
    assert fetched(code, ["a", "a", *"bcdef"]) == (taken, False)


@pytest.mark.parametrize(("sizes", "taken"), [([2 << 20, 2 << 20, 1 << 20], True), ([2 << 20, 2 << 20, 1 << 20, 1], False)])
def test_a_hostile_box_is_not_read_past_the_sum(sizes: list[int], taken: bool):
    """A forged reply of more than the total of 5 MiB is not read, and its box is killed."""
    names = [str(number) for number in range(50)]
    told = {name: size for name, size in zip(names, sizes, strict=False)}
    code = (
        "import sys\nfrom megatron_rl_sandbox import frames, worker\n"
        "def answer(self, number, names):\n"
        f"    sizes = {told}\n"
        "    self.channel.sendall(frames.pack_frame({'id': number, 'names': list(sizes)}, [bytes(size) for size in sizes.values()]))\n"
        "worker.BoxSession._send_files = answer"
    )
    assert fetched(code, names) == ((told, False) if taken else ({}, True))
