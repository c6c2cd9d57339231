"""Answers of `/generate` in SGLang's shape, complete or partial."""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Sequence as Many
from typing import Any

import torch

from leyden.services.engine.request import GenerateRequest
from leyden.services.engine.sampling import TokenLogprobs
from leyden.services.engine.sequence import Finish, Sequence
from leyden.services.engine.text import Decoder, Text

Json = dict[str, Any]


class Answer:
    """Builds the answers to one sequence."""

    def __init__(self, sequence: Sequence, request: GenerateRequest, text: Text) -> None:
        self.sequence = sequence
        self._request, self._text = request, text
        self._sent_text = ""
        self._decoder = Decoder(text, sequence.draw.sampling.skip_special_tokens)

    def build(self, finish: Finish | None, count: int, version: str, start: int = 0) -> Json:
        """Builds the answer after `count` tokens.

        Args:    version: label of the weights served now, for an answer without tokens
                 start: number of tokens in earlier answers, which this one leaves out
        """
        sequence = self.sequence
        text = self._text_of(sequence.output_ids[:count], finish)
        answer: Json = {
            "text": text[len(self._sent_text) if start else 0 :],
            "output_ids": sequence.output_ids[start:count],
            "meta_info": self._meta_info(finish, start, count, version),
        }
        self._sent_text = text
        if self._request.return_prompt_token_ids:
            answer["prompt_token_ids"] = sequence.prompt_ids.tolist()
        return answer

    def _text_of(self, ids: list[int], finish: Finish | None) -> str:
        sampling = self.sequence.draw.sampling
        if finish is None:
            text = self._decoder.advance(ids)
            return text if sampling.no_stop_trim else text[: len(text) - _unfinished_stop(text, sampling.stop)]
        trim = not sampling.no_stop_trim
        if trim and isinstance(finish.matched, int):
            ids = ids[:-1]
        text = self._text.decode(ids, sampling.skip_special_tokens)
        if trim and isinstance(finish.matched, str) and (place := text.find(finish.matched)) >= 0:
            text = text[:place]
        return text

    def _meta_info(self, finish: Finish | None, start: int, count: int, version: str) -> Json:
        sequence = self.sequence
        spans = version_spans(sequence.versions[:count])
        meta: Json = {
            "id": sequence.rid,
            "finish_reason": None if finish is None else _finish_reason(finish, count),
            "completion_tokens": count,
            "reasoning_tokens": 0,
            "num_retractions": sequence.retractions,
            "weight_version": spans[-1]["version"] if spans else version,
            "weight_versions": spans,
            **self._logprobs(start, count),
            **({} if finish is None else self._experts()),
            **_times(sequence),
        }
        # SGLang leaves these two fields out of the answer to a request aborted in the queue.
        if sequence.admitted:
            meta |= {"prompt_tokens": len(sequence.prompt_ids), "cached_tokens": sequence.cached_tokens}
        return meta

    def _logprobs(self, start: int, count: int) -> Json:
        sequence, prompt = self.sequence, self.sequence.prompt
        if not prompt.return_logprob:
            return {}
        pairs = list(zip(sequence.logprobs[start:count], sequence.output_ids[start:count], strict=True))
        logprobs: Json = {"output_token_logprobs": self._entries(pairs), "output_token_logprobs_length": count}
        if prompt.top_logprobs_num:
            logprobs["output_top_logprobs"] = [self._entries(top) for top in sequence.top_logprobs[start:count]]
        if prompt.token_ids_logprob:
            logprobs["output_token_ids_logprobs"] = [
                self._entries(row) for row in sequence.chosen_logprobs[start:count]
            ]
        if prompt.logprob_start_len >= 0 and start == 0:
            logprobs |= self._input_logprobs()
        return logprobs

    def _experts(self) -> Json:
        """The experts of all tokens but the last, from `routed_experts_start_len` on; none of a dense model."""
        sequence, prompt = self.sequence, self.sequence.prompt
        if not (prompt.return_routed_experts and sequence.experts):
            return {}
        found = torch.cat(sequence.experts)[prompt.routed_experts_start_len :]
        return {"routed_experts": base64.b64encode(found.numpy().tobytes()).decode()}

    def _input_logprobs(self) -> Json:
        """Log-probabilities of the prompt from `logprob_start_len` on; its first token has none."""
        sequence, start = self.sequence, self.sequence.prompt.logprob_start_len
        ids = sequence.prompt_ids[start:].tolist()
        entries = [[None, *self._names(ids[0])]] if ids else []
        entries += self._entries(list(zip(sequence.input_logprobs, ids[1:], strict=False)))
        found: Json = {"input_token_logprobs": entries}
        if sequence.prompt.top_logprobs_num:
            found["input_top_logprobs"] = [None, *(self._entries(top) for top in sequence.input_top_logprobs)]
        return found

    def _entries(self, pairs: TokenLogprobs) -> list[list[Any]]:
        return [[logprob, *self._names(token)] for logprob, token in pairs]

    def _names(self, token: int) -> tuple[int, str | None]:
        texts = self._request.return_text_in_logprobs
        return token, self._text.decode([token], skip_special=False) if texts else None


def version_spans(versions: Many[str]) -> list[Json]:
    """Half-open ranges of output tokens by weight version: ["a", "a", "b"] -> a: 0 to 2, b: 2 to 3."""
    spans, start = [], 0
    for version, run in itertools.groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


def _finish_reason(finish: Finish, count: int) -> Json:
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": count}
    return {"type": "abort", "message": finish.message, "status_code": finish.status_code, "err_type": None}


def _unfinished_stop(text: str, stops: Many[str]) -> int:
    """Returns how many characters at the end may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop), len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


def _times(sequence: Sequence) -> Json:
    end = sequence.finished_at
    times: Json = {"response_sent_to_client_ts": time.time()}
    if sequence.admitted_at is not None:
        times["queue_time"] = sequence.admitted_at - sequence.received_at
    if sequence.first_token_at is not None:
        times["first_token_latency"] = sequence.first_token_at - sequence.received_at
    if end is not None:
        times["e2e_latency"] = end - sequence.received_at
    if end is not None and sequence.first_token_at is not None and end > sequence.first_token_at:
        times["decode_throughput"] = (len(sequence.output_ids) - 1) / (end - sequence.first_token_at)
    return times
