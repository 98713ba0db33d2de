"""How the user's turns begin that a target is asked to go on with.

A chat model that is given the start of a user's turn writes what its users ask for (Magpie,
arXiv 2406.08464). A few words of opening choose the task, so that text of every kind is trained on.
"""

from __future__ import annotations

import dataclasses

from jspec.tokenizers import Tokenizer

_MARK = "\u2063user turn\u2063"


@dataclasses.dataclass(frozen=True)
class Opening:
    """A user's turn begun.

    Attributes:
        text: its first words; "" leaves all to the model.
        share: how often it is taken, relative to the others of its group.
    """

    text: str
    share: float = 1.0


# Questions, which end after a sentence or two.
SHORT = (
    Opening("", 8.0),
    Opening("What is", 1.0),
    Opening("Who", 1.0),
    Opening("When did", 1.0),
    Opening("Where", 1.0),
    Opening("How many", 1.0),
    Opening("Why", 0.5),
    Opening("Which", 0.5),
    Opening("Explain", 0.5),
    Opening("Write a", 0.5),
    Opening("Imagine you are", 0.5),
    Opening("Describe", 0.5),
    Opening("Give me", 0.5),
    Opening("Translate this German sentence to English:", 2.0),
    Opening("Translate from German to English: Die", 0.5),
    Opening("Translate from German into English: Der", 0.5),
    Opening("Translate from French to English:", 0.5),
    Opening("Translate from Spanish to English:", 0.5),
    Opening("Solve this problem:", 0.5),
    Opening("John has", 0.5),
    Opening("Mary buys", 0.5),
    Opening("A train", 0.3),
    Opening("A shop sells", 0.5),
    Opening("Sarah", 0.5),
    Opening("If a", 0.3),
    Opening("There are", 0.5),
    Opening("Write a SQL query that", 1.0),
    Opening("Write a SQL query to", 1.0),
    Opening("SQL query:", 1.0),
    Opening("I need an SQL query.", 1.0),
    Opening("Using SQL, find", 0.5),
    Opening("Write a Python function that", 1.0),
    Opening("Write a Python function to", 0.5),
)

# Turns with material of their own: an article, a context, a piece of code, a schema.
LONG = (
    Opening("Summarize the following article:\n\n", 2.0),
    Opening("Please summarize this:\n\n", 1.0),
    Opening("Summarize this news story. ", 1.0),
    Opening("Write a summary of this text:\n\nThe", 1.0),
    Opening("Answer the question by the context.\n\nContext: ", 1.0),
    Opening("Use these passages to answer the question.\n\nPassage 1: ", 1.5),
    Opening("Read the text and answer the question.\n\n", 1.0),
    Opening("Complete this function:\n\n```python\ndef ", 1.0),
    Opening("Implement this function in Python.\n\ndef ", 1.5),
    Opening("Finish this code:\n\nimport ", 1.0),
    Opening("Here is a Python function:\n\n```python\ndef ", 0.5),
    Opening("Given this database schema:\n\nCREATE TABLE ", 1.0),
    Opening("Rewrite the following text:\n\n", 0.5),
    Opening("Translate the following text to English:\n\n", 0.5),
)


def begin(tokenizer: Tokenizer, opening: str) -> list[int]:
    """Return the token ids of a chat whose user's turn has begun with `opening`.

    Args:
        tokenizer: with a chat template.
        opening: the first words; trailing space is left for the model to write.

    Raises:
        InputError: the tokenizer has no chat template.
    """
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
    before, _, _ = text.partition(_MARK)
    return list(tokenizer.encode(before + opening.rstrip(" ")))
