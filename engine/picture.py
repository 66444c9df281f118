"""The picture of a profile: stacked bars of the decode step by op. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

from pathlib import Path

from engine.errors import RequestError
from engine.profile import Profile


def require_matplotlib() -> None:
    """Raise RequestError if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RequestError(f"a picture needs matplotlib ({error}): install the extra plots") from None


def draw(profile: Profile, path: Path) -> None:
    """Write the picture to `path`, whose suffix names the format; RequestError if that cannot be done."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.add_subplot()
    lefts = [0.0, 0.0]
    for op, widths in bars(profile).items():
        axes.barh(["added", "alone"], widths, left=lefts, label=op)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.axvline(profile.floor_us, color="black", linestyle="--", label="all bytes at the read ceiling")
    axes.axvline(profile.step_us, color="black", label="replayed graph")
    axes.set_xlabel("us")
    axes.set_title(f"{profile.setting.model}, position {profile.setting.position}: decode step by op")
    figure.legend(loc="outside right upper", fontsize="small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RequestError(f"the picture cannot be written to {path}: {error}") from None


def bars(profile: Profile) -> dict[str, list[float]]:
    """Return by op what its launches add and what the step lacks without them, us; negative differences count as 0."""
    found: dict[str, list[float]] = {"empty graph": [profile.empty_us, 0.0]}
    for group in profile.groups:
        added, alone = found.get(group.op, [0.0, 0.0])
        found[group.op] = [added + group.time_us, alone + group.alone_us]
    return {op: [max(us, 0.0) for us in values] for op, values in found.items()}
