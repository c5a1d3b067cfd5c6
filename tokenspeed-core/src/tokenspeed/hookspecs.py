"""Every hook that a plugin may implement, on one screen.

A plugin is a module (or object) named by an entry point in the group `tokenspeed`. It states facts; the host decides.
It may set `TOKENSPEED_API = 1` to say which version of these hooks it was written for; a plugin written for another
version is reported and not called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from tokenspeed.kernels.spec import KernelSpec
    from tokenspeed.models.profile import ModelProfile
    from tokenspeed.numerics.envelopes import TrainerProfile

PROJECT = "tokenspeed"
API_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def tokenspeed_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Return the kernels that this distribution offers. Must not import their implementations."""


@hookspec
def tokenspeed_models() -> Iterable[ModelProfile]:  # type: ignore[empty-body]
    """Return the model architectures that this distribution supports. Must not import torch."""


@hookspec
def tokenspeed_trainer_profiles() -> Iterable[TrainerProfile]:  # type: ignore[empty-body]
    """Return trainer profiles for `--trainer`: the operation order of a training framework."""


@hookspec
def tokenspeed_commands() -> Iterable[click.Command]:  # type: ignore[empty-body]
    """Return subcommands for the `tokenspeed` command line."""
