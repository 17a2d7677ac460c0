"""Spotlights on text: what the last token of a prompt attends to, as passages, documents and tokens of the text.

One pass over a layer's patterns gives everything: per place in the text the best single pattern, the total over all its
patterns, and how many those are. Totals of documents and tokens are sums of those.
"""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attend.engine import Score, score_patterns
from dualform.attend.groups import Numbered, Table
from dualform.attend.passages import Passage, Place, by_document, by_token, gather
from dualform.attend.prompts import go_on, next_tokens, read_prompt
from dualform.attend.queries import capture_queries
from dualform.attend.reducers import GroupSums, Places
from dualform.attend.text_answers import TextLayer, TextSpotlight, Total
from dualform.errors import QueryError, UnknownLayerError
from dualform.store.corpus import Corpus
from dualform.store.format import LayerEntry
from dualform.tokens import Unit

PLACE = "place"
GOES_ON: Mapping[Unit, int] = {"chars": 40, "words": 10}  # tokens that a model goes on with
CANDIDATES = 20  # places per passage asked for, since places that overlap are one passage


def attend_text(
    table: Table,
    layers: Mapping[str, LayerEntry],
    corpus: Corpus,
    model: nn.Module,
    text: str,
    *,
    top: int,
    around: int,
    goes_on: int | None,
) -> TextSpotlight:
    """Ask what the last token of a prompt attends to; see `Memory.attend_text`."""
    if top < 1 or around < 0:
        raise QueryError(
            f"top is {top} and around is {around}; expected at least one passage, and no fewer than 0 tokens."
        )
    prompt = read_prompt(corpus, text, context=getattr(model, "context", None))
    queries = last_queries(model, prompt.tokens[None], layers)
    found = {}
    for name, query in queries.items():
        places = score_places(table, name, query, corpus)
        found[name] = _describe(name, places, corpus, top=top, around=around)
    return TextSpotlight(
        prompt=prompt.text,
        notes=prompt.notes,
        next=next_tokens(model, corpus, prompt, count=top),
        goes_on=go_on(model, corpus, prompt, count=GOES_ON[corpus.unit] if goes_on is None else goes_on),
        unit=corpus.unit,
        layers=found,
    )


def last_queries(model: nn.Module, tokens: Tensor, layers: Mapping[str, LayerEntry]) -> dict[str, Tensor]:
    """Return each layer's query at the last token of each row, (B, L) -> (B, d_in)."""
    captured = capture_queries(model, tokens, layers)
    last = {}
    for name, found in captured.items():
        shape = found.leading if found.batch_axis == 0 else found.leading[::-1]
        if shape != tuple(tokens.shape):
            raise QueryError(
                f"Layer {name!r} saw {found.leading} for tokens {tuple(tokens.shape)}; expected an input (B, L, ...), "
                "so that the last token's can be told."
            )
        rows = found.rows.reshape(*found.leading, -1)
        last[name] = rows.select(1 - found.batch_axis, -1)
    return last


def score_places(table: Table, layer: str, queries: Tensor, corpus: Corpus) -> Places:
    """Score every pattern of a layer against queries (Q, d_in), by place in the text; the last group has no place."""
    rows, groups = _rows(table, layer, queries), _places(table, corpus)
    reducer = Places(len(rows), groups.size + 1, rows.device)
    return score_patterns(table, layer, rows, Score("attention"), groups, reducer)


def place_totals(table: Table, layer: str, queries: Tensor, corpus: Corpus) -> Tensor:
    """Return the total attention of queries (Q, d_in) to each place of the text, (Q, N)."""
    rows, groups = _rows(table, layer, queries), _places(table, corpus)
    reducer = GroupSums(len(rows), groups.size + 1, rows.device)
    return score_patterns(table, layer, rows, Score("attention"), groups, reducer)[:, : groups.size]


def place_counts(table: Table, layer: str, corpus: Corpus) -> Tensor:
    """Return how many patterns each place of the text has, (N,)."""
    groups = _places(table, corpus)
    counts = torch.zeros(groups.size + 1, dtype=torch.int64)
    for codes in table.numbers(layer, groups):
        counts += torch.bincount(torch.from_numpy(codes), minlength=groups.size + 1)
    return counts[: groups.size]


def _rows(table: Table, layer: str, queries: Tensor) -> Tensor:
    return queries if "rows" in table.run.layer(layer).parameters else queries.float()


def _places(table: Table, corpus: Corpus) -> Numbered:
    if PLACE not in table.names:
        raise QueryError(f"Patterns have no column {PLACE!r}; record with annotate(place=...).")
    return Numbered(PLACE, len(corpus.train))


def _describe(name: str, places: Places, corpus: Corpus, *, top: int, around: int) -> TextLayer:
    size = len(corpus.train)
    counts, sums, highest = (found[:size].cpu() for found in (places.counts, places.sums[0], places.best[0]))
    if not int(counts.sum()):
        raise QueryError(
            f"This view of layer {name!r} holds no patterns: nothing was recorded, or the mask leaves nothing."
        )
    absent = counts == 0

    def best(values: Tensor) -> tuple[Passage, ...]:
        ranked = values.masked_fill(absent, -torch.inf).topk(min(top * CANDIDATES, int((~absent).sum())))
        pairs = zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True)
        chosen = [Place(place, value, int(counts[place])) for place, value in pairs]
        return gather(chosen, corpus, count=top, around=around)

    plain: tuple[np.ndarray, np.ndarray] = (sums.numpy(), counts.numpy())
    return TextLayer(
        layer=name,
        patterns=int(counts.sum()),
        by_pattern=best(highest.double()),
        by_total=best(sums),
        documents=tuple(Total(*row) for row in by_document(*plain, corpus, count=top)),
        tokens=tuple(Total(*row) for row in by_token(*plain, corpus, count=top)),
    )


def check_layers(wanted: Collection[str], known: Mapping[str, LayerEntry]) -> dict[str, LayerEntry]:
    """Return the wanted layers' entries, or raise with the names there are."""
    missing = [name for name in wanted if name not in known]
    if missing:
        raise UnknownLayerError(f"Layer {missing[0]!r} was not recorded. There are: {', '.join(map(repr, known))}.")
    return {name: known[name] for name in wanted}
