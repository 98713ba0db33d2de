"""The bench's report as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments import bench_report, report


def page(summary: dict[str, Any], pictures: Mapping[str, bytes]) -> str:
    """Return the page.

    Args:
        summary: as summary.json has it.
        pictures: PNG files by what they show.
    """
    return report.page(
        "jspec bench",
        "Plain against speculative decoding",
        bench_report.headline(summary),
        summary["setting"],
        pictures,
        bench_report.sections(summary),
    )
