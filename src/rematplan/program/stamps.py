"""Marks on equations that survive differentiation: which operation of a traced program an equation comes from.

Comes in: a traced program. Goes out: the same program, each equation with the index of its operation in its name stack.
Whatever JAX derives from an equation (its primal value, what its derivative rule computes, its recomputation) carries
that mark, so that a differentiated program can be read back operation by operation.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from rematplan.program.configuration import PLAIN, Configuration, LoopPlan, in_every_iteration
from rematplan.program.trace import Traced

Path = tuple[int, ...]
"""An operation's index; in the body of a loop, the loop's index first."""

# Not "~": module paths are marked with that. Paths are written in full: JAX moves equations that do not change from step
# to step out of a loop, and their name stacks then lack what the loop's equation has (0.10.2).
_STAMP = re.compile(r"#([\d.]+)#")


def stamped(traced: Traced, outer: Path = ()) -> Traced:
    """The program with marked equations, those in the bodies of loops included."""
    equations = []
    for index, equation in enumerate(traced.equations):
        source = equation.eqn.source_info
        mark = ".".join(map(str, (*outer, index)))
        marked = source.replace(name_stack=source.name_stack.extend(f"#{mark}#"))
        equations.append(replace(equation, eqn=equation.eqn.replace(source_info=marked)))
    bodies = {index: stamped(body, (*outer, index)) for index, body in traced.bodies.items()}
    return replace(traced, equations=tuple(equations), bodies=bodies)


def with_all_loops(traced: Traced, configuration: Configuration) -> Configuration:
    """The same configuration with every loop rebuilt from its traced body, so that the body's marks are in the program."""
    loops: list[tuple[int, LoopPlan]] = []
    for index, body in traced.bodies.items():
        plan = configuration.loop(index) or in_every_iteration(PLAIN)
        loops.append((index, LoopPlan(tuple(replace(p, body=with_all_loops(body, p.body)) for p in plan.parts))))
    return replace(configuration, loops=tuple(loops))


def path_of(name_stack: Any, outer: Path = ()) -> Path:
    """The operation that an equation comes from, () if it has no mark.

    Args:
      outer: of the equation that holds this one: name stacks of nested programs are relative.
    """
    found = _STAMP.findall(str(name_stack))
    return tuple(map(int, found[-1].split("."))) if found else outer
