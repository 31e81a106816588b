"""One forward over a PagedCache: the columns that it brings, and which of them are padding."""

from dataclasses import dataclass, field

import torch

from .packed import NAME, PaddingMask


@dataclass
class Step:
    """One forward: the columns it brings, the plan that has their slots, and which layers have come so far."""

    plan: object  # StepPlan, or None when every new column is padding
    n_columns: int
    padding: list  # [rows] leading new columns that are padding and not stored
    packed: bool  # begun by our attention
    stored: set = field(default_factory=set)  # layers whose rows are in the blocks
    attended: set = field(default_factory=set)  # layers that have read them
    complete: bool = False
    mask: object = None  # the padding mask that was checked last

    def places(self):
        """The rows that take part, in the plan's order."""
        return [row for row, pad in enumerate(self.padding) if pad < self.n_columns]

    def tokens(self, x):
        """x [rows, heads, columns, d] as the plan's tokens: as it is where a stride leads from one to the next, else
        [plan.n_tokens, heads, d]."""
        if any(self.padding):
            return torch.cat([x[row, :, self.padding[row]:].transpose(0, 1) for row in self.places()])
        if x.shape[0] == 1 or x.shape[2] == 1:
            return x
        return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])

    def columns(self, x):
        """What attention made of tokens(), [plan.n_tokens, heads, d] or [rows, heads, columns, d] ->
        [rows, columns, heads, d], padding is 0."""
        n_rows = len(self.padding)
        if x.dim() == 4:
            return x.transpose(1, 2)
        if not any(self.padding):
            return x.reshape(n_rows, self.n_columns, *x.shape[1:])
        out = x.new_zeros(n_rows, self.n_columns, *x.shape[1:])
        first = 0
        for row in self.places():
            n = self.n_columns - self.padding[row]
            out[row, self.padding[row]:] = x[first:first + n]
            first += n
        return out


def leading_padding(mask, n_columns, seen, skipped):
    """The leading new columns of each row that are padding.

      mask       the PaddingMask over all columns, or None
      n_columns  new ones
      seen       columns of the forwards before
      skipped    [rows] leading columns of those that were padding

    Errors: ValueError for what is no left padding, and where the mask and what is stored disagree.
    """
    n_rows = len(skipped)
    padded = [0] * n_rows
    if mask is not None:
        if not isinstance(mask, PaddingMask):
            raise ValueError(f'[pagedkv] a custom attention mask {list(mask.shape)}: attn_implementation="{NAME}" '
                             "takes 2D padding masks only")
        mask = mask.as_subclass(torch.Tensor)[:, 0, 0]
        if tuple(mask.shape) != (n_rows, seen + n_columns):
            raise ValueError(f"[pagedkv] the attention mask is {list(mask.shape)}, expected {n_rows} rows of "
                             f"{seen} columns in the cache and {n_columns} new ones")
        counts = (~mask).sum(-1)
        wrong = (mask != (torch.arange(mask.shape[1]) >= counts[:, None])).nonzero()
        if len(wrong):
            row = int(wrong[0, 0])
            column = int((~mask[row]).nonzero()[-1])
            raise ValueError(f"[pagedkv] row {row} of the attention mask hides column {column} behind columns that "
                             "it shows: only left padding is supported, no right padding and no holes")
        padded = counts.tolist()
    new = []
    for row in range(n_rows):
        started = skipped[row] < seen
        if padded[row] != skipped[row] and (started or padded[row] < skipped[row]):
            said = f"hides {padded[row]} leading columns" if mask is not None else "is not given"
            raise ValueError(f"[pagedkv] row {row}: the attention mask {said}, in the forwards before it hid "
                             f"{skipped[row]}. Pass the mask over all columns in every forward; a cache that "
                             "another attn_implementation filled holds padding as tokens")
        new.append(padded[row] - skipped[row])
    return new
