"""The caches of several prompts as one, for mlx-lm's batch generation."""

import sys

import mlx.core as mx

from .attention import hands_rows_on, remember
from .cache import PagedPromptCache
from .rows import pair


class PagedBatchCache:
    """The cache of one layer for a batch of prompts of different lengths, with the protocol of mlx-lm's BatchKVCache.

    Each prompt is a PagedPromptCache of its own, and padding is never stored: of the columns that a step brings, a
    prompt takes those that are its tokens. So batches are joined, filtered and split without copying a row.

    Where attention is not ours, rows come dense and padded at the right, and the mask covers the padding.
    """

    def __init__(self, prompts):
        self._prompts = list(prompts)
        self._padding = [0] * len(self._prompts)  # columns at the left that are still to come
        self._coming = [None] * len(self._prompts)  # tokens that are still to come before padding; None: no end
        self._tokens = []  # of the last step, for each prompt: its first column, and the one after its last
        self._seen = []  # rows that its positions see
        self._changes = 0

    @classmethod
    def merge(cls, caches):
        """Forks of the caches as one batch; they are not changed themselves.

        Errors: ValueError for caches of another kind, of more than one row, or of different windows.
        """
        for cache in caches:
            if not isinstance(cache, PagedPromptCache):
                raise ValueError(f"[merge] a {type(cache).__name__} in one batch with paged caches: make all of them "
                                 "with pagedkv.mlx.make_prompt_cache")
            if len(cache._sequences) > 1:
                raise ValueError(f"[merge] a cache has {len(cache._sequences)} batch rows, each must have 1")
        _same_window([cache.sliding_window for cache in caches])
        return cls(cache.fork() for cache in caches)

    @property
    def offset(self):
        """int32 [batch]: the position of the next column in each prompt; below 0 while padding is to come."""
        return mx.array([prompt.offset - padding for prompt, padding in zip(self._prompts, self._padding)], mx.int32)

    def size(self) -> int:
        return max((prompt.size() for prompt in self._prompts), default=0)

    def empty(self) -> bool:
        return all(prompt.empty() for prompt in self._prompts)

    @property
    def nbytes(self) -> int:
        return sum(prompt.nbytes for prompt in self._prompts)

    def paged_stats(self) -> list:
        """PagedKVCache.paged_stats of each prompt."""
        return [prompt.paged_stats() for prompt in self._prompts]

    def is_trimmable(self) -> bool:
        return all(prompt.is_trimmable() for prompt in self._prompts)

    def trim(self, n) -> int:
        """Removes the last n positions of every prompt, at most all of the shortest; returns how many."""
        n = max(0, min(n, *(prompt.offset for prompt in self._prompts)))
        for prompt in self._prompts:
            prompt.trim(n)
        self._changes += n > 0
        return n

    # --- the batch ---------------------------------------------------------------------------------------------

    def prepare(self, *, left_padding=None, lengths=None, right_padding=None):
        """What the next steps bring: for each prompt, columns of padding at the left, or tokens before padding.

        Errors: ValueError (left padding behind tokens, right padding without lengths).
        """
        if left_padding is not None:
            if not self.empty():
                raise ValueError("[prepare] left padding can only come before the first tokens")
            self._padding = [have + more for have, more in zip(self._padding, left_padding)]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("[prepare] right padding needs the lengths of what comes before it")
            self._coming = list(lengths)

    def finalize(self):
        """The padding at the right has passed."""
        self._coming = [None] * len(self._prompts)

    def filter(self, batch_indices):
        """Keeps the given prompts, in this order."""
        indices = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        for name in ("_prompts", "_padding", "_coming"):
            setattr(self, name, [getattr(self, name)[i] for i in indices])
        self._changes += 1

    def extend(self, other):
        """Takes the prompts of another batch in, too. ValueError for one that is not paged, or of another window."""
        if not isinstance(other, PagedBatchCache):
            raise ValueError(f"[extend] a {type(other).__name__} cannot join a paged batch: make all caches with "
                             "pagedkv.mlx.make_prompt_cache")
        _same_window([prompt.sliding_window for prompt in (*self._prompts, *other._prompts)])
        for name in ("_prompts", "_padding", "_coming"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._changes += 1

    def extract(self, idx):
        """One prompt's cache, sharing blocks with this one until either writes."""
        return self._prompts[idx].fork()

    def fork(self):
        """A second batch with the same content; blocks are shared as those of PagedPromptCache are."""
        other = type(self)(prompt.fork() for prompt in self._prompts)
        other._padding, other._coming = list(self._padding), list(self._coming)
        return other

    def __copy__(self):
        return self.fork()

    def __deepcopy__(self, memo):
        return self.fork()

    @property
    def state(self):
        return [prompt.state for prompt in self._prompts], list(self._padding), list(self._coming)

    @state.setter
    def state(self, state):
        prompts, padding, coming = state
        changes = self.__dict__.get("_changes", 0)
        self.__init__([PagedPromptCache.from_state(prompt) for prompt in prompts])
        self._padding, self._coming, self._changes = list(padding), list(coming), changes + 1

    @classmethod
    def from_state(cls, state):
        cache = cls([])
        cache.state = state
        return cache

    # --- a step ------------------------------------------------------------------------------------------------

    def _columns(self, n):
        """Of the next n columns, those that are each prompt's tokens: (first, the one after the last)."""
        spans = []
        for padding, coming in zip(self._padding, self._coming):
            first = min(padding, n)
            spans.append((first, n if coming is None else min(n, first + coming)))
        return spans

    def make_mask(self, N, return_array=False, window_size=None):
        """bool [batch, 1, N, n] over the rows as update_and_fetch returns them dense."""
        spans = self._columns(N)
        before, first, end = (mx.array(x)[:, None, None, None] for x in zip(*(
            (prompt._seen_by(0), span[0], span[1]) for prompt, span in zip(self._prompts, spans))))
        columns = mx.arange(N)[:, None]
        n_rows = before + end - first
        rows = mx.arange(n_rows.max().item())
        newest = before + columns - first  # the row of the query's own position
        mask = (rows <= newest) & (rows < n_rows)
        window = window_size or self._prompts[0].sliding_window
        if window is not None:
            mask = mask & (rows > newest - window)
        # Padding must see something: a row without any key is NaN in a dense softmax.
        mask = mx.where((columns >= first) & (columns < end), mask, rows == 0)
        return remember(mask, N, tuple(prompt.offset + b - a for prompt, (a, b) in zip(self._prompts, spans)), window)

    def update_and_fetch(self, keys, values):
        """Stores [batch, num_kv_heads, n, head_dim], padding left out; returns as PagedPromptCache does.

        On an error nothing has changed. Errors: ValueError (batch size), and those of PagedPromptCache.
        """
        if keys.shape[0] != len(self._prompts):
            raise ValueError(f"keys are {list(keys.shape)}, the batch has {len(self._prompts)} prompts")
        n = keys.shape[2]
        spans = self._columns(n)
        seen = [prompt._seen_by(end - first) for prompt, (first, end) in zip(self._prompts, spans)]
        parts = [(keys[row:row + 1, :, first:end], values[row:row + 1, :, first:end])
                 for row, (first, end) in enumerate(spans)]
        mx.eval(parts)  # together, not one by one
        stored = []
        try:
            for prompt, part in zip(self._prompts, parts):
                if part[0].shape[2]:
                    prompt._append(*part)
                    stored.append((prompt, part[0].shape[2]))
        except BaseException:
            for prompt, n_stored in stored:
                prompt._take_back(n_stored)
            raise
        for row, (first, end) in enumerate(spans):
            self._padding[row] -= first
            if self._coming[row] is not None:
                self._coming[row] -= end - first
            self._prompts[row]._seen = seen[row]
        self._tokens, self._seen = spans, seen
        self._changes += 1
        self._row_shapes = ((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]), keys.dtype)
        return self._fetch(sys._getframe(1))

    def keys_and_values(self):
        """What the last update_and_fetch returned."""
        return self._fetch(sys._getframe(1))

    def _fetch(self, frame):
        n = max(self._seen)
        if not hands_rows_on(frame):
            return self._newest(n)
        *shapes, dtype = self._row_shapes
        return pair(self, [(len(self._prompts), heads, n, dim) for heads, dim in shapes], dtype)

    def _newest(self, n):
        *shapes, dtype = self._row_shapes
        rows = [prompt._newest(seen) if seen else [mx.zeros((1, heads, 0, dim), dtype) for heads, dim in shapes]
                for prompt, seen in zip(self._prompts, self._seen)]
        return tuple(mx.concatenate([_padded(row[part], 0, n) for row in rows]) for part in (0, 1))

    def _ends(self):
        return tuple(prompt.offset for prompt in self._prompts)

    def _attend(self, q, scale, window, sinks):
        parts = [q[row:row + 1, :, first:end] for row, (first, end) in enumerate(self._tokens)]
        mx.eval(parts)
        out = []
        for prompt, part, (first, _) in zip(self._prompts, parts, self._tokens):
            if part.shape[2]:
                rows = prompt._attend(part, scale, window, sinks)
            else:
                rows = mx.zeros((1, q.shape[1], 0, self._row_shapes[1][1]), q.dtype)
            out.append(_padded(rows, first, q.shape[2]))
        return mx.concatenate(out)


def _same_window(windows):
    if len(set(windows)) > 1:
        raise ValueError(f"caches of one batch have the windows {windows}, they must have the same one")


def _padded(rows, first, n):
    """[1, heads, m, dim] -> [1, heads, n, dim], rows from place `first` on, zeros around them."""
    return mx.pad(rows, [(0, 0), (0, 0), (first, n - first - rows.shape[2]), (0, 0)])
