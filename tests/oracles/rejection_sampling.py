"""Rejection sampling written out node by node in float64, and how near its decisions are."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from tests.oracles.rejection_cases import Case, ways

# Below this relative distance float32 may decide otherwise.
MARGIN = 1e-4
# How much of a residual rounding may add or take away.
ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Law:
    """The law at one node; `near` says that float32 may keep other tokens."""

    raw: np.ndarray
    edited: np.ndarray
    p: np.ndarray
    usable: bool
    near: bool


@dataclasses.dataclass(frozen=True)
class Decision:
    accepted: int
    path: list[int]
    final: int
    finite: bool
    near: bool
    overlap: list[float]  # by depth, the chance that a child of the path's node is accepted


def _close(a: float, b: float) -> bool:
    return bool(abs(a - b) <= MARGIN * max(abs(a), abs(b), 1e-30))


def parents_in(case: Case, row: int) -> list[int]:
    return np.atleast_2d(case.drafts.parents)[row if case.drafts.own_trees else 0].tolist()


def as_numpy(case: Case) -> Case:
    """Return the case with NumPy arrays: reading JAX's one element at a time is slow."""
    return jax.tree.map(np.asarray, case)


def edited(case: Case, row: int, node: int) -> np.ndarray:
    t = case.transforms
    x = np.asarray(case.logits[row, node].astype(np.float32)).astype(np.float64)
    if t.bias is not None:
        for token, value in zip(t.bias.tokens[row].tolist(), t.bias.values[row], strict=True):
            if token < x.size:
                x[token] += float(value)
    if t.penalties is not None:
        count = np.asarray(t.penalties.generated[row]).astype(np.int64).copy()
        for ancestor in ways(parents_in(case, row))[node]:
            count[int(case.drafts.tokens[row, ancestor - 1])] += 1
        seen = np.asarray(t.penalties.in_prompt[row]) | (count > 0)
        repetition, frequency, presence = (
            float(getattr(t.penalties, name)[row])
            for name in ("repetition", "frequency", "presence")
        )
        with np.errstate(invalid="ignore"):
            scaled = np.where(x > 0, x / repetition, x * repetition)
        x = np.where(seen, scaled, x) - frequency * count - presence * (count > 0)
    if t.forbidden is not None:
        for token in t.forbidden[row, node].tolist():
            if token < x.size:
                x[token] = -np.inf
    if t.allowed is not None:
        token = np.arange(x.size)
        bit = np.asarray(t.allowed)[row, node, token // 32] >> (token % 32) & 1
        x[bit == 0] = -np.inf
    return x


def law(case: Case, row: int, node: int) -> Law:
    t = case.transforms
    raw = np.asarray(case.logits[row, node].astype(np.float32)).astype(np.float64)
    x = edited(case, row, node)
    if not (np.all(x < np.inf) and np.any(x > -np.inf)):
        return Law(raw, x, np.full(x.shape, np.nan), False, False)
    temperature = float(t.temperature[row])
    order = np.argsort(-x, kind="stable")
    if temperature == 0:
        p = np.zeros(x.shape)
        p[order[0]] = 1
        gap = x[order[0]] - x[order[1]]
        return Law(raw, x, p, True, bool(0 < gap <= MARGIN * max(1.0, abs(x[order[0]]))))
    score = (x - x.max()) / temperature
    near = False
    top_k = int(t.top_k[row])
    if 0 < top_k < x.size:
        last = score[order[top_k - 1]]
        with np.errstate(invalid="ignore"):
            others = np.abs(score[order[top_k - 1 :]] - last)
        near |= bool(np.any((others > 0) & (others <= MARGIN * max(1.0, abs(last)))))
        score = np.where(score >= last, score, -np.inf)
    top_p = np.float64(np.asarray(t.top_p)[row])
    if top_p < 1:
        weight = np.exp(score)
        wanted = top_p * weight.sum()
        levels = np.unique(score[np.isfinite(score)])[::-1]
        masses = np.array([weight[score >= level].sum() for level in levels])
        near |= bool(np.any(np.abs(masses - wanted) <= MARGIN * wanted))
        last = levels[np.searchsorted(masses, wanted)] if masses[-1] > wanted else levels[-1]
        others = np.abs(levels - last)
        near |= bool(np.any((others > 0) & (others <= MARGIN * max(1.0, abs(last)))))
        score = np.where(score >= last, score, -np.inf)
    min_p = np.float64(np.asarray(t.min_p)[row])
    if min_p > 0:
        ratio = np.exp(score)
        near |= bool(np.any(np.abs(ratio - min_p) <= MARGIN * min_p))
        score = np.where(ratio >= min_p, score, -np.inf)
    weight = np.exp(score)
    return Law(raw, x, weight / weight.sum(), True, near)


def _law_of_children(case: Case, row: int, node: int) -> np.ndarray | None:
    """The law that a node's children were drawn from, None where they are point masses."""
    log_q = case.drafts.log_q
    if log_q is None or node >= log_q.shape[1]:
        return None
    # In a tree a greedy row's candidates are the best ones, whatever q.
    if case.drafts.drawn != "chain" and case.transforms.temperature[row] == 0:
        return None
    return np.exp(np.asarray(log_q[row, node]).astype(np.float64))


def decision(case: Case, row: int, laws: list[Law]) -> Decision:
    drafts = case.drafts
    parents = parents_in(case, row)
    node = 0
    path: list[int] = []
    overlap: list[float] = []
    near = False
    while True:
        here = laws[node]
        near |= here.near
        if not here.usable:
            return Decision(len(path), path, -1, False, near, [*overlap, 0.0])
        rest = here.p.copy()
        moved = False
        q = _law_of_children(case, row, node)
        children = [t for t in range(1, len(parents)) if parents[t] == node]
        children = [t for t in children if drafts.valid[row, t - 1]]
        if q is not None and np.isnan(q).any():
            children = []
        tokens = [int(drafts.tokens[row, child - 1]) for child in children]
        missed = 1.0 if q is not None else 1.0 - sum(here.p[token] for token in set(tokens))
        for child, token in zip(children, tokens, strict=True):
            coin = float(case.coins[row, child - 1])
            if q is not None:
                missed *= 1.0 - np.sum(np.minimum(rest, q))
                left, right = coin * q[token], rest[token]
                near |= abs(left - right) < ROUNDING
                fits = q[token] > 0
                after = np.maximum(rest - q, 0)
                if drafts.drawn == "without replacement":
                    q[token] = 0
                    q /= q.sum() if q.sum() > 0 else 1.0
            else:
                left, right, fits = coin * rest.sum(), rest[token], True
                after = rest.copy()
                after[token] = 0
            near |= _close(left, right) or (0 < after.sum() < MARGIN)
            if fits and left < right:
                node, moved = child, True
                path.append(child)
                break
            if after.sum() > 0:
                rest = after / after.sum() if q is not None else after
        overlap.append(1.0 - missed)
        if moved:
            continue
        noise = np.asarray(case.noises[row, node]).astype(np.float64)
        with np.errstate(divide="ignore"):
            drawn = np.log(rest) + noise
            final = int(np.argmax(drawn))
            sure = np.log(max(rest[final] - ROUNDING, 0.0)) + noise[final]
            others = np.log(rest + (ROUNDING if q is not None and children else 0.0)) + noise
        others[final] = -np.inf
        near |= bool(sure - others.max() < 20 * MARGIN)
        return Decision(len(path), path, final, True, near, overlap)
