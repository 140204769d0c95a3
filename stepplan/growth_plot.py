"""The chart of `samestep scale` as a PNG picture, drawn by matplotlib, which is imported only when it is drawn."""

import io
from typing import Any

COLOURS = {"strong": "#3f8ccb", "weak": "#d0690b"}
MARKERS = {"strong": "o", "weak": "s"}


def plot_growth(answer: dict[str, Any]) -> bytes:
    """Draw a recipe's speed on more and more devices: samples per second, and beside it efficiency and waiting.

    Args:
        answer: the parsed output of `python -m recipes scale RECIPE --on DEVICE --json`. Devices that the recipe does not fit
            leave a gap.

    Returns:
        The PNG file's content.
    """
    from matplotlib.figure import Figure

    rows = answer["rows"]
    curves = {kind: {row["num_devices"]: row[kind] for row in rows if row[kind]} for kind in COLOURS}
    first, numbers = next(iter(curves["strong"].items()))
    last = rows[-1]["num_devices"]
    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    figure.suptitle(f"{answer['recipe']} on {answer['device']}, predicted")
    speed_axes, share_axes = figure.subplots(1, 2)
    ideal = [numbers["samples_per_second"] * count / first for count in (first, last)]
    speed_axes.plot(
        [first, last], ideal, ":", color="black", zorder=3, label="as fast per device as at the first point"
    )
    for kind, points in curves.items():
        style = {"color": COLOURS[kind], "marker": MARKERS[kind], "markersize": 5, "linewidth": 1.8}
        waiting_shares = [row["exposed_communication"] / row["seconds"] for row in points.values()]
        speed_axes.plot(points.keys(), [row["samples_per_second"] for row in points.values()], label=kind, **style)
        share_axes.plot(
            points.keys(), [100 * row["efficiency"] for row in points.values()], label=f"{kind}: efficiency", **style
        )
        share_axes.plot(
            points.keys(),
            [100 * part for part in waiting_shares],
            "--",
            label=f"{kind}: waiting",
            **style,
            fillstyle="none",
        )
    speed_axes.set(xscale="log", yscale="log", ylabel="samples per second")
    speed_axes.set_title("Speed: the same step (strong), and one that grows with the devices (weak)", fontsize="medium")
    share_axes.set(xscale="log", ylabel="%", ylim=(0, None))
    share_axes.set_title("Efficiency per device, and the share of a step that waits", fontsize="medium")
    ticks = [row["num_devices"] for row in rows][:: -(-len(rows) // 7)]
    for axes in (speed_axes, share_axes):
        axes.set_xlabel("devices")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
