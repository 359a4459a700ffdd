"""Judges' servers and their health: one that failed rests for a while, and the others are asked meanwhile."""

import random
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import openai

LONGEST_REST_S = 30.0


@dataclass(slots=True)
class Endpoint:
    """One server. Its rests grow twofold with each failure in a row and vary by half, so that clients do not return together."""

    url: str
    client: openai.AsyncOpenAI
    rest_s: float
    """The first rest."""
    structured: bool = True
    """It holds its model to a JSON schema; False once it has refused one and gone on without."""
    in_flight: int = 0
    failures: int = 0
    """In a row."""
    rest_until: float = field(default=0.0)
    """On time.monotonic's clock."""

    def failed(self, error: Exception, *, began: float) -> None:
        """`began` is when the request that failed was sent: of many that were under way together the first failure counts."""
        now = time.monotonic()
        if began >= self.rest_until:
            rest = min(self.rest_s * 2**self.failures, LONGEST_REST_S) * random.uniform(0.5, 1.0)
            self.failures += 1
            self.rest_until = max(self.rest_until, now + rest)
        if isinstance(error, openai.APIStatusError):
            self.rest_until = max(self.rest_until, now + retry_after(error.response.headers.get("retry-after", "")))

    def answered(self) -> None:
        self.failures = 0


def retry_after(header: str) -> float:
    """Seconds, from a number of them or a date (RFC 9110, 10.2.3); 0 for anything else."""
    text = header.strip()
    if text.isascii() and text.isdigit() and len(text) < 9:
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
