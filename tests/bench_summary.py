"""A hand-made summary of a bench, of which pictures and page are made."""

from __future__ import annotations

from typing import Any

from experiments import throughput


def _percentiles(scale: float) -> dict[str, Any]:
    return {
        name: {"samples": 16, "p50": scale, "p90": 2 * scale, "p99": 3 * scale}
        for name in ("ttft", "tpot", "end_to_end")
    }


def _latency(scale: float) -> dict[str, Any]:
    return {"plain": _percentiles(scale), "speculative": _percentiles(scale / 2)}


def _group(speedup: float) -> dict[str, Any]:
    return {
        "prompts": 2,
        "tokens": 128,
        "identical": 2,
        "widest_gap": None,
        "plain_tokens_per_second": 40.0,
        "speculative_tokens_per_second": 40 * speedup,
        "speedup": speedup,
        "speedup_predicted": speedup * 1.05,
        "predicted_over_measured_walltime": 0.97,
        "rounds": 100,
        "rounds_without_draft": 80,
        "accepted": [10, 5],
        "block_efficiency": 1.28,
        "acceptance_rate": 0.42,
    }


def make(speedups: dict[int, float], categories: dict[str, float]) -> dict[str, Any]:
    """Return a summary with these speedups by batch and by category, at gamma 2."""
    batches = {
        str(batch): {
            "plain_tokens_per_second": 40.0 * batch,
            "speculative_tokens_per_second": 40.0 * batch * speedup,
            "plain_range": [38.0 * batch, 41.0 * batch],
            "speculative_range": [38.0 * batch * speedup, 41.0 * batch * speedup],
            "speedup": speedup,
            "speedup_range": [speedup * 0.9, speedup * 1.1],
            "plain_tokens_per_second_with_prefill": 30.0 * batch,
            "speculative_tokens_per_second_with_prefill": 30.0 * batch * speedup,
            "speedup_with_prefill": speedup,
            "block_efficiency": 1.3,
            "acceptance_rate": 0.4,
            "identical": 24,
            "rows": 24,
            "latency": _latency(0.1 * batch),
        }
        for batch, speedup in speedups.items()
    }
    return {
        "setting": "a model, a machine, a day",
        "peer": None,
        "steps": {
            "gamma": 2,
            "weight_bytes": 5e8,
            "read_bandwidth": 2e10,
            "bandwidth_share": 0.8,
            "step_seconds": {"1 1": 0.02, "1 3": 0.03, "4 1": 0.04, "4 3": 0.1},
            "step_ratios": {"1 1": 1.0, "1 3": 1.5, "4 1": 1.0, "4 3": 2.5},
            "overhead_plain": 0.01,
            "overhead_wide": -0.01,
        },
        "categories": {name: _group(speedup) for name, speedup in categories.items()},
        "total": _group(1.25),
        "latency": _latency(0.25),
        "throughput": {
            "tokens_a_row": 32,
            "repeats": 3,
            "prompts": ["1", "2"],
            "prompt_tokens": [40, 90],
            "categories": list(categories),
            "batches": batches,
            "crossings": throughput.crossings(speedups),
        },
    }
