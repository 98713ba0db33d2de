"""Text to token ids and back: tokenizers, chat templates and streaming detokenisation."""

from jspec.tokenizers.stream import TextStream
from jspec.tokenizers.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
