"""The table of attention's cores alone: our kernels beside each of torch's operators."""

from __future__ import annotations

from benchmarks.drawing.results import Result

OURS = "hfai"
TITLES = {"efficient": "memory-efficient", "flash": "flash", "cudnn": "cuDNN"}
PASSES = ("forward", "backward", "weights")


def table(result: Result) -> str:
    """Return a row for each case and pass, ours first; weights have no counterpart of torch's."""
    names = " | ".join([OURS, *TITLES.values()])
    lines = [
        f"| batch × length × heads × head dimension | type | pass | {names} |",
        f"|---|---|---|--:|{'--:|' * len(TITLES)}",
    ]
    for case in result.data["cases"]:
        shape = "×".join(str(number) for number in case["shape"].values())
        for which in PASSES:
            cells = " | ".join(_cell(case[which], name) for name in (OURS, *TITLES))
            lines.append(f"| {shape} | {case['dtype']} | {which} | {cells} |")
    note = (
        "Kernel time in ms, median of the rounds (lowest to highest where they lie more than 5 % "
        "apart). Weights: those averaged over heads."
    )
    return "\n".join([*lines, "", note, "", result.provenance()])


def _cell(times: dict[str, dict[str, float]], name: str) -> str:
    if name not in times:
        return ""
    time = times[name]
    spread = ""
    if time["most"] > 1.05 * time["least"]:
        spread = f" ({time['least']:.3f} to {time['most']:.3f})"
    return f"{time['median']:.3f}{spread}"
