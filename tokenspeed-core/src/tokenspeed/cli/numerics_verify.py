"""`tokenspeed numerics verify`: does what is promised hold, here and now?"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from tokenspeed.cli.options import EngineCommand, NumberRange, engine_options
from tokenspeed.cli.output import console, json_option, print_json
from tokenspeed.cli.signals import sigterm_interrupts
from tokenspeed.config import MACHINE, MODEL, NUMERICS, REPLIES, EngineConfig
from tokenspeed.errors import ConfigError

if TYPE_CHECKING:
    from tokenspeed.cli.verify_display import VerifyDisplay
    from tokenspeed.verify.lab import Lab
    from tokenspeed.verify.report import Report


@click.command(cls=EngineCommand)
@engine_options(MODEL, NUMERICS, MACHINE, REPLIES, numerics="rl-bitwise")
@click.option("--quick/--full", default=True, help="Under a minute, or more than 100 prompts of 128 tokens.")
@click.option("--only", multiple=True, metavar="NAME", help="Run only this scenario. May be repeated.")
@click.option("--soak", "soak_seconds", type=NumberRange(1), help="Add 64 HTTP clients for so many seconds.")
@click.option("--url", help="Verify a running OpenAI-compatible server instead, as http://127.0.0.1:8000.")
@click.option("--url-key", help="API key for --url.")
@json_option
def verify(
    config: EngineConfig,
    quick: bool,
    only: tuple[str, ...],
    soak_seconds: float | None,
    url: str | None,
    url_key: str | None,
    as_json: bool,
) -> None:
    """Compare replies bit by bit under every condition that must not change them.

    The engine runs in this process under rl-bitwise (unless --numerics says otherwise), and once more as a server in
    another one. Every scenario must also prove that its mechanism was at work: requests shared a batch, prefixes came
    from the cache, requests were preempted. The first difference is located by request, position, layer and operator.

    With --url, what the server does not report (prompt logprobs, seeds of samples, cached tokens) is listed as not
    tested. The exit status is 1 when anything differs, proves nothing or was not tested; --only says what to test.
    """
    from tokenspeed.cli.verify_display import VerifyDisplay

    check_names(only)
    with VerifyDisplay(console(stderr=as_json)) as display:
        if url is None:
            _, report = run_in_process(config, quick=quick, only=only, display=display, soak_seconds=soak_seconds)
        else:
            report = run_against(
                url, url_key, config, quick=quick, only=only, display=display, soak_seconds=soak_seconds
            )
    if as_json:
        print_json(report.as_dict())
    else:
        display.finish(report)
    if not report.holds:
        raise click.exceptions.Exit(1)


def check_names(only: tuple[str, ...]) -> None:
    """Refuse a scenario that does not exist."""
    from tokenspeed.verify.invariance import HTTP
    from tokenspeed.verify.scenarios import SCENARIOS
    from tokenspeed.verify.served import SERVED
    from tokenspeed.verify.soak import SOAK

    known = [*SCENARIOS, *(HTTP + scenario.name for scenario in SERVED), HTTP + SOAK]
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(f"--only: there is no scenario {', '.join(unknown)}; the scenarios are {', '.join(known)}")


def run_in_process(
    config: EngineConfig,
    *,
    quick: bool,
    only: tuple[str, ...],
    display: VerifyDisplay,
    rehash: bool = False,
    soak_seconds: float | None = None,
) -> tuple[Lab, Report]:
    """All scenarios here, then those over HTTP against a server in another process."""
    from tokenspeed.verify import soak
    from tokenspeed.verify.child import child_server
    from tokenspeed.verify.invariance import HTTP, verify_engine, verify_served
    from tokenspeed.verify.scenario import FULL, QUICK

    work = QUICK if quick else FULL
    wants_server = not only or any(name.startswith(HTTP) for name in only if name != HTTP + soak.SOAK)
    with ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        lab = load_lab(config, rehash=rehash)
        # The other process starts while this one works.
        sizes = {**SERVER_SIZES, "max_model_len": lab.longest, "threads": lab.threads}
        server = stack.enter_context(child_server(config, **sizes)) if wants_server else None
        report = verify_engine(lab, work, only=only, listener=display)
        if server is not None:
            endpoint = server.endpoint()
            report.scope.append("another process, over HTTP")
            if endpoint.fingerprint != report.fingerprint:
                mine, theirs = report.fingerprint, endpoint.fingerprint
                raise click.ClickException(f"the server in another process has fingerprint {theirs}, this one {mine}")
            verify_served(
                report,
                endpoint,
                work,
                vocab_size=lab.vocab_size,
                alone=lab.alone,
                only=only,
                listener=display,
            )
    if soak_seconds is not None:
        # A server of its own, with too few pages for all clients.
        with sigterm_interrupts(), child_server(config, **{**soak.SERVER_SIZES, "threads": lab.threads}) as soaked:
            verify_served(
                report,
                soaked.endpoint(),
                work,
                vocab_size=lab.vocab_size,
                alone=lab.alone,
                scenarios=[soak.soak_scenario(soak_seconds)],
                listener=display,
            )
    return lab, report


def load_lab(config: EngineConfig, *, rehash: bool = False) -> Lab:
    """The model of `config` in this process; its loading shows on standard error."""
    from tokenspeed.cli.progress import loading
    from tokenspeed.verify.lab import Lab

    with loading() as progress:
        return Lab(config, progress, rehash=rehash)


SERVER_SIZES = {"num_kv_pages": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048}


def run_against(
    url: str,
    key: str | None,
    config: EngineConfig,
    *,
    quick: bool,
    only: tuple[str, ...],
    display: VerifyDisplay,
    soak_seconds: float | None = None,
) -> Report:
    """The scenarios over HTTP against a server that somebody else runs."""
    from tokenspeed.verify import soak
    from tokenspeed.verify.endpoint import Endpoint
    from tokenspeed.verify.invariance import verify_served
    from tokenspeed.verify.report import Report
    from tokenspeed.verify.scenario import FULL, QUICK

    endpoint = Endpoint(url, key, config.served_model_name[0] if config.served_model_name else "")
    endpoint.discover()
    work = QUICK if quick else FULL
    report = Report(url, work.name, endpoint.fingerprint, [f"one server over HTTP ({endpoint.model})"])
    verify_served(report, endpoint, work, vocab_size=SAFE_VOCABULARY, only=only, listener=display)
    if soak_seconds is not None:
        scenario = soak.soak_scenario(soak_seconds)
        verify_served(report, endpoint, work, vocab_size=SAFE_VOCABULARY, scenarios=[scenario], listener=display)
    return report


SAFE_VOCABULARY = 256
"""Token ids below this exist in every vocabulary."""
