"""One plan for all processes of a training run.

Comes in: how a plan is made, and the program that this process traced. Goes out: on every process the same plan, made
by process 0 alone; or on every process the error that kept it from being made, so that nobody waits for ever. What is
exchanged goes through the key-value store of JAX's distributed runtime and not over the devices: a plan takes minutes,
a collective does not wait that long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import zlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from rematplan import errors
from rematplan._jax_private import Processes, processes
from rematplan._plan import Plan
from rematplan.errors import InfeasibleBudget, InputError, PlanMismatch, RematplanError
from rematplan.naming import difference, module_fingerprints, shapes_fingerprint
from rematplan.program.graph import Graph
from rematplan.records import Finding, plain

# How far apart processes may ask for a plan: they build and trace their models first
ARRIVAL_SECONDS = 600.0
_PLAN_SECONDS = 60.0  # of one wait for a plan, which is begun anew as long as the runtime lives
_CHUNK_BYTES = 1 << 19  # a value of the store travels in one message, which may be 4 MiB long
_calls = itertools.count()  # every process asks for the same plans in the same order


def made_once(make: Callable[[], Plan], *, trace: Callable[[], Graph], asked: Mapping[str, Any]) -> Plan:
    """A plan that process 0 makes for all of them; where there is one process, simply made.

    Args:
      make: makes the plan; called on process 0.
      trace: this process's program. It has to be the same everywhere, shapes included.
      asked: what else has to be the same: the budget, the target.

    Returns:
      The same plan everywhere; figures that are not part of a plan's file are on process 0 only.

    Raises:
      PlanMismatch: a process traced another program, or asked for something else; raised on all of them.
      InputError: a process did not ask for the plan in time.
      RematplanError: whatever process 0 raised.
    """
    group = processes()
    if group is None:
        return make()
    exchange = _Exchange(group, f"rematplan/plan/{next(_calls)}")
    if group.index == 0:
        exchange.put("begun", {})
    try:
        graph = trace()
    except BaseException as error:
        exchange.put(f"traced/{group.index}", {"error": _written(error)})
        if group.index == 0:
            exchange.put("agreed", {"error": _written(error)})
        raise
    mine = _Traced(graph.fingerprint, shapes_fingerprint(graph), module_fingerprints(graph), dict(asked))
    made: Plan | None = None
    if group.index == 0:
        with exchange.telling("agreed"):
            exchange.check(mine)
        exchange.put("agreed", {})
        with exchange.telling("outcome"):
            jax.local_devices()
            made = make()
            outcome = {"plan": made.to_json()}
        exchange.put("outcome", outcome)
    else:
        exchange.put(f"traced/{group.index}", dataclasses.asdict(mine))
        exchange.get("begun", process=0)
        exchange.wait("agreed")
        jax.local_devices()  # opening them is an act of all processes together, and process 0 does it when it lowers
        outcome = exchange.wait("outcome")
    plan = Plan.load(
        json.loads(json.dumps(outcome["plan"]))
    )  # read by process 0 too, so that it is the same to the byte
    if plan.fingerprint != mine.fingerprint or plan.shapes != mine.shapes:
        raise PlanMismatch(f"the plan that process 0 made is not for what process {group.index} traced; plan again")
    if made is not None:
        return dataclasses.replace(plan, measurement=made.measurement, model=made.model, rows=made.rows)
    return plan


@dataclass(frozen=True)
class _Traced:
    """What one process asks for, and for which program."""

    fingerprint: str
    shapes: str
    modules: dict[str, str]
    asked: dict[str, Any]


@dataclass(frozen=True)
class _Exchange:
    """Documents of one plan in the store of the runtime."""

    group: Processes
    folder: str

    def put(self, name: str, document: Mapping[str, Any]) -> None:
        packed = zlib.compress(json.dumps(document).encode())
        chunks = [packed[at : at + _CHUNK_BYTES] for at in range(0, len(packed), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self.group.set(f"{self.folder}/{name}/{number}", chunk)
        self.group.set(f"{self.folder}/{name}", str(len(chunks)).encode())  # last: who sees it finds all of them

    @contextlib.contextmanager
    def telling(self, name: str) -> Generator[None]:
        """What fails in here is what the others read in place of the document."""
        try:
            yield
        except BaseException as error:
            self.put(name, {"error": _written(error)})
            raise

    def wait(self, name: str, *, process: int = 0) -> dict[str, Any]:
        """A document, however long it takes.

        Raises:
          RematplanError: what the process that should have written it met instead.
          RuntimeError: it is gone, and the runtime with it.
        """
        while True:
            count = self.group.get(f"{self.folder}/{name}", seconds=_PLAN_SECONDS)
            if count is not None:
                chunks = [self.group.get(f"{self.folder}/{name}/{n}", seconds=_PLAN_SECONDS) for n in range(int(count))]
                document = json.loads(zlib.decompress(b"".join(chunk or b"" for chunk in chunks)))
                if "error" in document:
                    raise _read(document["error"], process=process)
                return document

    def get(self, name: str, *, process: int) -> dict[str, Any]:
        """A document that a process writes when it asks for the plan.

        Raises:
          InputError: it did not within `ARRIVAL_SECONDS`.
        """
        if self.group.get(f"{self.folder}/{name}", seconds=ARRIVAL_SECONDS) is None:
            raise InputError(
                f"process {process} of {self.group.count} did not ask for this plan within {ARRIVAL_SECONDS:.0f} s; every "
                "process has to call rp.plan, in the same order."
            )
        return self.wait(name, process=process)

    def check(self, mine: _Traced) -> None:
        """Compares what every other process traced with what process 0 did.

        Raises:
          PlanMismatch: one of them differs.
        """
        for process in range(1, self.group.count):
            there = _Traced(**self.get(f"traced/{process}", process=process))
            if there.fingerprint != mine.fingerprint:
                how = (
                    f"another function (structure {there.fingerprint}, there {mine.fingerprint}): "
                    f"{difference(mine.modules, there.modules)}"
                )
            elif there.shapes != mine.shapes:
                how = f"arguments of other shapes or types ({there.shapes}, there {mine.shapes})"
            elif there.asked != json.loads(json.dumps(mine.asked)):
                names = [name for name in mine.asked if mine.asked[name] != there.asked.get(name)]
                how = ", ".join(f"{name} {there.asked.get(name)!r}, there {mine.asked[name]!r}" for name in names)
            else:
                continue
            raise PlanMismatch(
                f"process {process} of {self.group.count} does not ask for the plan of process 0: {how}. Every process has to "
                "build the same model, and arguments of the same global shapes."
            )


def _written(error: BaseException) -> dict[str, Any]:
    """An error as plain data."""
    known = isinstance(error, RematplanError)
    written: dict[str, Any] = {"kind": type(error).__name__, "message": str(error) if known else repr(error)}
    if isinstance(error, InfeasibleBudget):
        written |= {"minimum_bytes": error.minimum_bytes, "parts": error.parts, "findings": plain(error.findings)}
    return written


def _read(written: Mapping[str, Any], *, process: int) -> RematplanError:
    """The error that another process met, of the same kind if it is one of ours."""
    message = f"process {process}: {written['message']}"
    if written["kind"] == InfeasibleBudget.__name__:
        findings = [Finding(**finding) for finding in written["findings"]]
        return InfeasibleBudget(
            message, minimum_bytes=written["minimum_bytes"], parts=written["parts"], findings=findings
        )
    kind = getattr(errors, written["kind"], None)
    return kind(message) if kind is not None else RematplanError(message)
