"""Selects the proxy for an address from environment variables, and names the proxy in errors.

The variables are HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY. Requests to this machine, and to
hosts listed in NO_PROXY, use no proxy. NO_PROXY may list names (including their subdomains),
addresses, networks (10.0.0.0/8) and `*`. These proxies apply to the clients for judges, for
evaluation endpoints, and for listeners with task.listener.proxy=true. All other clients of a run
(for engines, services and sandboxes) connect directly, wherever the servers run.
"""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import (
    getproxies_environment,
    proxy_bypass_environment,  # pyright: ignore[reportAttributeAccessIssue]  # missing from typeshed
)

import psutil


@dataclass(slots=True, frozen=True)
class Proxy:
    """Proxy through which requests to an address are sent."""

    variable: str
    """Environment variable that defines the proxy."""
    address: str
    """Address of the proxy."""
    host: str
    """Host that is reached through the proxy."""

    @property
    def error_hint(self) -> str:
        """Text that is appended to an error message about a failed request.

        Example: ` (sent through HTTP_PROXY=http://proxy:3128; unset it, or set NO_PROXY=judge)`
        """
        user, _, place = self.address.rpartition("@")
        shown = f"***@{place}" if user else self.address  # hide a password
        return f" (sent through {self.variable}={shown}; unset it, or set NO_PROXY={self.host})"


def find_proxy(url: str) -> Proxy | None:
    """Return the proxy for an address; None if the connection is direct."""
    parts = urlsplit(url)
    scheme, host = parts.scheme.casefold(), (parts.hostname or "").rstrip(".")
    proxies = getproxies_environment()
    kind = next((kind for kind in (scheme, "all") if proxies.get(kind)), "")
    if not kind or not host or _is_own(host) or _is_listed(host, proxies.get("no", "")):
        return None
    variable = next(name for name in (f"{kind}_proxy", f"{kind}_proxy".upper()) if os.environ.get(name))
    address = proxies[kind]
    return Proxy(variable, address if "://" in address else f"http://{address}", host)


def proxy_hint(url: str) -> str:
    """Return `Proxy.error_hint` for the proxy of this address, or '' if no proxy is used."""
    proxy = find_proxy(url)
    return proxy.error_hint if proxy else ""


def _is_own(host: str) -> bool:
    """Return True if the host is a name or an address of this machine."""
    if host == "localhost" or host.endswith(".localhost") or host in _own_names():
        return True
    try:
        address = ip_address(host)
    except ValueError:  # a name
        return False
    own = {each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found}
    return address.is_loopback or address.is_unspecified or str(address) in own


@cache
def _own_names() -> frozenset[str]:
    name = socket.gethostname().casefold()
    return frozenset((name, name.partition(".")[0]))


def _is_listed(host: str, no_proxy: str) -> bool:
    words = [word.strip().removeprefix("*.") if word.strip() != "*" else "*" for word in no_proxy.split(",")]
    if "*" in words or proxy_bypass_environment(host, {"no": ",".join(words)}):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in _networks(words))


def _networks(words: list[str]) -> Iterator[IPv4Network | IPv6Network]:
    for word in words:
        try:
            yield ip_network(word, strict=False)
        except ValueError:
            continue
