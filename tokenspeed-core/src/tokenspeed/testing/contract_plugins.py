"""`PluginTests`: the plugin loads, states facts and is cheap to list. Needs pytest."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import ClassVar

from tokenspeed.hookspecs import API_VERSION
from tokenspeed.models.registry import model_class
from tokenspeed.numerics.plan import import_target
from tokenspeed.plugins import PluginReport, load_plugins
from tokenspeed.testing.names import waiver_faults

_LISTING = """
import json, sys, time
import tokenspeed.plugins as plugins
allowed = [sys.argv[1]]
started = time.process_time()
host = plugins.load_plugins(allowed)
seconds = time.process_time() - started
heavy = sorted({"torch", "triton", "flashinfer", "jax", "transformers"} & sys.modules.keys())
print(json.dumps({"seconds": seconds, "heavy": heavy}))
"""


class PluginTests:
    """Subclass it as `TestPlugin`, and name the plugin (its entry point).

    `import_kernels` off leaves implementations alone that need libraries which this machine lacks.
    """

    plugin: ClassVar[str]
    listing_seconds: ClassVar[float] = 0.5
    import_kernels: ClassVar[bool] = True

    def report(self) -> PluginReport:
        """What the host says of the plugin."""
        found = [report for report in load_plugins().reports if report.name == self.plugin]
        assert found, f"no entry point {self.plugin} in the group tokenspeed; is the package installed?"
        return found[0]

    def test_loads(self) -> None:
        """The host uses it: imports, hook names, API version and names are in order."""
        report = self.report()
        assert report.status == "ok", report.error

    def test_contributes(self) -> None:
        """It registers something."""
        report = self.report()
        assert report.kernels or report.models or report.trainer_profiles or report.commands

    def test_states_the_version_of_the_hooks(self) -> None:
        """`TOKENSPEED_API` is written down, so that a later host can tell."""
        module = importlib.import_module(self.report().target.partition(":")[0])
        assert getattr(module, "TOKENSPEED_API", None) == API_VERSION, f"set TOKENSPEED_API = {API_VERSION}"

    def test_listing_is_cheap(self) -> None:
        """Listing imports nothing heavy and takes little CPU time, in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-c", _LISTING, self.plugin], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        cost = json.loads(done.stdout)
        assert cost["heavy"] == [], f"listing imports {', '.join(cost['heavy'])}; name implementations as strings"
        assert cost["seconds"] < self.listing_seconds, f"listing takes {cost['seconds']:.2f} s of CPU time"

    def test_what_it_names_is_there(self) -> None:
        """Every function and class that specs and profiles name can be imported."""
        host = load_plugins()
        report = self.report()
        for spec in host.kernels():
            if spec.name in report.kernels:
                assert not waiver_faults(spec)
                if self.import_kernels:
                    import_target(spec.implementation)
                    if spec.prepare_weights:
                        import_target(spec.prepare_weights)
        for profile in host.models():
            if profile.architecture in report.models:
                model_class(profile)
