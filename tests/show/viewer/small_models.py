"""A model of letters that a run can remember by name, and a text to train it on that is full of markup."""

import torch
from torch import Tensor, nn

import dualform

NASTY = '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">&amp;\''
STORY = ("the fox saw the grapes and the crow saw the fox. " + NASTY + " the grapes were sour. ") * 6
VOCABULARY = sorted(set(STORY))
LENGTH = 12


class Letters(nn.Module):
    """Predicts the next letter from the one before."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, 8)
        self.out = nn.Linear(8, size)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, L) -> (B, L, V)
        logits: Tensor = self.out(torch.tanh(self.table(tokens)))
        return logits


def letters(size: int) -> Letters:
    return Letters(size)


def record_letters(folder, steps: int = 30) -> Letters:
    """Record a run of letters that keeps its text, its documents and some tests."""
    torch.manual_seed(0)
    tokens = torch.tensor([VOCABULARY.index(letter) for letter in STORY])
    model = letters(len(VOCABULARY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    factory = {"factory": "small_models:letters", "factory_arguments": {"size": len(VOCABULARY)}}
    with dualform.record(model, optimizer, folder, **factory) as recorder:
        recorder.media(tokens=tokens, vocabulary=VOCABULARY, documents=[(0, NASTY), (len(STORY) // 2, "Second")])
        starts = torch.arange(0, 8 * LENGTH, LENGTH)
        tests = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
        recorder.tests(tests, tokens[starts + LENGTH])
        for step in range(steps):
            place = (torch.arange(4)[:, None] * 37 + step * 5 + torch.arange(LENGTH)) % (len(STORY) - 1)
            recorder.annotate(place=place, token=tokens[place])
            loss = nn.functional.cross_entropy(model(tokens[place]).flatten(0, 1), tokens[place + 1].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model
