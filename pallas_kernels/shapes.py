"""Attention shapes of real models, in one list for tests and benchmarks."""

from __future__ import annotations

import dataclasses

BATCHES = (1, 8, 32, 64)
SLOTS = (2048, 8192, 32768)
NODES = (1, 5, 16, 64)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One layer's attention on one chip.

    Attributes:
        name: the model, with its share of the heads under tensor parallelism.
        heads: N, query heads of the share.
        groups: G, KV heads of the share.
        head_dim: H.
        vocab_size: V, of the whole model.
        window: of its sliding-window layers, or None where it has none.
        source: the published configuration that the numbers are from.
    """

    name: str
    heads: int
    groups: int
    head_dim: int
    vocab_size: int
    window: int | None = None
    source: str = ""


# From each model's config.json; a share at tensor parallelism 8 has 1/8 of both head counts.
MODELS = (
    AttentionShape("smollm2-135m", 9, 3, 64, 49152, source="HuggingFaceTB/SmolLM2-135M"),
    AttentionShape("llama-3.2-1b", 32, 8, 64, 128256, source="meta-llama/Llama-3.2-1B"),
    AttentionShape("llama-3.2-3b", 24, 8, 128, 128256, source="meta-llama/Llama-3.2-3B"),
    AttentionShape("llama-3.1-8b", 32, 8, 128, 128256, source="meta-llama/Llama-3.1-8B"),
    AttentionShape("llama-3.1-70b-tp8", 8, 1, 128, 128256, source="meta-llama/Llama-3.1-70B"),
    AttentionShape("qwen3-32b-tp8", 8, 1, 128, 151936, source="Qwen/Qwen3-32B"),
    AttentionShape("gemma-3-27b-tp8", 4, 2, 128, 262208, 1024, source="google/gemma-3-27b-it"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an attention kernel: B rows of T nodes over S slots."""

    model: AttentionShape
    batch: int
    nodes: int
    slots: int

    @property
    def name(self) -> str:
        """For test ids and tables."""
        return f"{self.model.name}-B{self.batch}-T{self.nodes}-S{self.slots}"

    def cache_bytes(self, itemsize: int) -> int:
        """Bytes of one layer's keys and values."""
        model = self.model
        return 2 * self.batch * model.groups * self.slots * model.head_dim * itemsize


CASES = tuple(
    Case(model, batch, nodes, slots)
    for model in MODELS
    for batch in BATCHES
    for nodes in NODES
    for slots in SLOTS
)


def spread(count: int) -> tuple[Case, ...]:
    """Return `count` different cases (of at most 84) that leave out no model, batch or length.

    All factors go round at once; their numbers are coprime but for batches and widths, which are
    shifted against each other.
    """
    return tuple(
        Case(
            MODELS[index % len(MODELS)],
            BATCHES[index % len(BATCHES)],
            NODES[(index + index // len(BATCHES)) % len(NODES)],
            SLOTS[index % len(SLOTS)],
        )
        for index in range(count)
    )
