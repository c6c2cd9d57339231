"""The reflection model: a server of OpenAI's chat completions that rewrites prompts. Its answers are in the journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from leyden.libs.prompts.errors import PromptError
from leyden.libs.prompts.journal import Journal, digest_of

OUTAGE_SECONDS = 600.0
FIRST_SECONDS = 5.0
"""How long a server is asked again that has not answered at all yet: its address may be wrong."""
ANSWER_SECONDS = 600.0
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
MAX_ANSWER_LETTERS = 100_000
"""As a value of `agent.environment`."""


class Reflection:
    """A callable for GEPA. The n-th question of an optimisation that goes on has the answer that it had before.

    Args: url: such as `https://api.openai.com/v1`; outage_seconds: how long a server that is busy is asked again
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None,
        journal: Journal,
        tell: Callable[[str], None],
        *,
        outage_seconds: float = OUTAGE_SECONDS,
    ) -> None:
        self._url, self._model, self._journal = f"{url.rstrip('/')}/chat/completions", model, journal
        self._tell = tell
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=httpx.Timeout(ANSWER_SECONDS, connect=10.0))
        self._outage_seconds = outage_seconds
        self._asked, self._has_answered = 0, False

    def __call__(self, question: str) -> str:
        """Returns the answer's text. Raises: PromptError"""
        self._asked += 1
        number, digest = str(self._asked), digest_of(question)
        known = self._journal.get("answer", number)
        # The stored rollouts of a question may have been graded again or pruned: then it is another one.
        if known is not None and known["question"] == digest:
            return str(known["text"])
        text = self._text_of(self._ask({"model": self._model, "messages": [{"role": "user", "content": question}]}))
        self._journal.add("answer", number, {"question": digest, "text": text})
        return text

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _ask(self, document: dict[str, Any]) -> Any:
        began, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            try:
                response = self._http.post(self._url, json=document)
            except httpx.TransportError as error:
                failure = f"no answer from the reflection model at {self._url}: {error or type(error).__name__}"
            else:
                self._has_answered = True
                if response.is_success:
                    return self._document(response)
                failure = f"the reflection model at {self._url} answers {response.status_code}: {response.text[:300]}"
                if response.status_code < 500 and response.status_code not in {408, 429}:
                    raise self._failed(failure)
            patience = self._outage_seconds if self._has_answered else min(FIRST_SECONDS, self._outage_seconds)
            if time.monotonic() + pause > began + patience:
                raise self._failed(failure)
            if pause == FIRST_PAUSE_SECONDS:
                self._tell(f"{failure}; it is asked again for up to {patience:g} s")
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    def _document(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise self._failed(f"{self._url} answers no JSON") from None

    def _text_of(self, document: Any) -> str:
        try:
            choice = document["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._failed(f"{self._url} answers no chat completion") from None
        if not isinstance(text, str) or not text.strip() or reason == "length":
            words = "was cut off at the server's limit of tokens" if reason == "length" else "has no text"
            raise self._failed(f"the answer of the reflection model {self._model} {words}")
        if len(text) > MAX_ANSWER_LETTERS:
            raise self._failed(f"the answer of the reflection model has {len(text)} letters: a prompt may have fewer")
        # Neither an environment variable nor Postgres has U+0000, and half of a surrogate pair is no text.
        return text.replace("\0", "").encode(errors="replace").decode()

    @staticmethod
    def _failed(words: str) -> PromptError:
        return PromptError(
            f"{words}; check --reflection, --reflection-url (LEYDEN_REFLECTION_URL) and LEYDEN_REFLECTION_API_KEY, and"
            " run the command again: it goes on"
        )
