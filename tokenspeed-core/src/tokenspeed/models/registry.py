"""Architecture name -> model profile and class, from what the installed plugins state."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenspeed.errors import PluginError, Problem
from tokenspeed.models.profile import ModelProfile

if TYPE_CHECKING:
    from tokenspeed.models.base import CausalLM
    from tokenspeed.plugins import PluginHost


class ModelRegistry:
    """The architectures that can be built; `profiles` name each one once (the plugin host sees to that).

    `broken` describes the plugins that cannot be used, one line each; a refusal repeats them.
    """

    def __init__(self, profiles: Iterable[ModelProfile], broken: Iterable[str] = ()) -> None:
        self._profiles = {profile.architecture: profile for profile in profiles}
        self._broken = tuple(broken)

    @classmethod
    def from_plugins(cls, host: PluginHost) -> ModelRegistry:
        """The registry of everything that the host's plugins offer."""
        return cls(host.models(), (report.describe() for report in host.broken()))

    @property
    def architectures(self) -> tuple[str, ...]:
        """Known architecture names, sorted."""
        return tuple(sorted(self._profiles))

    @property
    def embedded(self) -> Mapping[str, str]:
        """Models that distributions carry: short name -> `"package:relative/path"`."""
        found: dict[str, str] = {}
        for profile in self._profiles.values():
            found |= profile.embedded
        return MappingProxyType(found)

    def find(self, architecture: str) -> ModelProfile | Problem:
        """The profile of `architecture`, or why there is none."""
        if profile := self._profiles.get(architecture):
            return profile
        by_distribution: dict[str, list[str]] = {}
        for name in self.architectures:
            known = self._profiles[name]
            by_distribution.setdefault(f"{known.distribution} {known.version}".strip(), []).append(name)
        details = [f"{distribution}: {', '.join(names)}" for distribution, names in sorted(by_distribution.items())]
        return Problem(
            kind="profile",
            summary=f"no installed plugin supports the architecture {architecture}",
            details=(*(details or ["no model plugin is installed"]), *self._broken),
            remedy="install a distribution that supports it (pip install 'tokenspeed[models]' brings Llama and Qwen), "
            "or return a ModelProfile for it from a tokenspeed_models hook",
        )


def model_class(profile: ModelProfile) -> type[CausalLM]:
    """Import the model class that a profile names. PluginError when that fails."""
    module, _, name = profile.model.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"{profile.distribution} {profile.version}: the model of {profile.architecture}, {profile.model}, "
            f"cannot be imported: {error}"
        ) from error
    return found  # type: ignore[no-any-return]
