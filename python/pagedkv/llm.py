"""A GGUF model on the paged cache: ggml does the matrix products, pagedkv the attention."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack, overload

from .quant import PagedKVQuantConfig, paged_kv_quant_mode_from_env

Messages = str | list[dict[str, str]]


class LoadOptions(TypedDict, total=False):
    """What LLM takes by name, see there."""

    context: int
    threads: int
    block_size: int
    num_blocks: int
    kv_memory: int
    dynamic: bool
    chunk: int
    max_num_seqs: int
    max_queue: int
    query_path: str
    products: str
    cache_disk: int
    cache_min_prefix: int
    reproducible: bool


class AnswerOptions(TypedDict, total=False):
    """What LLM.generate and LLM.chat take by name, see there; and n."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    grammar: str
    ignore_end: bool
    name_space: str


def _engine():
    try:
        from . import _engine
    except ImportError as error:
        raise ImportError(
            "pagedkv.LLM needs the engine, and this build of pagedkv has none: libllama was not there when it was built. "
            "Run tools/setup of the source tree (or install libllama), then `pip install .` again; "
            f"the rest of the package works without ({error})") from error
    return _engine


@dataclass(frozen=True)
class Answer:
    """One finished answer.

    finish_reason  "stop" (the model ended it, or a stop string), "length" (max_tokens, or the context is full)
    usage          prompt_tokens, cached_tokens (of the prompt, taken from the cache), reason (why not more),
                   completion_tokens (of all choices), queue_seconds, first_token_seconds, total_seconds, ...
    """

    text: str
    finish_reason: str
    usage: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return self.text


