"""Addresses of this host, and which servers are on it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from streamer.exceptions import ServerUnreachable, UsageError


def address_towards(urls: Sequence[str], known: Sequence[str] = ()) -> str:
    """The address of this host that the servers' hosts reach it at.

    ``known`` are addresses that servers without a URL are known to reach it at. Loopback only if
    every server is on this host.
    """
    addresses = [*known, *map(_local_address, urls)]
    remote = [item for item in addresses if not ipaddress.ip_address(item).is_loopback]
    return (remote or addresses)[0]


def check_address(address: str, urls: Sequence[str]) -> None:
    """Raise `UsageError` if workers at ``urls`` cannot reach this host at ``address``."""
    found = {ipaddress.ip_address(item) for item in resolve(address)}
    if not found:
        raise UsageError(f"address {address}: there is no host of that name")
    if any(item.is_unspecified for item in found):
        raise UsageError(
            f"address {address} leads nowhere from a worker: give the one that the servers reach "
            "this host at, or none, and it is found out"
        )
    if all(item.is_loopback for item in found):
        for url in urls:
            if not is_here(urlsplit(url).hostname or ""):
                raise UsageError(
                    f"address {address} leads workers of {url} to their own host: give the one "
                    "that they reach this host at, or none, and it is found out"
                )


def resolve(host: str) -> list[str]:
    """The addresses of ``host``; none if there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(item[4][0]).partition("%")[0] for item in found]


def is_here(host: str) -> bool:
    """Whether ``host`` is this one: whether an address of it is an interface's."""
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return True
    return False


def on_one_host(url: str, other: str) -> bool:
    """Whether the hosts of two URLs can be one: by an address, or because both are here."""
    host, second = urlsplit(url).hostname or "", urlsplit(other).hostname or ""
    if host == second or set(resolve(host)) & set(resolve(second)):
        return True
    return is_here(host) and is_here(second)


def _local_address(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=5) as probe:
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise ServerUnreachable(f"{url}: {error.strerror or error}; is the server up?") from error
