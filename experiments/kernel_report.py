"""The kernels experiment's tables, goals and picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from experiments import tables

Row = dict[str, Any]

GOALS = (
    "Goals, on an H200: tree attention at 80 % of the measured bandwidth for B >= 8 and S >= "
    "8192,\n60 % at B = 1; rejection sampling within 1.3x of one read of logits and q without "
    "truncation,\n3x with; no op slower than plain XLA. Floor: bytes that must move over the "
    "measured bandwidth."
)


def goals(row: Row, bandwidth: float) -> dict[str, bool]:
    """Return the goals that a timed row has, and whether each is met."""
    seconds, found = row.get("seconds", {}), {}
    if "kernel" not in seconds:
        return {}
    share = row["bytes"] / bandwidth / seconds["kernel"]
    least = row.get("least_share")
    if least is not None:
        found[f"at least {100 * least:.0f} % of the bandwidth"] = share >= least
    most = row.get("most_floors")
    if most is not None:
        found[f"at most {most:g} times the floor"] = 1 / share <= most
    if "xla" in seconds:
        found["not slower than XLA"] = seconds["kernel"] <= seconds["xla"]
    return found


def checks(rows: Sequence[Row]) -> str:
    """Return the table of comparisons."""
    words = {True: "equal", False: "DIFFERS", None: "-"}
    body = [
        [f"{r['op']} {r['case']}", r["implementation"], words[r["passed"]], r["said"]] for r in rows
    ]
    return tables.render(["op and case", "ran as", "against\nthe reference", "found"], body)


def speed(rows: Sequence[Row], bandwidth: float) -> str:
    """Return the table of timed ops."""
    header = [
        "op and case",
        "MB",
        "floor, us",
        "kernel, us",
        "of the\nbandwidth",
        "XLA, us",
        "XLA over\nkernel",
        "JAX's own\nattention, us",
        "goals",
    ]
    body, errors = [], []
    for row in rows:
        seconds = row.get("seconds", {})
        kernel, xla = seconds.get("kernel"), seconds.get("xla")
        floor = row["bytes"] / bandwidth
        met = goals(row, bandwidth)
        missed = [goal for goal, reached in met.items() if not reached]
        body.append(
            [
                f"{row['op']} {row['case']}",
                tables.figure(row["bytes"], 1e-6),
                tables.figure(floor, 1e6),
                tables.figure(kernel, 1e6),
                tables.percent(None if kernel is None else floor / kernel),
                tables.figure(xla, 1e6),
                tables.ratio(xla / kernel if xla and kernel else None),
                tables.figure(seconds.get("dot_product_attention"), 1e6),
                f"MISSED: {'; '.join(missed)}" if missed else ("met" if met else tables.MISSING),
            ]
        )
        errors += [f"{row['op']} {row['case']}, {way}: {e}" for way, e in row["errors"].items()]
    return "\n".join([tables.render(header, body), *errors])


def loop(rows: Sequence[Row]) -> str:
    """Return the table of the whole loop's times."""
    header = [
        "B",
        "rows",
        "kernels, ms",
        "XLA, ms",
        "XLA over\nkernels",
        "T(rows) over\nT(1), kernels",
    ]
    body, notes = [], []
    timed = {(r["batch"], r["nodes"]): r["seconds"] for r in rows if "nodes" in r}
    for row in rows:
        if "drafting" in row:
            notes.append(
                f"B {row['batch']}: n-gram drafting of {row['drafts']} tokens takes "
                f"{tables.figure(row['drafting'], 1e6)} us a round"
            )
            continue
        kernel, xla = row["seconds"].get("kernel"), row["seconds"].get("xla")
        one = timed.get((row["batch"], 1), {}).get("kernel")
        body.append(
            [
                str(row["batch"]),
                str(row["nodes"]),
                tables.figure(kernel, 1e3),
                tables.figure(xla, 1e3),
                tables.ratio(xla / kernel if xla and kernel else None),
                tables.ratio(kernel / one if kernel and one else None),
            ]
        )
        notes += [
            f"B {row['batch']}, {row['nodes']} rows, {way}: {e}" for way, e in row["errors"].items()
        ]
    return "\n".join([tables.render(header, body), *dict.fromkeys(notes)])


def picture(loop_rows: Sequence[Row], speed_rows: Sequence[Row], bandwidth: float) -> bytes | None:
    """Return a PNG of both tables' figures, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    shares, times = figure.subplots(1, 2)
    timed = [
        r for r in speed_rows if r["op"] == "tree_attention" and "kernel" in r.get("seconds", {})
    ]
    for place, row in enumerate(timed):
        for way, marker in (("kernel", "o"), ("xla", "x"), ("dot_product_attention", "+")):
            if way in row["seconds"]:
                share = 100 * row["bytes"] / bandwidth / row["seconds"][way]
                shares.plot(share, place, marker, color={"o": "C0", "x": "C1", "+": "C2"}[marker])
    shares.set_yticks(range(len(timed)), [row["case"] for row in timed], fontsize=7)
    shares.set_xlabel("% of the measured bandwidth (o kernel, x XLA, + JAX's own)")
    shares.set_xlim(left=0)
    for row_batch in dict.fromkeys(r["batch"] for r in loop_rows if "nodes" in r):
        for way, style in (("kernel", "-o"), ("xla", "--x")):
            points = sorted(
                (r["nodes"], 1e3 * r["seconds"][way])
                for r in loop_rows
                if r["batch"] == row_batch and "nodes" in r and way in r["seconds"]
            )
            if points:
                times.plot(*zip(*points, strict=True), style, label=f"B {row_batch}, {way}")
    times.set_xlabel("rows of a pass")
    times.set_ylabel("ms a round")
    if times.lines:
        times.legend(fontsize=7)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()
