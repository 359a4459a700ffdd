"""Tests weight transfer to servers. Each server is a stand-in with vLLM's four weight-transfer
calls that receives the weights over the same transport (gloo) in threads.
"""

import hashlib
import time
from collections.abc import Iterator
from threading import Event

import pytest
import torch

from megatron_rl.clients.endpoint_pool import EndpointError
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl.rollout.vllm.weight_sender import WeightSender, require_matching, run_in_daemon_thread
from megatron_rl.rollout.vllm.weight_transport import (
    TRANSPORTS,
    Bucket,
    GlooTransport,
    Rendezvous,
    UpdateDigest,
    open_store,
    pack_bucket,
    unpack_bucket,
)
from tests.support.hostile_server import serve_hostile
from tests.support.json_server import server_url, start_server, stop_server

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
TENSORS = {
    "a": torch.randn(7, 3, generator=GENERATOR), "b": torch.randn(5, generator=GENERATOR).bfloat16(),
    "c": torch.randn(40, 11, generator=GENERATOR), "d": torch.zeros(0, 4), "e": torch.randn(1, generator=GENERATOR),
}  # fmt: skip


class StandIn:
    """Server that answers the path `fails` with 500, after its first `after` requests."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held: dict[str, torch.Tensor] = {}
        self.label, self.fails, self.after = "default", "", 0
        self.wire, self.is_open, self.digest = None, False, UpdateDigest()
        self.drips = ""
        """Path that is answered byte by byte, without end."""
        self.is_over = Event()
        self.flips = False
        """If True, one bit of the received weights is flipped."""
        self.holds = Event()
        """The server receives buckets only while this event is set."""
        self.holds.set()
        self.http = start_server(self.answer)
        self.url = server_url(self.http)

    def answer(self, asked: str, body: dict) -> tuple[int, dict]:
        path = asked.partition("?")[0]
        self.calls.append(path)
        if path == self.drips:
            return 200, iter(self.drop, b"")
        if path == self.fails and self.calls.count(path) > self.after:
            return 500, {"error": "it would not"}
        sums = {name: hashlib.sha256(tensor.float().numpy()).hexdigest() for name, tensor in self.held.items()}
        told = {"/weight_info": {"weight_version": self.label}, "/weight_checker": {"checksums": sums}}
        told |= {
            "/version": {"version": "0.32.0"},
            "/collective_rpc": {"results": [{"model": "m"}]},
            "/get_world_size": {"world_size": 1},
        }
        try:
            {
                "/init_weight_transfer_engine": self.meet, "/start_weight_update": self.start, "/update_weights": self.take,
                "/finish_weight_update": self.finish,
            }.get(path, lambda body: None)(body)  # fmt: skip
        except RuntimeError as error:
            return 500, {"error": str(error)}
        return 200, told.get(path, {})

    def drop(self) -> bytes:
        return b"" if self.is_over.wait(0.02) else b" "

    def meet(self, body: dict) -> None:
        claim = dict(body["init_info"])
        self.owner = claim.pop("owner")
        meeting = Rendezvous(**claim)
        self.wire = TRANSPORTS[meeting.kind](meeting, open_store(meeting, rank=1), rank=1, device=CPU)

    def start(self, body: dict) -> None:
        if self.is_open:
            raise RuntimeError("an update is already active")
        self.is_open, self.held, self.digest = True, {}, UpdateDigest()

    def take(self, body: dict) -> None:
        bucket = Bucket(**body["update_info"])
        if bucket.num_bytes < 0:
            self.is_open = False
            raise RuntimeError("no bucket")
        self.holds.wait(30)
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        self.wire.broadcast(flat)
        tensors = unpack_bucket(bucket, flat)
        self.digest.add(tensors)
        self.held |= {name: tensor.clone() for name, tensor in tensors}
        if self.flips and bucket.digest:
            self.held["c"].view(torch.int32)[3, 5] ^= 1
        if bucket.digest and bucket.digest != self.digest.hexdigest():
            raise RuntimeError("the received weights differ from the sent weights")

    def finish(self, body: dict) -> None:
        self.is_open, self.label = False, body["weight_version"]


@pytest.fixture
def two() -> Iterator[tuple[StandIn, StandIn]]:
    both = StandIn(), StandIn()
    yield both
    for each in both:
        each.is_over.set()
        stop_server(each.http)


def sender_to(*servers: StandIn, **changes: object) -> WeightSender:
    given = {"expected": {"model": "m"}, "owner": "me", "kind": "gloo", "device": CPU, "bucket_bytes": 50, "timeout_s": 10.0, **changes}
    return WeightSender([VllmServer(each.url) for each in servers], **given)


def send(sender: WeightSender, label: str, *to: StandIn, scale: float = 1.0) -> tuple[list[str], dict[str, str]]:
    return sender.send(((name, scale * tensor) for name, tensor in TENSORS.items()), label, urls=[each.url for each in to])


def holds(server: StandIn, *, scale: float = 1.0) -> bool:
    return server.held.keys() == TENSORS.keys() and all(torch.equal(server.held[name], scale * each) for name, each in TENSORS.items())


def test_what_lies_where_in_the_bytes() -> None:
    """Each tensor begins at a multiple of 16 bytes and is unpacked unchanged. The digest depends on
    the order, the names and the bits of the tensors.
    """
    tensors = list(TENSORS.items())
    bucket, flat = pack_bucket(tensors)
    assert flat.numel() == bucket.num_bytes == 96 + 16 + 1760 + 0 + 16
    for (name, tensor), (sent, expected) in zip(unpack_bucket(bucket, flat), tensors, strict=True):
        assert name == sent and tensor.dtype == expected.dtype and torch.equal(tensor, expected)
    nearly, texts = tensors[0][1].nextafter(torch.ones(1)), set()
    for changed in (tensors, tensors[::-1], [("z", tensors[0][1]), *tensors[1:]], [("a", nearly), *tensors[1:]]):
        digest = UpdateDigest()
        digest.add(changed)
        texts.add(digest.hexdigest())
    assert len(texts) == 4


def test_two_servers_hold_what_was_sent(two: tuple[StandIn, StandIn]) -> None:
    """Both servers receive the weights in several buckets, are paused before the first bucket and
    resumed after the last, and report the label of the update.
    """
    sender = sender_to(*two)
    sender.lock_servers()
    for number, label in enumerate(("mine.0", "mine.1")):
        began = time.perf_counter()
        assert send(sender, label, *two, scale=1.0 + number) == ([each.url for each in two], {})
        update_s = time.perf_counter() - began
        for each in two:
            assert holds(each, scale=1.0 + number) and each.label == label and each.owner == "me"
    first = two[0].calls[two[0].calls.index("/pause") :]
    assert first[: first.index("/resume") + 1] == [
        "/pause", "/start_weight_update", *["/update_weights"] * 3, "/weight_checker", "/reset_encoder_cache", "/finish_weight_update",
        "/resume",
    ]  # fmt: skip
    assert two[0].calls.count("/init_weight_transfer_engine") == 1, "one group for all updates"
    assert two[0].calls.count("/weight_checker") == 1, "all weights are read once in a life"
    assert 0 < sender.transfer_s < update_s


STOPS = [("/pause", 0), ("/start_weight_update", 0), ("/update_weights", 0), ("/update_weights", 2)]
STOPS += [("/weight_checker", 0), ("/reset_encoder_cache", 0), ("/finish_weight_update", 0)]


@pytest.mark.parametrize(("path", "after"), STOPS)
def test_one_that_fails_on_the_way_is_left_out(
    two: tuple[StandIn, StandIn], path: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """If a server fails during an update, the other server still receives all weights. The failed
    server is not resumed and its process group is closed. The next update or `add_server` restores
    it in a new group.
    """
    left: list[GlooTransport] = []
    monkeypatch.setattr(GlooTransport, "close", lambda wire: left.append(wire))
    bad, good = two
    sender = sender_to(*two)
    sender.lock_servers()
    bad.fails, bad.after = path, after
    held, faults = send(sender, "mine.1", *two)
    assert held == [good.url] and holds(good) and good.label == "mine.1"
    assert faults.keys() == {bad.url} and faults[bad.url].startswith(f"{path}: 500") and "/resume" not in bad.calls
    assert bad.label == "default", "by its label it would be let in"
    assert len(left) == 1 and left[0] is not sender._connections[good.url].transport
    bad.fails = ""
    sender.add_server(bad.url)
    assert holds(bad) and bad.label == "mine.1" and bad.calls[-1] == "/resume"
    assert send(sender, "mine.2", *two, scale=3.0)[0] == [bad.url, good.url] and holds(bad, scale=3.0)


@pytest.mark.parametrize("path", dict.fromkeys(path for path, _ in STOPS))
def test_one_that_answers_by_drops_is_left_out_in_time(two: tuple[StandIn, StandIn], path: str) -> None:
    """A server that replies byte by byte never exceeds a read timeout, and in a world of one
    process no other timeout ends the update. The update skips the server after its timeout of 0.3
    s.
    """
    bad, good = two
    sender = sender_to(*two)
    sender.lock_servers()
    sender._connections[
        bad.url
    ].server._max_timeout_s = 0.3  # parallel.timeout_s would apply to both, and the other server needs more time on a busy machine
    bad.drips, began = path, time.monotonic()
    held, faults = send(sender, "mine.1", *two)
    assert held == [good.url] and holds(good) and faults == {bad.url: f"{path}: no complete response within 0.3 s"}
    assert time.monotonic() - began < 20


def test_an_end_of_ours_that_hangs_is_not_waited_for_either(two: tuple[StandIn, StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast that hangs on the trainer's side is abandoned after the timeout. NCCL has no
    timeout of its own, even if the server has received the bucket.
    """
    bad, good = two
    sender = sender_to(*two)
    sender.lock_servers()
    sender._connections[bad.url].timeout_s = 0.5
    bad_wire, over = sender._connections[bad.url].transport, Event()
    broadcast = GlooTransport.broadcast
    monkeypatch.setattr(bad, "take", lambda body: None)
    monkeypatch.setattr(GlooTransport, "broadcast", lambda wire, flat: over.wait(10) if wire is bad_wire else broadcast(wire, flat))
    held, faults = send(sender, "mine.1", *two)
    over.set()
    assert held == [good.url] and faults == {bad.url: "/update_weights: not finished within parallel.timeout_s=0.5"}


