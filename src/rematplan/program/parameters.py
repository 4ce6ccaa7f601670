"""The loss as a function of what it is differentiated for, with everything else fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def of_parameters(
    function: Callable[..., Sequence[Any]], leaves: Sequence[Any], differentiated: Sequence[int]
) -> tuple[Callable[[list[Any]], tuple[Any, list[Any]]], list[Any]]:
    """What `jax.vjp` and `jax.grad` want, with `has_aux=True`.

    Args:
      function: flat leaves -> flat outputs, the scalar loss first.
      leaves: all of them.
      differentiated: positions among the leaves.

    Returns:
      A function of the differentiated leaves -> the loss and the other outputs, and those leaves.
    """

    def loss(parameters: list[Any]) -> tuple[Any, list[Any]]:
        everything = list(leaves)
        for index, parameter in zip(differentiated, parameters, strict=True):
            everything[index] = parameter
        value, *rest = function(*everything)
        return value, rest

    return loss, [leaves[i] for i in differentiated]
