"""Do the spotlights mean something? Measured on held-out prompts, against chance.

If a prompt's last token attends to a training pattern, the token that followed that pattern should be what the model
says. How often is it, in each layer; how often with a random pattern; and with one of the same token?
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attend.last_tokens import last_queries
from dualform.attend.memory import Memory
from dualform.attend.prompts import last_logits
from dualform.corpus import Corpus
from dualform.engine.reducers import PlaceState
from dualform.experiments.findings import Row

HELD_OUT_PROMPTS = 512
PROMPT_TOKENS = 100  # tokens of a prompt
PROMPTS_AT_ONCE = 16  # prompts in one forward pass: each gives logits over the whole vocabulary at every token
CARRIED = (1, 10, 100)
TOTALS = 1 << 30  # bytes of totals by place that may be held
SCORE_BYTES = 12  # of one query's total and best attention to one place
SCORE_COPIES = 2.5  # a pass holds scores of the steps so far and of the part that it is in, and adds one to the other
MAX_SCORES_BYTES_CPU = 6 << 30  # of scores by place that one replay may hold on a CPU
MAX_SCORES_FREE_GPU = 0.6  # of a GPU's free memory that they may take there; the training needs some of the rest
MOST_ATTENDED, LARGEST_TOTAL = "most attended pattern", "largest total over a token's occurrences"


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Held-out prompts: their tokens, the tokens that the model predicts next, and the true next tokens.

    Attributes:
        tokens: (P, L) the prompts.
        predicted: (P,) the model's most probable next token.
        true: (P,) the token that follows.
    """

    tokens: Tensor
    predicted: Tensor
    true: Tensor


def ask_held_out(
    model: nn.Module, corpus: Corpus, *, count: int = HELD_OUT_PROMPTS, context: int = PROMPT_TOKENS
) -> HeldOut:
    """Return prompts that end at evenly spaced places of the held-out part, as many as there are up to `count`."""
    test = torch.from_numpy(corpus.test)
    context = min(context, len(test) - 1)
    ends = torch.arange(context, len(test))  # the place after a prompt's last token
    chosen = ends[torch.linspace(0, len(ends) - 1, min(count, len(ends))).long()]
    tokens = test[chosen[:, None] + torch.arange(-context, 0)]
    said = [last_logits(model, part).argmax(dim=1).cpu() for part in tokens.split(PROMPTS_AT_ONCE)]
    return HeldOut(tokens, torch.cat(said), test[chosen])


def token_agreement(memory: Memory, model: nn.Module, prompts: HeldOut) -> list[Row]:
    """Return, per layer and for chance, how often an attended token's follower is the predicted and the true token.

    Embeddings are left out: all patterns of one token are alike to them, and that is the second kind of chance.
    Chance is exact: the share of all patterns, and of all patterns of the prompt's last token, whose follower agrees.
    """
    corpus = memory.corpus()
    follower = np.append(corpus.train[1:], -1)
    rows = []
    queries = _queries(memory, model, prompts)
    counts = memory.place_counts(next(iter(queries)))
    for layer, query in queries.items():
        if not query.is_floating_point():
            continue
        top = memory.attend(queries={layer: query})[layer].top(1)
        rows.append(_agreement_row(layer, MOST_ATTENDED, follower[top.columns["place"]], prompts))
        places = torch.cat(list(_largest_totals(memory, layer, query, counts)))
        rows.append(_agreement_row(layer, LARGEST_TOTAL, follower[places.numpy()], prompts))
    return rows + chance(corpus, counts.numpy(), prompts)


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedScores:
    """The attention of held-out prompts and of single examples to the training text, found by replays.

    Attributes:
        most_attended: layer -> (P,) the place of the pattern that each held-out prompt attends to most.
        largest_total: layer -> (P,) the place with the largest total over its patterns.
        counts: (N,) how many patterns each place has.
        examples: for each example, layer -> its attention to every place.
        replays: how many times patterns were gone through, each time by a replay unless all of them fit into memory.
        steps: how many steps of the training were asked about, the first ones.
    """

    most_attended: Mapping[str, Tensor]
    largest_total: Mapping[str, Tensor]
    counts: Tensor
    examples: Sequence[Mapping[str, PlaceState]]
    replays: int
    steps: int


