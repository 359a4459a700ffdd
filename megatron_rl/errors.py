"""Exceptions that cross module boundaries: infrastructure errors, failed runs, graceful stops."""


class InfraError(RuntimeError):
    """Infrastructure failed (sandbox, judge, network), so the rollout is failed and gets no reward.

    A retry after a wait may succeed.
    """


class PermanentInfraError(InfraError):
    """Infrastructure error that no retry can fix.

    Examples: a prompt that does not fit, an invalid image, an engine that has failed.
    """


class InfraTimeout(InfraError):
    """Infrastructure stayed down for the longest allowed wait; a caller should not wait again."""


class AccessDenied(InfraError):
    """A healthy server rejected the key or token of this run.

    Waiting cannot fix this, so the run ends.
    """


class RunFailed(RuntimeError):
    """The run's outcome is unacceptable: too many failed rollouts, no improvement."""


class InfraOutage(RunFailed):
    """Too many rollouts failed because infrastructure is down.

    Progress is saved, and the same command resumes the run.
    """


class RunDenied(RunFailed):
    """Rollouts failed because a server rejected the key or token of this run. Progress is saved."""


class NonFiniteValue(RunFailed):
    """A number is NaN or infinite.

    Rewards, logprobs, losses and gradients are checked before an update changes the weights,
    weights after it.
    """


class LogprobMismatch(RunFailed):
    """Logprobs of engine and trainer differ by more than their precision explains."""


class PeerLost(RunFailed):
    """A collective failed because other ranks are gone or do not respond.

    distributed/hang_watchdog.py has already reported the reason.
    """


class GracefulStop(Exception):
    """The run was asked to stop (run/shutdown.py); every rank raises it.

    The next attempt repeats the work that was given up.
    """
