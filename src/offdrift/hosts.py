"""Names and addresses of machines: which of them are this one."""

from __future__ import annotations

import ipaddress


def on_this_machine(host: str) -> bool:
    """Whether a host is a loopback address or named as one; what a resolver makes of the name is not asked.

    Example:
        >>> [on_this_machine(host) for host in ("127.0.0.1", "::1", "localhost", "localhost.evil.example", "0.0.0.0")]
        [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")
