"""Determines the party at fault and the exceeded limit for a box that died or timed out.

The code is considered at fault only if there is evidence that it caused the failure.
"""

import os
import signal

from megatron_rl_sandbox.layers import Layers
from megatron_rl_sandbox.records import BoxLimits, CallError, Fault
from megatron_rl_sandbox.zygote_manager import ExitStatus, Interpreter

LIMIT_MESSAGES = {
    "memory": "the code used more than {limits.memory} bytes of memory",
    "cpu": "the code used more than {limits.cpu_s} s of processor time in all",
    "processes": "the code had more than {limits.processes} processes and threads",
    "system call": "the code made a system call that no program here may make",
}
"""Error messages, keyed by exceeded limit. CONSEQUENCE is appended to each message."""
CONSEQUENCE = "its processes were killed; variables, imports and files of earlier calls are lost"
STARVED_MESSAGE = "the box was stopped from outside, or had no core to run on"
FaultDiagnosis = tuple[Fault, str | None, CallError]


def diagnose_timeout(seconds: float, *, was_starved: bool) -> FaultDiagnosis:
    """Return the party at fault, the exceeded limit and the error for a call that timed out.

    `was_starved` is the value of `BoxTimer.was_starved` for the call.
    """
    if was_starved:
        return _host_fault(f"{STARVED_MESSAGE}: the call did not finish")
    return _limit_exceeded("time", f"the call ran longer than {seconds:g} s")


def diagnose_death(
    interpreter: Interpreter, exit_: ExitStatus, *, layers: Layers, limits: BoxLimits, out_of_memory: bool, channel_error: str
) -> FaultDiagnosis:
    """Return the fault, limit and error for an interpreter that died or was killed by the pool.

    Args:
        interpreter: Interpreter of the box.
        exit_: Exit status of the interpreter.
        layers: Isolation layers in use.
        limits: Limits of the box.
        out_of_memory: True if the box's control group counted an OOM kill since the code started.
        channel_error: "gone" if the channel closed, else a description of the malformed reply.
    """
    limit = interpreter.exceeded_limit or _find_exceeded_limit(exit_, limits=limits, out_of_memory=out_of_memory)
    if limit is not None:
        return _limit_exceeded(limit, LIMIT_MESSAGES[limit].format(limits=limits))
    if exit_.status is None:
        return _host_fault("the zygote died, and the box with it")
    ended = os.waitstatus_to_exitcode(exit_.status)
    if interpreter.killed_by_pool:
        message = "the code closed the interpreter's channel" if channel_error == "gone" else channel_error
        return _code_fault("InterpreterBroken", message)
    how = signal.Signals(-ended).name if ended < 0 else f"exit status {ended}"
    if ended == -signal.SIGKILL and exit_.lowered_cpu_limit:
        how += " at a limit of processor time of its own"
    elif ended == -signal.SIGKILL and layers.pid_ns:
        # PID 1 of a PID namespace cannot be killed from inside the namespace, and seccomp blocks
        # the known exceptions.
        return _host_fault("the box was killed from outside: is the host out of memory?")
    return _code_fault("InterpreterDied", f"the code ended its own interpreter ({how})")


def _find_exceeded_limit(exit_: ExitStatus, *, limits: BoxLimits, out_of_memory: bool) -> str | None:
    if exit_.status is None or not os.WIFSIGNALED(exit_.status):
        return None
    number = os.WTERMSIG(exit_.status)
    if number == signal.SIGSYS:
        return "system call"
    if number == signal.SIGKILL and out_of_memory:
        return "memory"
    if number in (signal.SIGKILL, signal.SIGXCPU) and exit_.cpu_s >= limits.cpu_s:
        return "cpu"
    return None


def _limit_exceeded(limit: str, shown: str) -> FaultDiagnosis:
    return Fault.CODE, limit, CallError(type="LimitExceeded", message=f"{shown}: {CONSEQUENCE}")


def _code_fault(kind: str, message: str) -> FaultDiagnosis:
    return Fault.CODE, None, CallError(type=kind, message=f"{message}: {CONSEQUENCE}")


def _host_fault(message: str) -> FaultDiagnosis:
    return Fault.HOST, None, CallError(type="SandboxError", message=message)