def replay_scores(memory: Memory, model: nn.Module, prompts: HeldOut, examples: Sequence[Tensor]) -> ReplayedScores:
    """Find what the last tokens of held-out prompts and of examples attend to, by as few replays as memory allows.

    Args:
        memory: a memory of steps, with its text.
        model: the trained model.
        prompts: the held-out prompts.
        examples: (L,) the tokens of each example.
    """
    entries = memory.layers
    shown = [last_queries(model, tokens[None], entries) for tokens in examples]
    asked = _queries(memory, model, prompts)
    queries = {
        layer: torch.cat([*(one[layer] for one in shown), rows])  # (E + P, d_in)
        for layer, rows in asked.items()
        if rows.is_floating_point()
    }
    size = len(memory.corpus().train)
    device = next(iter(queries.values())).device
    each = int(len(queries) * (size + 1) * SCORE_BYTES * SCORE_COPIES)
    together = max(len(examples), 1, _score_budget(device) // each)
    best: dict[str, list[Tensor]] = {layer: [] for layer in queries}
    totals: dict[str, list[Tensor]] = {layer: [] for layer in queries}
    found: list[dict[str, PlaceState]] = [{} for _ in examples]
    counts = torch.zeros(size, dtype=torch.int64)
    starts = range(0, len(examples) + len(prompts.true), together)
    for start in starts:
        scores = memory.place_scores({layer: rows[start : start + together] for layer, rows in queries.items()})
        for layer in queries:
            sums, highest, numbers = scores.pop(layer)
            first = len(examples) if start == 0 else 0
            for i in range(first):
                found[i][layer] = PlaceState(sums[i : i + 1].cpu(), highest[i : i + 1].cpu(), numbers.cpu())
            counts = numbers[:size].cpu()
            unseen = numbers[:size] == 0
            for kept, values in ((best, highest), (totals, sums)):
                kept[layer].append(values[first:, :size].masked_fill_(unseen, -torch.inf).argmax(dim=1).cpu())
    return ReplayedScores(
        most_attended={layer: torch.cat(parts) for layer, parts in best.items()},
        largest_total={layer: torch.cat(parts) for layer, parts in totals.items()},
        counts=counts,
        examples=found,
        replays=len(starts),
        steps=memory.step,
    )


def _score_budget(device: torch.device) -> int:
    """Return how many bytes of scores by place may be held at a time."""
    if device.type != "cuda":
        return MAX_SCORES_BYTES_CPU
    torch.cuda.empty_cache()
    return int(MAX_SCORES_FREE_GPU * torch.cuda.mem_get_info(device)[0])


def replayed_agreement(corpus: Corpus, scores: ReplayedScores, prompts: HeldOut) -> list[Row]:
    """Return the rows of `token_agreement` from scores that replays have found."""
    follower = np.append(corpus.train[1:], -1)
    rows = []
    for layer, places in scores.most_attended.items():
        rows.append(_agreement_row(layer, MOST_ATTENDED, follower[places.numpy()], prompts))
        totals = scores.largest_total[layer]
        rows.append(_agreement_row(layer, LARGEST_TOTAL, follower[totals.numpy()], prompts))
    return rows + chance(corpus, scores.counts.numpy(), prompts)


def _largest_totals(memory: Memory, layer: str, queries: Tensor, counts: Tensor) -> Iterator[Tensor]:
    unseen = (counts == 0).to(queries.device)
    for block in queries.split(max(1, TOTALS // (8 * len(counts)))):
        yield memory.place_totals(layer, block).masked_fill_(unseen, -torch.inf).argmax(dim=1).cpu()


def _agreement_row(layer: str, by: str, followers: np.ndarray, prompts: HeldOut) -> Row:
    found = torch.from_numpy(followers)
    return {
        "layer": layer,
        "by": by,
        "predicted": float((found == prompts.predicted).double().mean()),
        "true": float((found == prompts.true).double().mean()),
    }


def chance(corpus: Corpus, counts: np.ndarray, prompts: HeldOut) -> list[Row]:
    """Return how often a pattern drawn at random agrees: of all patterns, and of those of the prompt's last token."""
    size = len(corpus.vocabulary)
    tokens, followers, weights = corpus.train[:-1], corpus.train[1:], counts[:-1].astype(np.float64)
    after_any = np.bincount(followers, weights=weights, minlength=size) / weights.sum()
    pairs, inverse = np.unique(tokens * size + followers, return_inverse=True)
    after = dict(zip(pairs.tolist(), np.bincount(inverse, weights=weights).tolist(), strict=True))
    of_token = np.bincount(tokens, weights=weights, minlength=size)
    last = prompts.tokens[:, -1].tolist()

    def same(said: Tensor) -> float:
        shares = [
            after.get(token * size + follower, 0.0) / of_token[token]
            for token, follower in zip(last, said.tolist(), strict=True)
            if of_token[token]
        ]
        return float(np.mean(shares)) if shares else float("nan")

    def everywhere(said: Tensor) -> float:
        return float(after_any[said.numpy()].mean())

    return [
        {"layer": None, "by": name, "predicted": share(prompts.predicted), "true": share(prompts.true)}
        for name, share in (("a random pattern", everywhere), ("a random pattern of the same token", same))
    ]


def carried(memory: Memory, model: nn.Module, prompts: HeldOut, layer: str) -> list[Row]:
    """Return how much of a prediction's logit the patterns that contribute most to it carry.

    Relative to what training added to the logit (its value without the start's), both summed over the prompts.
    """
    query = _queries(memory, model, prompts, layers=[layer])[layer]
    spotlight = memory.attend(queries={layer: query})[layer]
    units = prompts.predicted.to(query.device)
    learnt = (spotlight.output() - spotlight.start()).gather(1, units[:, None]).double().sum()
    most = min(max(CARRIED), spotlight.count())
    best = spotlight.top(most, of="contribution", unit=units).values[:, 0].double().sum(dim=0)  # (k,)
    return [
        {"patterns": k, "share": float(best[:k].sum() / learnt), "of_all_patterns": k / spotlight.count()}
        for k in CARRIED
        if k <= most
    ]


def _queries(memory: Memory, model: nn.Module, prompts: HeldOut, layers: list[str] | None = None) -> dict[str, Tensor]:
    """Return each layer's query at the last token of each prompt, (P, d_in)."""
    entries = {name: entry for name, entry in memory.layers.items() if layers is None or name in layers}
    parts = [last_queries(model, tokens, entries) for tokens in prompts.tokens.split(PROMPTS_AT_ONCE)]
    return {name: torch.cat([part[name] for part in parts]) for name in entries}