def test_servers_that_cut_their_weights_otherwise_are_not_compared() -> None:
    whole, cut = {"tp0:a": "1"}, {"tp0:a": "2", "tp1:a": "3"}
    require_matching(cut, whole, reference_url="http://whole")
    require_matching(whole, cut, reference_url="http://cut")
    with pytest.raises(EndpointError, match=r"^has different weights from http://cut: 1 tensor\(s\) differ, starting with tp1:a"):
        require_matching(cut | {"tp1:a": "4"}, cut, reference_url="http://cut")


def test_all_hold_the_same_by_their_own_word(two: tuple[StandIn, StandIn]) -> None:
    """The servers' checksums are compared after the first update. A server whose weights changed by
    one bit after its own digest check is left out.
    """
    good, bad = two
    sender = sender_to(*two)
    sender.lock_servers()
    bad.flips = True
    line = f"has different weights from {good.url}: 1 tensor(s) differ, starting with c (/weight_checker)"
    assert send(sender, "mine.0", *two) == ([good.url], {bad.url: line}) and bad.label == "default"
    bad.flips = False
    before = good.calls.count("/weight_checker")
    sender.add_server(bad.url)
    assert holds(bad) and bad.label == "mine.0"
    assert good.calls.count("/weight_checker") == before, "one that serves would answer nobody while it reads them"


