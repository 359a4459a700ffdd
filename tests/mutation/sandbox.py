"""Mutants of sandbox/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a pool does not lock its control groups",
        "sandbox/cgroups.py",
        "self._locks.append(_lock(place / name))",
        "self._locks.append(os.dup(2))",
        "tests/sandbox/test_sandbox_limits.py -k leaves_this_one_alone",
    ),
    Mutant(
        "control groups are removed although their pool holds the lock",
        "sandbox/cgroups.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "tests/sandbox/test_sandbox_limits.py -k leaves_this_one_alone",
    ),
    Mutant(
        "an answer's bytes have no bound near what was asked for",
        "sandbox/bounded_http.py",
        "if len(content) > max_bytes:",
        "if len(content) > max_bytes + (8 << 20):",
        "tests/sandbox/test_bounded_http.py -k too_long",
    ),
    Mutant(
        "a compressed answer is read",
        "sandbox/bounded_http.py",
        'if encoding not in ("", "identity"):',
        'if encoding == "br":',
        "tests/sandbox/test_bounded_http.py -k too_long",
    ),
    Mutant(
        "a redirect is followed",
        "sandbox/bounded_http.py",
        "cookies=cookies, trust_env=False",
        "cookies=cookies, trust_env=False, follow_redirects=True",
        "tests/sandbox/test_bounded_http.py -k redirect",
    ),
    Mutant(
        "a server's cookies are kept",
        "sandbox/bounded_http.py",
        "cookies=cookies, trust_env=False",
        "trust_env=False",
        "tests/sandbox/test_bounded_http.py -k token",
    ),
    Mutant(
        "an answer may take a hundred times its limit",
        "sandbox/bounded_http.py",
        "asyncio.timeout(timeout_s):",
        "asyncio.timeout(100 * timeout_s):",
        "tests/sandbox/test_bounded_http.py -k by_drops",
    ),
    Mutant(
        "a token stands in an error",
        "sandbox/bounded_http.py",
        'return text.replace(token, "***") if token else text',
        "return text",
        "tests/sandbox/test_bounded_http.py -k repeats",
    ),
    Mutant(
        "a sandbox that asks for a token is an outage",
        "sandbox/sandbox_client.py",
        "if answer.status in DENIED_STATUSES:",
        "if answer.status in ():",
        "tests/sandbox/test_sandbox_believed.py -k another_token",
    ),
    Mutant(
        "a request for another server is answered",
        "sandbox/access.py",
        "return match is not None and (",
        'return match is None or ("." in match[0]) or (',
        "tests/sandbox/test_sandbox_access.py -k hosts",
    ),
    Mutant(
        "a request of a web page is answered",
        "sandbox/access.py",
        'if b"origin" in headers or headers',
        "if headers",
        "tests/sandbox/test_sandbox_access.py -k web_page_can_send",
    ),
    Mutant(
        "a body of any type is read",
        "sandbox/access.py",
        '_media_type(headers) != b"application/json"',
        'b"html" in _media_type(headers)',
        "tests/sandbox/test_sandbox_access.py -k web_page_can_send",
    ),
    Mutant(
        "a proof of one port is one of all",
        "sandbox/access.py",
        'f"{challenge} {port}"',
        'f"{challenge} "',
        "tests/sandbox/test_sandbox_access.py -k proves",
    ),
    Mutant(
        "a request is answered twice",
        "sandbox/connections.py",
        "            self.cycle.disconnected = True\n            self.cycle.message_event.set()\n",
        "            self.cycle.message_event.set()\n",
        "tests/sandbox/test_sandbox_access.py -k answered_once",
    ),
)
