"""`tokenspeed serve`: start the engine in its own process, then serve it over HTTP. This process imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.cli.signals import sigterm_interrupts
from tokenspeed.config import EngineConfig

if TYPE_CHECKING:
    from rich.console import Console

    from tokenspeed.engine.process import ProgressCallback
    from tokenspeed.engine.wire import EngineInfo


def build_engine(config: EngineConfig, progress: ProgressCallback) -> tuple[Any, EngineInfo]:
    """Runs in the engine process: torch is imported there, and only there."""
    progress("importing torch", 0, 0)
    import torch  # noqa: F401  (the slow part; named so that the progress line tells the truth)

    from tokenspeed.startup import build

    progress("planning", 0, 0)
    return build(config, progress)


@click.command(cls=EngineCommand)
@engine_options()
def serve(config: EngineConfig) -> None:
    """Serve MODEL over HTTP, with OpenAI's routes; without MODEL, the small embedded one.

    SIGINT and SIGTERM drain: running requests may finish, new ones get 503. A refused start exits with status 2 and
    every reason.
    """
    from tokenspeed.chat import given_template
    from tokenspeed.cli.output import console
    from tokenspeed.cli.progress import StartProgress
    from tokenspeed.engine.process import EngineProcess
    from tokenspeed.server.run import Listener, Server, make_service

    out = console()
    _log_to_stderr(config.log_level)
    given_template(config)  # what is wrong with it is known before anything is loaded
    listener = Listener.bind(config.host, config.port)
    with sigterm_interrupts(), StartProgress(out) as progress:
        progress("starting the engine process", 0, 0)
        process = EngineProcess.launch(config, build_engine)
        try:
            info = process.wait_ready(progress)
            progress("preparing the HTTP server", 0, 0)
            service = make_service(config, process, info, is_loopback=listener.is_loopback)
            listener.listen()
        except BaseException:
            process.stop(timeout_seconds=0)
            raise
    server = Server(
        service,
        log_level=config.log_level,
        drain_timeout_seconds=config.drain_timeout_seconds,
        on_listening=lambda: _announce(out, config, info, service.limits.defaults.changed(), listener.url),
        say=lambda text: out.print(text, highlight=False, markup=False),
    )
    server.run(sockets=[listener.sock])
    if service.client.failure is not None:
        raise service.client.failure
    out.print("stopped", highlight=False)


def _announce(
    out: Console, config: EngineConfig, info: EngineInfo, defaults: Mapping[str, float | int], url: str
) -> None:
    """The card, what fits, and the address; printed when requests are accepted."""
    out.print(info.card.rstrip("\n"), highlight=False, markup=False, soft_wrap=True)
    out.print(
        f"{info.architecture} {info.dtype}, ready in {info.load_seconds:.1f} s: "
        f"context {info.limits.max_model_len} tokens, KV cache {info.kv_tokens} tokens, "
        f"up to {info.max_num_seqs} requests at once",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if defaults:
        shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
        out.print(f"requests that do not say: {shown} (generation_config.json)", highlight=False, soft_wrap=True)
    if config.host not in ("127.0.0.1", "localhost", "::1") and config.control_key is None:
        out.print("control routes are closed: other machines can connect and there is no --control-key")
    out.print(f"fingerprint {info.fingerprint}", highlight=False)
    out.print(f"serving on {url}", highlight=False, style="bold", soft_wrap=True)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