def test_an_update_does_not_wait_for_one_that_has_come_back(two: tuple[StandIn, StandIn]) -> None:
    """A restarted server receives the last weights while a newer update goes to the other servers.
    It then has the complete weights that were the newest when its transfer began, with their
    label.
    """
    back, other = two
    sender = sender_to(*two)
    sender.lock_servers()
    send(sender, "mine.0", *two)
    back.holds.clear()
    admitted = run_in_daemon_thread(lambda: sender.add_server(back.url))
    while back.calls.count("/start_weight_update") < 2:
        time.sleep(0.01)
    held, faults = send(sender, "mine.1", *two, scale=2.0)
    assert held == [other.url] and holds(other, scale=2.0) and not admitted.done()
    assert faults == {back.url: "is still receiving the previous weights"}
    back.holds.set()
    admitted.result(30)
    assert holds(back) and back.label == "mine.0"
    sender.add_server(back.url)
    assert holds(back, scale=2.0) and back.label == "mine.1"
    assert send(sender, "mine.2", *two, scale=3.0) == ([each.url for each in two], {})


def test_who_was_given_nothing_is_not_let_in(two: tuple[StandIn, StandIn]) -> None:
    sender = sender_to(*two)
    with pytest.raises(EndpointError, match="no weights have been sent yet"):
        sender.add_server(two[0].url)


def test_an_update_that_another_trainer_left_open_is_ended(two: tuple[StandIn, StandIn]) -> None:
    two[0].is_open = True
    sender = sender_to(*two)
    sender.lock_servers()
    assert send(sender, "mine.0", *two) == ([each.url for each in two], {}) and holds(two[0])


def test_a_server_that_asks_for_a_key_is_told(two: tuple[StandIn, StandIn]) -> None:
    """The error names the setting to change."""
    with serve_hostile("401") as url:
        line = rf"engine.urls={url}: /version: 401, no such key; the server rejects .*; set engine.token_file to .*"
        with pytest.raises(ValueError, match=f"^{line}$"):
            VllmServer(url).check({"model": "m"})
    with serve_hostile("body by drops") as url:
        line = rf"^engine.urls={url}: no vLLM server responds at this URL \(/version: no complete response within 0.3 s\)"
        with pytest.raises(ValueError, match=line):
            VllmServer(url, max_timeout_s=0.3).check({"model": "m"})


def test_a_server_that_cannot_be_had_is_told(two: tuple[StandIn, StandIn]) -> None:
    """An error is raised for a server that refuses the connection, such as another run's, and for a
    server with a different model.
    """
    two[1].fails = "/init_weight_transfer_engine"
    with pytest.raises(ValueError, match=rf"^engine.urls={two[1].url}: cannot be used \(/init_weight_transfer_engine: 500.*it would not"):
        sender_to(*two).lock_servers()
    with pytest.raises(ValueError, match=r"has model m, but this run has x; start it with"):
        sender_to(two[0], expected={"model": "x"}).lock_servers()
