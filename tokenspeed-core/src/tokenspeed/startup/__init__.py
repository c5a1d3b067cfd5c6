"""A start, in order: from what the user asked for to a plan, and only then to an engine.

`examine` decides everything and loads nothing: machine, plugins, kernels, model, numerics, operator needs, selection,
sizes. It collects every problem. `prepare` refuses when there is one; `launch` imports the chosen kernels, loads the
weights and builds the engine. What a layer or kernel needs to know arrives as an argument; nothing here is global.
"""

from __future__ import annotations

from tokenspeed.startup.examination import Examination, Prepared, examine, prepare
from tokenspeed.startup.launching import Progress, build, engine_options, launch, load, start

__all__ = [
    "Examination",
    "Prepared",
    "Progress",
    "build",
    "engine_options",
    "examine",
    "launch",
    "load",
    "prepare",
    "start",
]
