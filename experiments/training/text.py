"""Text to train on, written by the target itself: its users' turns and its own answers.

A drafter is to guess what the target will say, so it learns from what the target says. Text comes
in shards of one batch each. A shard follows from the recipe and its number alone, so that a job
that was killed makes the missing ones and no other.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from experiments.training import openings
from experiments.training.openings import Opening
from jspec.generation import Decoder
from jspec.model import Model
from jspec.requests import Request
from jspec.sampling_params import SamplingParams

_PARTIAL = ".partial"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What text is made.

    Attributes:
        seed: of everything drawn.
        conversations: of a shard; they are decoded together.
        temperatures: of the answers, by shard in turn.
        user_temperature: of the users' turns.
        user_tokens: most tokens of a short user's turn.
        material_tokens: most tokens of one with material of its own.
        material_every: one shard of so many has such turns.
        answer_tokens: most tokens of an answer.
    """

    seed: int = 0
    conversations: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 0.0, 1.0)
    user_temperature: float = 0.9
    user_tokens: int = 96
    material_tokens: int = 320
    material_every: int = 4
    answer_tokens: int = 192


@dataclasses.dataclass(frozen=True)
class Text:
    """Conversations of a shard, in rows of different lengths.

    Attributes:
        tokens: [N, W] int32, padded with 0.
        length: [N] int32, tokens of each row.
        answer: [N] int32, where the answer begins.
    """

    tokens: np.ndarray
    length: np.ndarray
    answer: np.ndarray

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return int(self.length.sum())


def of_rows(rows: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Text:
    """Return prompts and answers (token ids) as one shard."""
    length = np.array([len(prompt) + len(answer) for prompt, answer in rows], np.int32)
    tokens = np.zeros((len(rows), int(length.max())), np.int32)
    for row, (prompt, answer) in enumerate(rows):
        tokens[row, : length[row]] = [*prompt, *answer]
    return Text(tokens, length, np.array([len(prompt) for prompt, _ in rows], np.int32))


def write(path: Path, text: Text) -> None:
    """Write a shard; it has its name only when it is whole."""
    partial = path.with_name(path.name + _PARTIAL)
    save_file(dataclasses.asdict(text), partial)
    partial.replace(path)


def read(path: Path) -> Text:
    """Read a shard."""
    with safe_open(path, "numpy") as file:
        return Text(*(file.get_tensor(field.name) for field in dataclasses.fields(Text)))


def user_turns(target: Model, recipe: Recipe, shard: int) -> list[str]:
    """Return the users' turns of a shard, written by the target; those that are empty are left out.

    Args:
        target: with a tokenizer and a chat template.
        recipe: what is asked for.
        shard: its number.
    """
    assert target.tokenizer is not None
    material = shard % recipe.material_every == recipe.material_every - 1
    chosen = _choose(openings.LONG if material else openings.SHORT, recipe, shard)
    most = recipe.material_tokens if material else recipe.user_tokens
    requests = [
        Request(
            tuple(openings.begin(target.tokenizer, opening.text)),
            SamplingParams(
                temperature=recipe.user_temperature,
                max_new_tokens=most,
                seed=seed_of(recipe, shard, row),
            ),
        )
        for row, opening in enumerate(chosen)
    ]
    done = Decoder(target, batch_size=recipe.conversations).generate(requests)
    joined = (
        opening.text.rstrip(" ") + completion.text
        for opening, completion in zip(chosen, done, strict=True)
    )
    return [turn.strip() for turn in joined if turn.strip()]


def answer(target: Model, recipe: Recipe, shard: int, turns: list[str]) -> Text:
    """Return users' turns with the target's answers.

    Args:
        target: with a tokenizer and a chat template.
        recipe: what is asked for.
        shard: its number.
        turns: at most `recipe.conversations`.
    """
    assert target.tokenizer is not None
    temperature = recipe.temperatures[shard % len(recipe.temperatures)]
    room = target.config.max_context - recipe.answer_tokens
    requests = []
    for row, turn in enumerate(turns):
        chat = target.tokenizer.apply_chat_template([{"role": "user", "content": turn}])
        ids = tuple(target.tokenizer.encode(chat))
        if len(ids) <= room:
            sampling = SamplingParams(
                temperature=temperature,
                max_new_tokens=recipe.answer_tokens,
                seed=seed_of(recipe, shard, recipe.conversations + row),
            )
            requests.append(Request(ids, sampling))
    done = Decoder(target, batch_size=recipe.conversations).generate(requests)
    rows = [
        (request.token_ids, completion.token_ids)
        for request, completion in zip(requests, done, strict=True)
        if completion.error is None
    ]
    return of_rows(rows)


def _choose(group: tuple[Opening, ...], recipe: Recipe, shard: int) -> list[Opening]:
    shares = np.array([opening.share for opening in group])
    random = np.random.default_rng((recipe.seed, shard))
    picked = random.choice(len(group), size=recipe.conversations, p=shares / shares.sum())
    return [group[index] for index in picked]


def seed_of(recipe: Recipe, shard: int, row: int) -> int:
    """Return a seed of its own for every sequence, also across shards and recipes."""
    words = np.random.SeedSequence((recipe.seed, shard, row)).generate_state(1, np.uint64)
    return int(words[0])
