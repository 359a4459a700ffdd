"""Tests how requests are distributed over endpoints, retries, backoff and errors, without a
network. Tests with a network are in tests/rewards/test_judge.py.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from megatron_rl.clients.endpoint_pool import Endpoint, EndpointError, EndpointPool, InvalidReply, RequestRejected, parse_retry_after
from megatron_rl.errors import InfraError, PermanentInfraError


def servers(*urls: str, **changes: object) -> EndpointPool:
    made = EndpointPool(
        urls,
        **{
            "name": "listener",
            "max_attempts": 3,
            "timeout_s": 5.0,
            "outage_timeout_s": 5.0,
            "concurrency": 100,
            "backoff_s": 0.01,
            **changes,
        },
    )
    made.start()
    return made


def raising(error: Exception) -> Callable[[Endpoint], Awaitable[str]]:
    async def call(endpoint: Endpoint) -> str:
        raise error

    return call


def outcome(made: EndpointPool, call: Callable[[Endpoint], Awaitable[str]]) -> str:
    """Return the message of the error that the caller receives."""

    async def main() -> str:
        with pytest.raises(InfraError) as caught:
            await made.request(call)
        return str(caught.value)

    return asyncio.run(main())


def test_the_least_busy_is_asked_and_concurrency_is_bounded() -> None:
    made, busy, most = servers("a", "b", "c", concurrency=6), Counter(), Counter()

    async def call(endpoint: Endpoint) -> str:
        busy[endpoint.url] += 1
        assert busy.total() <= 6
        for url in busy:
            most[url] = max(most[url], busy[url])
        await asyncio.sleep(0.01)
        busy[endpoint.url] -= 1
        return endpoint.url

    async def main() -> list[str]:
        async with asyncio.timeout(30):
            return await asyncio.gather(*(made.request(call) for _ in range(30)))

    assert set(asyncio.run(main())) == {"a", "b", "c"} and most == {"a": 2, "b": 2, "c": 2}
    assert (made.requests, made.failures) == (30, 0) and 0.3 <= made.request_seconds < 3


def test_another_takes_over_while_one_rests() -> None:
    made, asked = servers("a", "b", max_attempts=9, backoff_s=30.0), Counter()

    async def call(endpoint: Endpoint) -> str:
        asked[endpoint.url] += 1
        if endpoint.url == "a":
            raise EndpointError("out of memory")
        return "well"

    async def main() -> list[str]:
        return [await made.request(call) for _ in range(20)]

    assert asyncio.run(main()) == ["well"] * 20
    assert asked["b"] == 20 and asked["a"] == made.failures <= 1


@pytest.mark.parametrize(
    ("error", "tries", "rests"),
    [
        (EndpointError("no memory"), 3, True),
        (TimeoutError(), 3, True),
        (InvalidReply("no score"), 3, False),
        (RequestRejected("too long"), 1, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_call_raises_tells_how_it_went(error: Exception, tries: int, rests: bool) -> None:
    made = servers("http://a")
    reason = "TimeoutError: " if isinstance(error, TimeoutError) else str(error)
    assert outcome(made, raising(error)) == f"listener: failed after {tries} of 3 attempts; the last failure: http://a: {reason}"
    assert made.requests == made.failures == tries
    (endpoint,) = made.endpoints
    assert (endpoint.failures, endpoint.backoff_until > 0) == ((3, True) if rests else (0, False)) and endpoint.in_flight == 0


def test_a_rest_that_a_server_asks_for_is_waited_for_or_told() -> None:
    made = servers("http://a", outage_timeout_s=1.0)
    assert outcome(made, raising(EndpointError("busy", retry_after_s=600))) == (
        "listener: all endpoints are backing off; the next available endpoint is http://a, in 600 s; "
        "already waited 0.0 s; the last failure: http://a: busy"
    )
    made, times = servers("http://a"), []

    async def call(endpoint: Endpoint) -> str:
        times.append(time.monotonic())
        if len(times) == 1:
            raise EndpointError("busy", retry_after_s=0.3)
        return "well"

    assert asyncio.run(made.request(call)) == "well" and 0.3 <= times[1] - times[0] < 3


def test_failures_that_overlap_are_one_failure() -> None:
    """Eight requests are in flight when the first fails. The other seven fail one by one, some even
    after the backoff, but count as the same failure because they began before it.
    """
    made = servers("http://a", concurrency=8, max_attempts=1, backoff_s=0.02)

    async def call(endpoint: Endpoint) -> str:
        number = made.requests
        await asyncio.sleep(0.03 * number)
        raise EndpointError("no memory")

    async def main() -> list[BaseException]:
        return await asyncio.gather(*(made.request(call) for _ in range(8)), return_exceptions=True)

    assert [type(fault) for fault in asyncio.run(main())] == [InfraError] * 8 and made.failures == 8
    (endpoint,) = made.endpoints
    assert endpoint.failures == 1


def test_no_rest_is_longer_than_the_patience() -> None:
    """After nine failures in a row of the only endpoint, the backoff is at most outage_timeout_s.
    The request timeout is shorter than any backoff and has no effect.
    """
    made = servers("http://a", max_attempts=9, backoff_s=0.05, outage_timeout_s=0.1, timeout_s=0.01)
    assert "failed after 9 of 9 attempts" in outcome(made, raising(EndpointError("no memory")))
    (endpoint,) = made.endpoints
    assert endpoint.failures == 9 and endpoint.backoff_until - time.monotonic() <= 0.1


def test_trouble_that_waiting_cannot_mend_is_told_apart() -> None:
    """An endpoint that has failed once may recover, so the error is an InfraError. If it only sent
    invalid replies or rejected requests, the error is permanent.
    """

    def raised(*errors: Exception) -> type:
        made, remaining = servers("http://a", max_attempts=len(errors)), iter(errors)

        async def call(endpoint: Endpoint) -> str:
            raise next(remaining)

        return type(asyncio.run(caught(made, call)))

    async def caught(made: EndpointPool, call: Callable[[Endpoint], Awaitable[str]]) -> InfraError:
        with pytest.raises(InfraError) as info:
            await made.request(call)
        return info.value

    assert raised(InvalidReply("no score"), InvalidReply("no score")) is raised(RequestRejected("too long")) is PermanentInfraError
    assert (
        raised(InvalidReply("no score"), EndpointError("no memory"))
        is raised(EndpointError("no memory"), InvalidReply("no score"))
        is InfraError
    )


def test_an_answer_that_is_late_is_none() -> None:
    async def call(endpoint: Endpoint) -> str:
        await asyncio.sleep(9)
        return "late"

    assert outcome(servers("http://a", timeout_s=0.02, max_attempts=1), call).endswith(
        "failed after 1 of 1 attempts; the last failure: http://a: TimeoutError: "
    )


def test_a_mistake_of_ours_comes_out_and_leaves_no_slot_taken() -> None:
    made = servers("http://a", concurrency=1)

    async def well(endpoint: Endpoint) -> str:
        return "well"

    async def main() -> str:
        with pytest.raises(KeyError, match="mine"):
            await made.request(raising(KeyError("mine")))
        async with asyncio.timeout(5):
            return await made.request(well)

    assert asyncio.run(main()) == "well"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7), ("", 0), ("soon", 0), ("-3", 0), ("1e9", 0), ("\u0663", 0), ("9" * 40, 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)
def test_retry_after_reads_seconds_and_dates(header: str, seconds: float) -> None:
    assert parse_retry_after(header) == seconds
    assert parse_retry_after(format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)) == pytest.approx(3600, abs=30)
