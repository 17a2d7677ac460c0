"""Small language models in the shapes that other people's have, and a recorded run of any of them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.store.blobs import Blobs

TEXT = "the wolf sees the lamb. the fox fears the dog. the crow eats the cat. " * 8
CHARACTERS = sorted(set(TEXT))
TOKENS = torch.tensor([CHARACTERS.index(sign) for sign in TEXT])
SIZE = len(CHARACTERS)
BLOCK = 12


def characters(tokens: Tensor = TOKENS, **options: Any) -> dualform.Corpus:
    """Return the text in characters, as a corpus."""
    return dualform.Corpus.from_tokens(tokens, vocabulary=CHARACTERS, unit="chars", test=TOKENS[:200], **options)


def written(tokens: Any) -> str:
    """Return the text of some characters' numbers."""
    return "".join(CHARACTERS[token] for token in tokens)


class Letters:
    """A tokenizer of single letters, in an order of its own."""

    def __init__(self, letters: str = "".join(CHARACTERS)) -> None:
        self.letters = letters

    def __len__(self) -> int:
        return len(self.letters)

    def encode(self, text: str) -> list[int]:
        """Return the number of each letter."""
        return [self.letters.index(letter) for letter in text]

    def decode(self, tokens: Any) -> str:
        """Return the letters."""
        return "".join(self.letters[token] for token in tokens)


letters = Letters()


class Body(nn.Module):
    """One causal layer: what a position says is made of the mean of the positions up to it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, d) or, of one sequence, (L, d)."""
        places = torch.arange(1, x.shape[-2] + 1, device=x.device)[:, None]
        change: Tensor = self.down(functional.gelu(self.up(x.cumsum(dim=-2) / places)))
        return x + change


class LastPositionModel(nn.Module):
    """Positions without a batch axis, a limit by assertion, and a head at the last position only without targets."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**{"block_size": BLOCK, "vocab_size": SIZE, **config})
        self.wte = nn.Embedding(self.config.vocab_size, 8)
        self.wpe = nn.Embedding(BLOCK, 8)
        self.body = Body()
        self.lm_head = nn.Linear(8, self.config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return (logits, loss)."""
        length = idx.shape[1]
        assert length <= BLOCK, f"Cannot forward sequence of length {length}, block size is only {BLOCK}"
        x = self.body(self.wte(idx) + self.wpe(torch.arange(length, device=idx.device)))
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Output(dict[str, Any]):
    """An output whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class OutputModel(nn.Module):
    """Positions (1, L) that all rows share, and an output object with `logits`."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_positions=BLOCK)
        self.wte = nn.Embedding(size, 8)
        self.wpe = nn.Embedding(BLOCK, 8)
        self.body = Body()
        self.head = nn.Linear(8, size)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Return an output with `logits` (B, L, V) and, with labels, `loss` ahead of them."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        logits = self.head(self.body(self.wte(input_ids) + self.wpe(places)))
        if labels is None:
            return Output(logits=logits)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss=loss, logits=logits)


def record_model(
    folder: Path | Blobs,
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    tokens: Tensor = TOKENS,
    steps: int = 3,
    text: Tensor | None = None,
    **options: Any,
) -> dualform.Memory:
    """Record a model on windows of a text, annotated with token and place.

    Args:
        folder: the run folder.
        model: the model.
        loss: of the inputs (B, L) and the tokens that follow them (B, L).
        tokens: (N,) the text.
        steps: how many updates.
        text: (N,) what the recorder is told that the text is, if it is told.
        options: of `dualform.record`.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers without annotations are what is tested
        with dualform.record(model, optimizer, folder, **options) as recorder:
            if text is not None:
                recorder.media(tokens=text, vocabulary=CHARACTERS)
            for _ in range(steps):
                starts = torch.randint(0, len(tokens) - BLOCK - 1, (5,), generator=generator)
                places = starts[:, None] + torch.arange(BLOCK)
                recorder.annotate(token=tokens[places], place=places)
                optimizer.zero_grad()
                loss(tokens[places], tokens[places + 1]).backward()
                optimizer.step()
    return dualform.open(folder)


def record_last_position_model(folder: Path, **options: Any) -> tuple[dualform.Memory, LastPositionModel]:
    """Record a `LastPositionModel`; its text is not in the run."""
    torch.manual_seed(0)
    model = LastPositionModel()
    memory = record_model(folder, model, lambda x, y: model(x, y)[1], **options)
    return memory, model


def record_output_model(folder: Path | Blobs, **options: Any) -> tuple[dualform.Memory, OutputModel]:
    """Record an `OutputModel`; its text is not in the run."""
    torch.manual_seed(0)
    model = OutputModel()
    memory = record_model(folder, model, lambda x, y: model(x, labels=x).loss, **options)
    return memory, model
