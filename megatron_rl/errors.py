"""Exceptions that pass between modules: failures of infrastructure, failures of a run, and requests to stop."""


class InfraError(RuntimeError):
    """Something of ours broke (sandbox, judge, network): it fails the rollout and is never a score. It may be mended by waiting."""


class PermanentInfraError(InfraError):
    """Trouble of ours that no further try can mend: a prompt without room, a picture that is none, an engine that has failed."""


class InfraTimeout(InfraError):
    """What was down was waited for as long as it may be: the same wait again would only add to it."""


class AccessDenied(InfraError):
    """A server is well and does not accept this run's key or token: no outage, which waiting would mend, and the run ends."""


class RunFailed(RuntimeError):
    """The run did what it was told and the outcome is not acceptable: too many failed rollouts, no improvement."""


class InfraOutage(RunFailed):
    """Too many rollouts failed because something of ours is down. What is done is kept, and the same command goes on."""


class RunDenied(RunFailed):
    """Rollouts failed because a server does not accept this run's key or token. What is done is kept."""


class NonFiniteValue(RunFailed):
    """A number is NaN or infinite: it stops the run before any weight takes it."""


class LogprobMismatch(RunFailed):
    """Engine and trainer give sampled tokens logprobs that differ by more than their precision explains."""


class PeerLost(RunFailed):
    """The ranks have lost each other (distributed/hang_watchdog.py); whoever watches the run was told why."""


class GracefulStop(Exception):
    """The run was asked to stop (run/shutdown.py), and every rank does. What was given up for it is done again by the run's next life."""
