"""Chi-square of counts against an exact law."""

from __future__ import annotations

import numpy as np
from scipy import stats

# Seeds are fixed; a correct program fails with one choice of them in a thousand.
LEAST_P = 1e-3


def p_value(observed: np.ndarray, law: np.ndarray) -> float:
    """Return that of a chi-square of counts against a law; rare cells (below 5) are pooled."""
    expected = law.ravel() * observed.sum()
    observed = observed.ravel()
    assert observed[law.ravel() == 0].sum() == 0, "a token of probability 0 was emitted"
    rare = expected < 5
    if rare.any() and expected[rare].sum() > 0:
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    else:
        observed, expected = observed[~rare], expected[~rare]
    assert len(expected) > 5
    return float(stats.chisquare(observed, expected).pvalue)


def cells(law: np.ndarray, count: int) -> np.ndarray:
    """Put tokens in `count` cells of about equal mass, neighbours in rank kept together."""
    order = np.argsort(-law, kind="stable")
    cell = np.empty(len(law), np.int64)
    cell[order] = np.minimum(np.cumsum(law[order]) * count, count - 1).astype(np.int64)
    return cell
