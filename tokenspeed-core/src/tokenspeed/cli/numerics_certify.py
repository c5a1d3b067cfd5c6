"""`tokenspeed numerics certify`, `check` and `replay`: what was computed here, as evidence for later or elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tokenspeed.cli.numerics_verify import load_lab, run_in_process
from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.cli.output import check_writable, console, json_option, print_json
from tokenspeed.config import MACHINE, MODEL, NUMERICS, REPLIES, EngineConfig
from tokenspeed.errors import ConfigError

if TYPE_CHECKING:
    from tokenspeed.numerics.certificate import Certificate
    from tokenspeed.verify.items import Item, Outcome
    from tokenspeed.verify.lab import Lab

REPLAY_TOGETHER = 32
"""Samples that are derived again in one batch."""


@click.command(cls=EngineCommand)
@engine_options(MODEL, NUMERICS, MACHINE, REPLIES, numerics="rl-bitwise")
@click.option("--quick/--full", default=True, help="How much `verify` does first.")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=check_writable,
    help="File; standard output otherwise.",
)
def certify(config: EngineConfig, quick: bool, output: Path | None) -> None:
    """Verify, then write the certificate: what determines the bits, where they were computed, and what was found.

    The weights are read and hashed anew. Nothing is written, and the exit status is 1, when verification fails.
    """
    from tokenspeed.cli.verify_display import VerifyDisplay

    with VerifyDisplay(console(stderr=True)) as display:
        lab, report = run_in_process(config, quick=quick, only=(), display=display, rehash=True)
    if not report.holds:
        display.finish(report)
        raise click.exceptions.Exit(1)
    text = json.dumps(lab.certificate.with_results(report.as_dict()).as_dict(), indent=2) + "\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text)
        click.echo(f"{lab.certificate.fingerprint}: written to {output}")


@click.command(cls=EngineCommand)
@click.argument("certificate_file", metavar="CERTIFICATE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@engine_options(MODEL, NUMERICS, MACHINE, REPLIES, numerics="rl-bitwise")
@click.option("--url", help="Check a running server of ours instead of MODEL.")
@json_option
def check(certificate_file: Path, config: EngineConfig, url: str | None, as_json: bool) -> None:
    """Does this machine with MODEL (the certificate's own if not given), or a server, still match CERTIFICATE?

    Compares everything that determines the bits, then computes the certified replies again. What else has changed (the
    machine, versions, threads) is shown and is no failure. The exit status is 1 when anything that matters differs.
    """
    from tokenspeed.numerics.certificate import Certificate, differences

    old = Certificate.from_dict(_read_json(certificate_file))
    if url is not None:
        new, recomputed = _served_certificate(url), None
    else:
        new, recomputed = _local_certificate(old, config)
    broken = list(differences(old.bits, new.bits))
    changed = [
        line
        for line in differences(old.provenance, new.provenance)
        # The kit is in a certificate of an engine that has started to serve, and in no other.
        if not line.startswith(("harness", "plan", "kernels", "model:", "kit:"))
    ]
    certified = str(old.provenance.get("harness", {}).get("result_digest", ""))
    if recomputed is not None and certified and recomputed != certified:
        broken.append(f"result_digest: {certified[:16]}, now {recomputed[:16]} (replies to the same requests)")
    if as_json:
        print_json(
            {
                "matches": not broken,
                "fingerprint": new.fingerprint,
                "differs": broken,
                "changed": changed,
                "results_computed_again": recomputed is not None,
            }
        )
    else:
        for line in changed:
            click.echo(f"changed, without effect on bits: {line}")
        for line in broken:
            click.echo(f"DIFFERS  {line}")
        again = ", its replies computed again" if recomputed is not None else ""
        click.echo(f"{new.fingerprint}: {'does not match' if broken else 'matches'} {certificate_file}{again}")
    if broken:
        raise click.exceptions.Exit(1)


@click.command(cls=EngineCommand)
@click.argument("file", type=click.File("rb"))
@engine_options(MODEL, NUMERICS, MACHINE, REPLIES, numerics="rl-bitwise")
@click.option("--url", help="Ask a running server instead of an engine in this process.")
@click.option("--url-key", help="API key for --url.")
@json_option
def replay(file: BinaryIO, config: EngineConfig, url: str | None, url_key: str | None, as_json: bool) -> None:
    """Derive the saved replies of a JSONL FILE again, and compare every token id and logprob bit.

    A line is one that `tokenspeed generate` wrote, or {"request": …, "response": …} of a completion with
    "return_token_ids": true. The exit status is 1 when a bit differs or the file holds no reply.
    """
    from tokenspeed.verify.replay import read_saved
    from tokenspeed.verify.replay import replay as compare

    saved = read_saved(file)
    if url is not None:
        from tokenspeed.verify.endpoint import Endpoint

        endpoint = Endpoint(url, url_key)
        endpoint.discover()
        report = compare(saved, endpoint.many_in_turn, fingerprint=endpoint.fingerprint)
    else:
        lab = load_lab(config)
        report = compare(
            saved,
            lambda items: _derive(lab, items),
            fingerprint=lab.certificate.fingerprint,
            logprobs_mode=config.logprobs_mode,
        )
    if as_json:
        print_json(report.as_dict())
    else:
        for other in report.other_fingerprints:
            click.echo(f"saved under another fingerprint: {other}; equal bits are not promised")
        for finding in report.findings:
            click.echo(f"DIFFERS  {finding.describe()}")
        verdict = "0 differing bits" if report.holds else f"{len(report.findings)} samples differ"
        click.echo(f"{report.samples} samples, {report.tokens} tokens and {report.logprobs} logprobs: {verdict}")
    if not report.holds:
        raise click.exceptions.Exit(1)


def _derive(lab: Lab, items: list[Item]) -> Iterable[Outcome]:
    from tokenspeed.cli.progress import counted
    from tokenspeed.verify.script import together

    for first in counted(range(0, len(items), REPLAY_TOGETHER), "computing the saved replies again"):
        yield from lab.run(together(items[first : first + REPLAY_TOGETHER])).outcomes


def _local_certificate(old: Certificate, config: EngineConfig) -> tuple[Certificate, str | None]:
    """The certificate of this machine, and the digest of the certified replies, computed again."""
    from dataclasses import replace

    from tokenspeed.cli.progress import counted
    from tokenspeed.verify.items import result_digest
    from tokenspeed.verify.scenario import WORKS, Stage

    if "model" not in config.given:
        config = replace(config, model=str(old.provenance.get("model", config.model)))
    lab = load_lab(config, rehash=True)
    work = WORKS.get(str(old.provenance.get("harness", {}).get("work", "")))
    if work is None:
        return lab.certificate, None
    stage = Stage(lab, work)
    items = counted(stage.items, "computing the certified replies again")
    return lab.certificate, result_digest((item, lab.alone(item)) for item in items)


def _served_certificate(url: str) -> Certificate:
    from tokenspeed.numerics.certificate import Certificate
    from tokenspeed.verify.endpoint import Endpoint

    found = Endpoint(url).get("/numerics").get("certificate")
    if found is None:
        raise ConfigError(f"{url} serves no certificate at /numerics")
    return Certificate.from_dict(found)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
