"""A training on digits as a function that can be run again, on all samples or on some: an example, and quick to try.

dualform.record_training(train, "runs/digits", keep=dualform.Patterns())
$ dualform evaluate runs/digits --retrain 10 --train dualform.experiments.digits_training:train
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dualform.experiments.datasets import load, standardised
from dualform.experiments.models import mlp

EPOCHS, BATCH, TESTS = 15, 64, 100


def train(recording: Callable[..., Any], keep: Tensor | None = None) -> nn.Module:
    """Train an MLP on digits by SGD, and return it.

    Args:
        recording: opens the recording.
        keep: the numbers of the samples to train on; by default all.
    """
    images = load("digits")
    inputs, tests = standardised(images)
    labels, test_labels = (torch.from_numpy(each) for each in (images.train_labels, images.test_labels))
    samples = torch.arange(len(inputs)) if keep is None else keep
    torch.manual_seed(0)
    model = mlp([inputs.shape[1], 128, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recording(model, optimizer) as recorder:
        recorder.tests(tests[:TESTS], test_labels[:TESTS])
        for _ in range(EPOCHS):
            for batch in samples[torch.randperm(len(samples))].split(BATCH):
                recorder.annotate(sample=batch, label=labels[batch])
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
    return model