class Stream:
    """An answer as it comes: iterate over pieces of its text. `finish_reason` and `usage` are there at the end. Closing it,
    or leaving a `with` block, cancels what is left."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.text = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while self._request is not None:
            got = self._request.next()
            if got is None:
                self._end()
                break
            _, text, finish = got
            self.finish_reason = finish or self.finish_reason
            if text:
                self.text += text
                return text
        raise StopIteration

    def close(self) -> None:
        if self._request is not None:
            self._request.cancel()
            while self._request.next() is not None:
                pass
            self.finish_reason = self.finish_reason or "cancelled"
            self._end()

    def _end(self):
        self.usage = self._request.usage()
        self._request = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class LLM:
    """A model, its pool of blocks, and the thread that runs its steps. Any thread may ask; requests run together.

    model                 path of a GGUF file
    kv_quant=None         how K and V are stored: a mode or PagedKVQuantConfig; None: as the environment says
    context=0             longest sequence, tokens; 0: as trained, or less when memory is short (a warning says so)
    threads=0             0: the CPUs this process may use
    num_blocks=1024       blocks of block_size=16 tokens that exist from the start; the pool grows to kv_memory=0 bytes (0:
                          half of memory minus the weights) unless dynamic=True is False
    chunk=512             most prompt tokens of a step
    max_num_seqs=8        answers that are computed at once; further requests wait, max_queue=1024 of them at most
    query_path="auto"     how quantized formats are multiplied
    products="auto"       who multiplies with quantized weights: our kernels where they are the faster ones, or "ggml"
    reproducible=False    equal tokens give equal logits to the bit, however they are batched or cached: costs speed
                          only where ggml multiplies
    cache_dir=None        a folder where K and V of prompts and answers are kept, token ids included, for the next start; of at
                          most cache_disk=20 GiB. Less than cache_min_prefix=256 tokens are computed rather than read back
    progress=None         called with 0 .. 1 while weights are read; True draws a bar on stderr

    Errors: FileNotFoundError, CorruptError, UnsupportedError, CapacityError, ValueError; ImportError where this build has
    no engine.
    """

    def __init__(self, model: str | os.PathLike[str], *, kv_quant: str | PagedKVQuantConfig | None = None,
                 cache_dir: str | os.PathLike[str] | None = None,
                 progress: Callable[[float], object] | bool | None = None, **options: Unpack[LoadOptions]) -> None:
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(f"model is {model!r:.60}, of type {type(model).__name__}, allowed are paths of GGUF files")
        self._model = _engine().load(
            os.fspath(model), kv_quant=paged_kv_quant_mode_from_env() if kv_quant is None else kv_quant,
            cache_dir="" if cache_dir is None else os.fspath(cache_dir),
            progress=_draw_bar if progress is True else progress, **options)

    @property
    def info(self) -> dict[str, Any]:
        """What runs: path, architecture, name, n_layers, context, threads, kv_quant, isa, query_path, ..."""
        return self._model.info

    @overload
    def generate(self, prompt: Any, *, stream: Literal[True], **options: Unpack[AnswerOptions]) -> Stream: ...
    @overload
    def generate(self, prompt: list[str], *, stream: Literal[False] = False,
                 **options: Unpack[AnswerOptions]) -> list[Answer]: ...
    @overload
    def generate(self, prompt: str | Sequence[int], *, stream: Literal[False] = False,
                 **options: Unpack[AnswerOptions]) -> Answer: ...
    @overload
    def generate(self, prompt: Any, *, stream: bool = False, n: int = 1, **options: Unpack[AnswerOptions]) -> Any: ...
    def generate(self, prompt: Any, *, stream: bool = False, **options: Any) -> Any:
        """Continues a text, or token ids (integers in a list or an array, [n] or [1, n]), or a list of such.

        max_tokens=-1            0: an answer of no tokens; -1: until the context is full
        temperature=0.8          0: the likeliest token, always
        top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
        logit_bias={token: -100 .. 100}
        seed=0                   the same seed draws the same tokens; None: another one each time
        stop=[]                  texts that end the answer, and are no part of it
        grammar=""               GBNF with a rule "root": only answers that it derives are drawn. ValueError where no
                                 token of the vocabulary goes on
        n=1                      answers to the prompt, computed on one copy of it
        ignore_end=False         go on after the token that ends an answer
        own_text=False           the answer does not go on where the prompt ends (chat sets it): without the space that
                                 some vocabularies put in front of a text
        name_space=""            prompts of different namespaces never share blocks

        Returns an Answer; a list of them for a list of prompts, or where n > 1 (a list of lists for both); with
        stream=True a Stream (one prompt, n=1). Errors: ValueError (prompt, options), CapacityError (the queue is full).
        """
        if isinstance(prompt, (list, tuple)) and prompt and not _is_number(prompt[0]):
            if stream:
                raise ValueError("a stream is of one prompt")
            requests = [self._model.submit(self._tokens(one), **options) for one in prompt]
            return [_collect(request, options.get("n", 1)) for request in requests]
        if stream and options.get("n", 1) != 1:
            raise ValueError(f"a stream is of one answer, n is {options['n']}")
        request = self._model.submit(self._tokens(prompt), **options)
        return Stream(request) if stream else _collect(request, options.get("n", 1))

    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[AnswerOptions]) -> Stream: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False,
             **options: Unpack[AnswerOptions]) -> Answer: ...
    @overload
    def chat(self, messages: Messages, *, stream: bool = False, n: int = 1,
             **options: Unpack[AnswerOptions]) -> Any: ...
    def chat(self, messages: Messages, *, stream: bool = False, **options: Any) -> Any:
        """Answers a conversation, a list of {"role": "system" | "user" | "assistant", "content": text} or a text, through
        the model's own template. Options and results are those of generate."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.generate(self._model.tokenize_chat(messages), stream=stream, own_text=True, **options)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text. add_special: with what the vocabulary wants in front; parse_special: `<|...|>` inside the
        text are control tokens."""
        return self._model.tokenize(text, add_special, parse_special)

    def detokenize(self, tokens: Any) -> str:
        """The text of token ids; control tokens give nothing."""
        return self._model.detokenize(_ids(tokens, "tokens are", "token ids"))

    def stats(self) -> dict[str, Any]:
        """Counters since the load, and the pool's under "cache" (the keys of Cache.stats)."""
        return self._model.stats()

    def close(self) -> None:
        """Ends every request and the thread. Later calls raise UnavailableError."""
        self._model.close()

    def __reduce__(self):
        raise TypeError("[LLM] a model is not pickled: load it in the other process")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _tokens(self, prompt):
        return self.tokenize(prompt) if isinstance(prompt, str) else _ids(prompt)


def _is_number(value):
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0 or isinstance(value, float)


def _ids(tokens, who="prompt is", allowed="texts (str) and token ids"):
    """Token ids as a list; that they are integers is for the engine to say."""
    if isinstance(tokens, (str, bytes, bytearray)) or not hasattr(tokens, "__iter__"):
        raise TypeError(f"{who} {tokens!r:.60}, of type {type(tokens).__name__}, allowed are {allowed}")
    shape = tuple(getattr(tokens, "shape", ()))
    if len(shape) == 2 and shape[0] == 1:
        tokens, shape = tokens[0], shape[1:]
    if len(shape) > 1:
        raise ValueError(f"token ids are {list(shape)}, allowed are [n] and [1, n]; for several prompts give a list of them")
    return tokens.tolist() if shape else list(tokens)


def _collect(request, n):
    texts, reasons = [""] * n, [None] * n
    try:
        while (got := request.next()) is not None:
            choice, text, finish = got
            texts[choice] += text
            reasons[choice] = finish or reasons[choice]
    except BaseException:
        request.cancel()
        raise
    usage = request.usage()
    answers = [Answer(text, reason or "cancelled", usage) for text, reason in zip(texts, reasons)]
    return answers[0] if n == 1 else answers


def _draw_bar(fraction, width=30):
    if not sys.stderr.isatty():
        return
    filled = round(width * fraction)
    sys.stderr.write(f"\rreading weights [{'#' * filled}{'.' * (width - filled)}] {fraction:4.0%}")
    sys.stderr.write("\n" if fraction >= 1 else "")
    sys.stderr.flush()
