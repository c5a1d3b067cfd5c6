"""The subcommands of `tokenspeed`, as data: a command's module is imported when it is invoked, and not before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LazyCommand:
    """A subcommand: `target` is `"module:command"`, `summary` its line in the help."""

    target: str
    summary: str


COMMANDS = {
    "serve": LazyCommand("tokenspeed.cli.serve:serve", "Serve a model over HTTP."),
    "generate": LazyCommand("tokenspeed.cli.generate:generate", "Continue the prompts of a JSONL file."),
    "score": LazyCommand("tokenspeed.cli.score:score", "Report the logprobs of given sequences."),
    "bench": LazyCommand("tokenspeed.cli.bench:bench", "Measure throughput and latency."),
    "explain": LazyCommand("tokenspeed.cli.explain:explain", "Show which kernels a model would use, and why."),
    "numerics": LazyCommand("tokenspeed.cli.numerics:numerics", "Explain and check what is promised about bits."),
    "kernels": LazyCommand("tokenspeed.cli.kernels:kernels", "List the installed kernels, or prove what they claim."),
    "plugins": LazyCommand("tokenspeed.cli.plugins:plugins", "List the installed plugins and how each one fared."),
    "plugin": LazyCommand("tokenspeed.cli.plugin:plugin", "Start a plugin of your own."),
    "doctor": LazyCommand("tokenspeed.cli.doctor:doctor", "Report on this environment."),
}

BENCH_COMMANDS = {
    "throughput": LazyCommand("tokenspeed.cli.bench_throughput:throughput", "Prefill and decode speed of one model."),
    "latency": LazyCommand("tokenspeed.cli.bench_latency:latency", "How long one batch of requests takes."),
    "serve": LazyCommand("tokenspeed.cli.bench_serve:serve", "Throughput and latencies of a running server."),
    "numerics": LazyCommand("tokenspeed.cli.bench_numerics:numerics", "The speed of rl-bitwise over that of auto."),
    "transformers": LazyCommand("tokenspeed.cli.bench_transformers:transformers", "Speed over that of transformers."),
    "kernels": LazyCommand("tokenspeed.cli.bench_kernels:kernels", "The kernels of this machine against plain torch."),
}

NUMERICS_COMMANDS = {
    "explain": LazyCommand("tokenspeed.cli.numerics:explain", "Show what each switch became, and why."),
    "dump": LazyCommand("tokenspeed.cli.numerics_dump:dump", "Write down what a trainer computes for given tokens."),
    "align": LazyCommand("tokenspeed.cli.numerics_align:align", "Compare the engine with a trainer's dump."),
    "certify": LazyCommand(
        "tokenspeed.cli.numerics_certify:certify", "Verify, and write down what determines the bits."
    ),
    "check": LazyCommand("tokenspeed.cli.numerics_certify:check", "Compare an engine or a server with a certificate."),
    "replay": LazyCommand("tokenspeed.cli.numerics_certify:replay", "Derive saved replies again, bit for bit."),
    "verify": LazyCommand("tokenspeed.cli.numerics_verify:verify", "Compare replies bit by bit under every condition."),
}

KERNELS_COMMANDS = {
    "list": LazyCommand("tokenspeed.cli.kernels:list_kernels", "List the installed kernels (the default)."),
    "verify": LazyCommand("tokenspeed.cli.kernels_verify:verify", "Prove what the kernels declare, on this machine."),
}

PLUGIN_COMMANDS = {
    "new": LazyCommand("tokenspeed.cli.plugin:new", "Generate a kernel or model package, ready to build and test."),
}
