"""Text generation with a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.data import Tokenizer
from penstock.errors import ConfigError, require_utf8
from penstock.training.token_generation import TokenGenerator


class TextGenerator:
    """Generates text with a model and its tokenizer."""

    def __init__(self, tokens: TokenGenerator, tokenizer: Tokenizer) -> None:
        self._tokens = tokens
        self._tokenizer = tokenizer

    def write(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        seed: int,
    ) -> Iterator[str]:
        """Yield the text after `prompt` piece by piece, whole characters only.

        **Raises:** `ConfigError` as `TokenGenerator.generate`, or if `prompt` is no text.
        """
        if not isinstance(prompt, str):
            raise ConfigError(
                f"prompt: expected a text, got {prompt!r}; token_generator().generate takes token "
                "ids"
            )
        require_utf8("prompt", prompt)
        tokenizer = self._tokenizer
        encoded = tokenizer.encode_batch([prompt])[0].tolist()
        text = _ContinuedText(tokenizer, encoded)
        tokens = self._tokens.generate(
            encoded or [tokenizer.end_of_document],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            stop=tokenizer.end_of_document,
            vocabulary=tokenizer.vocab_size,
        )
        return (piece for token in tokens if (piece := text.add(token)))


class _ContinuedText:
    """The text of tokens that continue `prompt`, whole characters only.

    The decoders of SentencePiece tokenizers remove the space before the first word of a text, so a
    token is decoded together with the tokens before it. The tokens of the last piece suffice: the
    work per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before = list(prompt)
        self._text_before = tokenizer.decode(prompt) if prompt else ""
        self._tokens: list[int] = []  # of the piece that is not complete

    def add(self, token: int) -> str:
        """Return the piece of text that a token completes; empty if there is none."""
        self._tokens.append(token)
        text = self._tokenizer.decode([*self._before, *self._tokens])
        if text.endswith("\ufffd"):  # the token ends within a character
            return ""
        piece = text.removeprefix(self._text_before)
        if not text.startswith(self._text_before):  # bytes that are not UTF-8 change those before
            piece = self._tokenizer.decode(self._tokens)
        if piece:
            self._before, self._tokens = self._tokens, []
            self._text_before = self._tokenizer.decode(self._before)
        return piece
