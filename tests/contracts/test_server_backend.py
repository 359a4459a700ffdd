"""Only rollout/vllm/ contains URL paths of vLLM's server; other modules use
rollout/server_backend.py.

tests/remote/test_vllm_server_contract.py tests the protocol with real servers.
"""

import ast
import inspect
import re
import types
import typing

from megatron_rl.rollout.server_backend import ServerBackend
from megatron_rl.rollout.vllm.server_api import VllmServer
from tests.conftest import ROOT


def test_vllms_server_has_the_protocols_members() -> None:
    server = VllmServer("http://127.0.0.1:1")
    hints = typing.get_type_hints(ServerBackend)
    assert len(hints) >= 11 and all(hasattr(server, name) for name in hints)
    plain = {name: kind for name, kind in hints.items() if isinstance(kind, type) and not isinstance(kind, types.GenericAlias)}
    assert len(plain) >= 8 and all(isinstance(getattr(server, name), kind) for name, kind in plain.items())
    methods = [name for name, member in vars(ServerBackend).items() if inspect.iscoroutinefunction(member)]
    assert sorted(methods) == ["abort_requests", "read_progress", "read_weight_label"]
    for name in methods:
        assert inspect.signature(getattr(VllmServer, name)) == inspect.signature(getattr(ServerBackend, name))


def test_no_url_path_is_known_outside_of_it() -> None:
    """No string in a module directly in rollout/ starts like a URL path, except /weights of the
    services that a run publishes to.
    """
    modules = sorted((ROOT / "megatron_rl" / "rollout").glob("*.py"))
    strings = {
        f"{path.name}:{node.lineno}: {node.value}" for path in modules for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"/[a-z]", node.value)
    }  # fmt: skip
    assert len(modules) > 20 and {string.split(":")[0] for string in strings} == {"weight_publisher.py"}, strings
