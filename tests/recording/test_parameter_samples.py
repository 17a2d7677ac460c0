"""Samples that were read together: each parameter's own, whoever carries them, and copied as few tensors."""

import torch
from torch import nn

from dualform.recording.baseline import Baseline
from dualform.recording.parameter_samples import JointSample, ParameterSamples, samples_in, tensors_of_samples
from dualform.recording.sinks import sample


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2)).to(dtype)


def noted(model: nn.Module) -> ParameterSamples:
    parameters = dict(model.named_parameters())
    return Baseline(parameters, parameters).note(1, parameters)


def test_each_parameter_has_its_own_sample() -> None:
    model = network()
    model[1].double()  # of another dtype, so that it is read by itself
    samples = noted(model)
    parameters = dict(model.named_parameters())
    assert set(samples) == set(parameters)
    assert len(samples) == len(parameters)
    assert len(samples.tensors()) == 2
    for name, parameter in parameters.items():
        torch.testing.assert_close(samples[name], sample(parameter), rtol=0, atol=0)


def test_a_sample_that_numpy_reads_is_the_one_that_torch_reads() -> None:
    """bfloat16 is read by torch; its numbers are exact in float32, which numpy reads."""
    coarse = network(torch.bfloat16)
    fine = network(torch.bfloat16).float()
    for name, found in noted(fine).items():
        torch.testing.assert_close(found, noted(coarse)[name].float(), rtol=0, atol=0)


def test_samples_stay_as_they_were_when_parameters_go_on() -> None:
    model = network()
    samples = noted(model)
    before = {name: sample(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for name, found in samples.items():
        torch.testing.assert_close(found, before[name], rtol=0, atol=0)


def test_nothing_but_samples_is_handed_on() -> None:
    """The window that is compared beside the samples may be large, and whoever keeps samples would keep it too."""
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    samples = noted(model)
    assert [tensor.numel() for tensor in samples.tensors()] == [
        sum(sample(parameter).numel() for parameter in model.parameters())
    ]


def test_samples_are_cut_one_after_the_other() -> None:
    samples = ParameterSamples([JointSample(torch.arange(5.0), {"a": 2, "b": 3})])
    assert {name: found.tolist() for name, found in samples.items()} == {"a": [0.0, 1.0], "b": [2.0, 3.0, 4.0]}


def test_copies_of_the_few_tensors_hold_the_same_samples() -> None:
    samples = noted(network())
    copies = [tensor + 1 for tensor in tensors_of_samples(samples)]
    assert len(copies) == 1
    for name, found in samples_in(samples, copies).items():
        torch.testing.assert_close(found, samples[name] + 1, rtol=0, atol=0)
    plain = {"a": torch.ones(2), "b": torch.zeros(1)}
    doubled = samples_in(plain, [2 * tensor for tensor in tensors_of_samples(plain)])
    assert {name: found.tolist() for name, found in doubled.items()} == {"a": [2.0, 2.0], "b": [0.0]}
