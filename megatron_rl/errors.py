"""Exceptions used across modules: infrastructure errors, failed runs and graceful stops."""


class InfraError(RuntimeError):
    """Infrastructure such as a sandbox, judge or network failed, so the rollout has no reward.

    A later retry may succeed.
    """


class PermanentInfraError(InfraError):
    """Infrastructure failed with an error that no retry can fix.

    Examples: a prompt exceeds the context length, an image is invalid, or an engine has failed.
    """


class InfraTimeout(InfraError):
    """Infrastructure was unavailable for longer than the maximum wait.

    Callers should not wait for the same infrastructure again.
    """


class AccessDenied(InfraError):
    """A healthy server rejected the run's key or token.

    A retry would not help, so the run stops.
    """


class RunFailed(RuntimeError):
    """The run cannot continue, for example because too many rollouts failed."""


class InfraOutage(RunFailed):
    """Too many rollouts failed because infrastructure is unavailable.

    Progress is saved, and the same command resumes the run.
    """


class RunDenied(RunFailed):
    """Rollouts failed because a server rejected the run's key or token.

    Progress is saved.
    """


class NonFiniteValue(RunFailed):
    """A number is NaN or infinite.

    Rewards, logprobs, losses and gradients are checked before an update changes the weights.
    Weights are checked after the update.
    """


class LogprobMismatch(RunFailed):
    """Engine and trainer logprobs differ by more than rounding errors can explain."""


class PeerLost(RunFailed):
    """A collective failed because other ranks have exited or do not respond.

    distributed/hang_watchdog.py has already reported the reason.
    """


class GracefulStop(Exception):
    """A stop of the run was requested (run/shutdown.py); raised on every rank.

    The next attempt repeats the interrupted work.
    """
