"""Metrics of a sandbox server in Prometheus' text format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from megatron_rl_sandbox.pool import SandboxPool
from megatron_rl_sandbox.records import CallResult

LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class SandboxMetrics:
    """Metrics of one server.

    Each instance has its own registry, so that several servers in one process do not share metrics.
    """

    def __init__(self, pool: SandboxPool) -> None:
        self.registry = CollectorRegistry()
        Gauge("sandbox_boxes", "Maximum number of open boxes", registry=self.registry).set_function(lambda: pool.size)
        Gauge("sandbox_boxes_open", "Open boxes", registry=self.registry).set_function(lambda: pool.num_open)
        self.calls = Counter("sandbox_calls", "Calls by fault (none, code, host) and limit", ["fault", "limit"], registry=self.registry)
        self.seconds = Histogram(
            "sandbox_call_seconds", "Wall time of a call in seconds", buckets=LATENCY_BUCKETS_S, registry=self.registry
        )
        self.images = Counter("sandbox_images", "Images returned", registry=self.registry)
        self.states_lost = Counter("sandbox_states_lost", "Calls that started without the state of earlier calls", registry=self.registry)
        self.refused_opens = Counter(
            "sandbox_opens_refused", "Boxes not opened, by reason (full, host)", ["reason"], registry=self.registry
        )
        self.abandoned_calls = Counter("sandbox_calls_abandoned", "Calls whose client disconnected", registry=self.registry)
        self.expired_boxes = Counter("sandbox_boxes_expired", "Boxes closed because they were idle", registry=self.registry)

    def record_call(self, result: CallResult) -> None:
        """Update the metrics with the result of a call."""
        self.calls.labels(result.fault.value, result.limit or "").inc()
        self.seconds.observe(result.usage.wall_s)
        self.images.inc(len(result.images))
        if result.state_lost:
            self.states_lost.inc()

    def render_text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
