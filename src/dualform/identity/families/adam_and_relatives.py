"""The optimizers of torch that belong to the elementwise family: each by a function that reads one step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualform.identity.families.elementwise import reads
from dualform.identity.families.elementwise_step import ElementwiseStep
from dualform.identity.families.optimizer_kind import Settings, State


def _sign(settings: Settings) -> float:
    return -1.0 if settings["maximize"] else 1.0


def _adam(settings: Settings, after: State, *, decoupled: bool) -> ElementwiseStep:
    beta1, beta2 = settings["betas"]
    count = float(after["step"])
    denominator = _adam_second(settings, after).sqrt() / (1 - beta2**count) ** 0.5 + settings["eps"]
    return _adam_step(settings, count, settings["lr"] / (1 - beta1**count) / denominator, decoupled=decoupled)


def _adam_second(settings: Settings, after: State) -> Tensor:
    found: Tensor = after["max_exp_avg_sq"] if settings["amsgrad"] else after["exp_avg_sq"]
    return found


def _adam_step(settings: Settings, count: float, on_average: Tensor, *, decoupled: bool) -> ElementwiseStep:
    """Return a step of Adam, given how many steps there were and what it multiplies its average with."""
    beta1, _ = settings["betas"]
    decay, lr = settings["weight_decay"], settings["lr"]
    return ElementwiseStep(
        alpha=beta1,
        beta=1 - beta1,
        kappa=1 - lr * decay if decoupled else 1.0,
        on_average=on_average,
        decay=0.0 if decoupled else decay,
        sign=_sign(settings),
        corrected=count,
    )


def _adam_together(taken: Sequence[tuple[Settings, State]]) -> list[ElementwiseStep]:
    """Read steps of Adam or AdamW as `_adam` does, by the same kernels for all parameters with the same settings."""
    counts = [float(after["step"]) for _, after in taken]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, ((settings, after), count) in enumerate(zip(taken, counts, strict=True)):
        second = _adam_second(settings, after)
        alike.setdefault((count, second.dtype, second.device, id(settings)), []).append(place)
    found: dict[int, ElementwiseStep] = {}
    for places in alike.values():
        settings, count = taken[places[0]][0], counts[places[0]]
        beta1, beta2 = settings["betas"]
        factors = torch._foreach_sqrt([_adam_second(*taken[place]) for place in places])
        torch._foreach_div_(factors, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(factors, settings["eps"])
        torch._foreach_reciprocal_(factors)
        torch._foreach_mul_(factors, settings["lr"] / (1 - beta1**count))
        decoupled = settings.get("decoupled_weight_decay", True)  # AdamW's is always
        for place, factor in zip(places, factors, strict=True):
            found[place] = _adam_step(settings, count, factor, decoupled=decoupled)
    return [found[place] for place in range(len(taken))]


_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


@reads(
    torch.optim.Adam,
    *_ADAM,
    "decoupled_weight_decay",
    average="exp_avg",
    state_settings=("amsgrad",),
    by_average=True,
    together=_adam_together,
)
def _read_adam(settings: Settings, before: State, after: State) -> ElementwiseStep:
    return _adam(settings, after, decoupled=settings["decoupled_weight_decay"])


@reads(
    torch.optim.AdamW,
    *_ADAM,
    average="exp_avg",
    state_settings=("amsgrad",),
    decoupled=True,
    by_average=True,
    together=_adam_together,
)
def _read_adamw(settings: Settings, before: State, after: State) -> ElementwiseStep:
    return _adam(settings, after, decoupled=True)


@reads(
    torch.optim.NAdam,
    "lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize",
    average="exp_avg",
)  # fmt: skip
def _read_nadam(settings: Settings, before: State, after: State) -> ElementwiseStep:
    beta1, beta2 = settings["betas"]
    count, lr, decay = float(after["step"]), settings["lr"], settings["weight_decay"]
    momentum, following = (beta1 * (1 - 0.5 * 0.96 ** (at * settings["momentum_decay"])) for at in (count, count + 1))
    product = float(after["mu_product"])
    denominator = (after["exp_avg_sq"] / (1 - beta2**count)).sqrt() + settings["eps"]
    decoupled = settings["decoupled_weight_decay"]
    return ElementwiseStep(
        alpha=beta1,
        beta=1 - beta1,
        kappa=1 - lr * decay if decoupled else 1.0,
        on_average=lr * following / (1 - product * following) / denominator,
        on_gradient=lr * (1 - momentum) / (1 - product) / denominator,  # NAdam's factors follow no one α: uncorrected
        decay=0.0 if decoupled else decay,
        sign=_sign(settings),
    )


@reads(
    torch.optim.RAdam,
    "lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize",
    average="exp_avg",
    by_average=True,
)  # fmt: skip
def _read_radam(settings: Settings, before: State, after: State) -> ElementwiseStep:
    beta1, beta2 = settings["betas"]
    count, lr, decay = float(after["step"]), settings["lr"], settings["weight_decay"]
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * count * beta2**count / (1 - beta2**count)
    rate: Tensor | float = lr / (1 - beta1**count)
    if length > 5:
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        adapted = (1 - beta2**count) ** 0.5 / (after["exp_avg_sq"].sqrt() + settings["eps"])
        rate = rate * ratio**0.5 * adapted
    decoupled = settings["decoupled_weight_decay"]
    return ElementwiseStep(
        alpha=beta1,
        beta=1 - beta1,
        kappa=1 - lr * decay if decoupled else 1.0,
        on_average=rate,
        decay=0.0 if decoupled else decay,
        sign=_sign(settings),
        corrected=count,
    )


@reads(torch.optim.Adamax, "lr", "betas", "eps", "weight_decay", "maximize", average="exp_avg", by_average=True)
def _read_adamax(settings: Settings, before: State, after: State) -> ElementwiseStep:
    beta1, _ = settings["betas"]
    count = float(after["step"])
    rate = settings["lr"] / (1 - beta1**count)
    return ElementwiseStep(
        alpha=beta1,
        beta=1 - beta1,
        on_average=rate / after["exp_inf"],
        decay=settings["weight_decay"],
        sign=_sign(settings),
        corrected=count,
    )


@reads(
    torch.optim.RMSprop,
    "lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize",
    average="momentum_buffer",
    state_settings=("centered", "momentum"),
)  # fmt: skip
def _read_rmsprop(settings: Settings, before: State, after: State) -> ElementwiseStep:
    square = after["square_avg"]
    if settings["centered"]:
        square = square - after["grad_avg"].square()
    inverse = 1 / (square.sqrt() + settings["eps"])
    remembered = (1 - settings["alpha"]) ** 0.5 * (1 - settings["momentum"])
    reach = 1 / remembered if remembered else math.inf
    common = {"decay": settings["weight_decay"], "sign": _sign(settings), "reach": reach}
    if settings["momentum"] > 0:
        return ElementwiseStep(alpha=settings["momentum"], beta=inverse, on_average=settings["lr"], **common)
    return ElementwiseStep(on_gradient=settings["lr"] * inverse, **common)


@reads(torch.optim.Adagrad, "lr", "lr_decay", "eps", "weight_decay", "maximize")
def _read_adagrad(settings: Settings, before: State, after: State) -> ElementwiseStep:
    rate = settings["lr"] / (1 + (float(after["step"]) - 1) * settings["lr_decay"])
    scaled = rate / (after["sum"].sqrt() + settings["eps"])
    return ElementwiseStep(on_gradient=scaled, decay=settings["weight_decay"], sign=_sign(settings))


@reads(torch.optim.Adadelta, "lr", "rho", "eps", "weight_decay", "maximize", overwrites_state=("acc_delta",))
def _read_adadelta(settings: Settings, before: State, after: State) -> ElementwiseStep:
    eps = settings["eps"]
    deviation = (after["square_avg"] + eps).sqrt()
    travelled = before["acc_delta"] if "acc_delta" in before else torch.zeros_like(deviation)
    scaled = settings["lr"] * (travelled + eps).sqrt() / deviation
    return ElementwiseStep(on_gradient=scaled, decay=settings["weight_decay"], sign=_sign(settings))
