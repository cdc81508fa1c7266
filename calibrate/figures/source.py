"""The line under a figure's title: which device, from where."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.costs.profile import Profile


def source_line(profile: Profile) -> str:
    """Return device, origin and model of a profile, in a line."""
    device = str(profile.device.get("name", "unknown device"))
    parts = [device, _origin(profile)]
    model = profile.provenance.get("model")
    if isinstance(model, dict):
        model = model.get("model")
    if model:
        parts.append(str(model).rpartition("/")[2])
    return "; ".join(parts)


def _origin(profile: Profile) -> str:
    source = profile.provenance.get("source")
    if profile.kind == "imported" and isinstance(source, dict):
        return f"imported from {source.get('name', 'a table')}"
    if profile.kind == "measured":
        return f"measured on {str(profile.provenance.get('date', ''))[:10]}"
    return str(profile.kind)
