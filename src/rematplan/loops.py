"""A loop in parts and chunks: the same iterations in the same order, as several loops.

Comes in: a `scan` equation and its parts, each with the function and the policy of its iterations. Goes out: the loop as a
function of the equation's inputs. Knows neither plans nor targets.

Stacked inputs are never split: slices of them would be copies, of parameters and again of their gradients. Every iteration
takes its slice from the whole stack by index, inside of its region, so that no slice is kept for the backward pass. For the
gradient the stack travels along as a carry that nothing reads (`_take`): backward, its cotangent is one buffer that each
iteration adds its slice to in place, through all parts and chunks. (v5e and H100 compilers, jax 0.10.2: eight layers of
4096 x 4096 in two loops need as much as in one; split by slices they need 592 and 672 MiB more.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from rematplan import _jax_private
from rematplan.program.residuals import is_inexact
from rematplan.program.trace import Equation

Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Iterations:
    """Iterations of a loop that run alike.

    Attributes:
      function: the loop's body: constants, carries and slices -> carries and slices of results.
      policy: of the region around it, as in `jax.checkpoint`; None keeps nothing.
      count: how many.
      chunk: so many at a time form a region; 0 for none.
    """

    function: Function
    policy: Callable[..., Any] | None
    count: int
    chunk: int


@dataclass(frozen=True)
class _Operands:
    constants: list[Any]
    stacks: list[Any]
    length: int
    reverse: bool
    unroll: int


_State = tuple[list[Any], list[Any]]
"""Carries, and for each stack with a gradient the stack as it travels along."""


def in_parts(equation: Equation, parts: Sequence[Iterations]) -> Function:
    """The loop as a function of the equation's distinct inputs.

    Args:
      parts: in the order in which they run; their counts add up to the loop's length.
    """
    params = equation.eqn.params
    constants, carries = _jax_private.scan_sizes(params)
    assert sum(part.count for part in parts) == params["length"], "every iteration runs once"

    def function(*inputs: Any) -> list[Any]:
        given = _operands(equation, inputs)
        stacks = given[constants + carries :]
        operands = _Operands(given[:constants], stacks, params["length"], params["reverse"], params["unroll"])
        state: _State = (given[constants : constants + carries], [s for s in stacks if is_inexact(s)])
        done, results = 0, []
        for part in parts:
            for run, count in ((_chunks, part.count - _rest(part)), (_iterations, _rest(part))):
                if count:
                    state, stacked = run(part, operands, state, done, count)
                    results.append(stacked)
                    done += count
        joined = [_joined([r[i] for r in results], params["reverse"]) for i in range(len(results[0]))]
        outputs = [*state[0], *joined]
        return [x for x, v in zip(outputs, equation.eqn.outvars, strict=True) if not isinstance(v, jex.DropVar)]

    return function


def _rest(part: Iterations) -> int:
    """Iterations outside of chunks."""
    return part.count % part.chunk if part.chunk else part.count


def _operands(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    known = dict(zip(equation.variables(), inputs, strict=True))
    return [jnp.asarray(a.val) if isinstance(a, jex.Literal) else known[a] for a in equation.eqn.invars]


def _iterations(
    part: Iterations, operands: _Operands, state: _State, first: Any, count: int
) -> tuple[_State, list[Any]]:
    """One iteration after the other, from the iteration `first` on; returns stacked results in this order."""

    def one(state: _State, index: Any) -> tuple[_State, list[Any]]:
        carry, along = state
        rest = iter(along)
        slices, passed = [], []
        for stack in operands.stacks:
            if is_inexact(stack):
                # its gradient flows through what travels along
                taken, same = _take(lax.stop_gradient(stack), next(rest), index)
                passed.append(same)
            else:
                taken = lax.dynamic_index_in_dim(stack, index, keepdims=False)
            slices.append(taken)
        outputs = list(part.function(*operands.constants, *carry, *slices))
        return (outputs[: len(carry)], passed), outputs[len(carry) :]

    numbers = first + jnp.arange(count)
    indices = operands.length - 1 - numbers if operands.reverse else numbers
    region = jax.checkpoint(one, policy=part.policy, prevent_cse=False)
    return lax.scan(region, state, indices, unroll=operands.unroll)


def _chunks(part: Iterations, operands: _Operands, state: _State, first: int, count: int) -> tuple[_State, list[Any]]:
    """Whole chunks, each a region around its iterations."""

    def one(state: _State, number: Any) -> tuple[_State, list[Any]]:
        return _iterations(part, operands, state, first + number * part.chunk, part.chunk)

    region = jax.checkpoint(one, prevent_cse=False)
    state, stacked = lax.scan(region, state, jnp.arange(count // part.chunk))
    return state, [x.reshape(count, *x.shape[2:]) for x in stacked]


def _joined(pieces: Sequence[Any], reverse: bool) -> Any:
    """Stacked results of all parts, in the order of the loop's inputs."""
    whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
    return jnp.flip(whole, axis=0) if reverse else whole


@jax.custom_vjp
def _take(stack: Any, along: Any, index: Any) -> tuple[Any, Any]:
    """A slice of the stack, and `along` as it is. Gradients are those of the same slice of `along`."""
    return lax.dynamic_index_in_dim(stack, index, keepdims=False), along


def _take_forward(stack: Any, along: Any, index: Any) -> tuple[tuple[Any, Any], Any]:
    return _take(stack, along, index), index


def _take_backward(index: Any, cotangents: tuple[Any, Any]) -> tuple[None, Any, None]:
    of_slice, of_along = cotangents
    known = lax.dynamic_index_in_dim(of_along, index, keepdims=False)
    return None, lax.dynamic_update_index_in_dim(of_along, known + of_slice, index, axis=0), None


_take.defvjp(_take_forward, _take_backward)
