"""The address of a server that a command talks to. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tokenspeed.errors import ConfigError

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ServerUrl:
    """Where a server listens, and the path before its routes, without a slash at the end."""

    is_tls: bool
    host: str
    port: int
    path: str

    @classmethod
    def read(cls, text: str) -> ServerUrl:
        """From `http://127.0.0.1:8000`, with or without `/v1`; without a scheme it is http. Raises ConfigError."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port = parts.port
        except ValueError as error:  # an address in brackets, or a port, that is none
            raise ConfigError(f"{text!r} is no URL of a server: {error}") from None
        if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{text!r} is no URL of a server; give one as http://127.0.0.1:8000")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme == "https", parts.hostname, _PORTS[parts.scheme] if port is None else port, path)
