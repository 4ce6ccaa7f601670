"""Collectives of a scheduled program of several devices: what is communicated, in which pass, and how long that is waited for.

Comes in: a parsed HLO module and a chip. Goes out: one `Collective` for each scheduled one, and `Clock`, which walks along the
schedule and says what of their time the computation does not hide. Compilers price no communication: seconds are those of
a ring over the chip's links (`chips.toml`), one transfer at a time, without latency.

A collective is a plain instruction, a pair of a start and a done, or, on TPU, the content of fusions: one that starts it,
others that carry it along beside a product, and one that ends it, all with one channel. On TPU7x, whose SparseCores send, the
start only makes ready, and an update between it and the done brings what is sent.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum

from rematplan.target.chips import Chip
from rematplan.target.hlo import Instruction, Leaf, Module
from rematplan.target.measurement import CollectiveUse
from rematplan.target.provenance import Provenance, pass_of

OPCODES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
_OF_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_STARTS, _ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"  # TPU: what a fusion that only starts or ends one calls
# TPU: a fusion of an all-reduce and of the slice of it that is kept, sent as a reduce-scatter
_SCATTERS = "all-reduce-scatter"


class Stage(Enum):
    """What a scheduled instruction does for a collective."""

    WHOLE = "whole"
    START = "start"
    BESIDE = "beside"  # carries it along while it computes something else
    END = "end"


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
      kind: its HLO name.
      bytes: of the whole array that is gathered, reduced or scattered, or of what one device sends to others.
      group: devices that take part.
    """

    kind: str
    bytes: int
    group: int

    def seconds(self, chip: Chip) -> float:
        """Of one execution: a ring in which every device sends all but its own share once, to reduce and gather twice."""
        if self.group < 2 or not chip.link_bandwidth:
            return 0.0
        share = 1.0 if self.kind == "collective-permute" else (self.group - 1) / self.group
        return (2 if self.kind == "all-reduce" else 1) * share * self.bytes / chip.link_bandwidth


class Collectives:
    """The collectives of a module; those in fusions are looked up once."""

    def __init__(self, module: Module):
        self._module = module
        self._inside: dict[str, tuple[Instruction, ...]] = {}
        self._stages: dict[str, tuple[Collective, Stage, str]] = {}
        self._open: dict[str, Collective] = {}  # by channel: started on the way through the schedule
        self._ready: dict[str, Instruction] = {}  # by start: collectives whose update brings what is sent

    def of(self, instruction: Instruction) -> tuple[Collective, Stage, str] | None:
        """The collective that a scheduled instruction works on, what it does, and a key that its stages share.

        Call it along the schedule: what comes first of a channel starts it.
        """
        if self._module.num_partitions < 2:
            return None
        if instruction.name not in self._stages:
            found = self._find(instruction)
            if found is None:
                return None
            self._stages[instruction.name] = found
        return self._stages[instruction.name]

    def _find(self, instruction: Instruction) -> tuple[Collective, Stage, str] | None:
        opcode = instruction.opcode
        kind = next((k for k in OPCODES if opcode in (k, f"{k}-start")), None)
        if kind is not None:
            stage = Stage.START if opcode.endswith("-start") else Stage.WHOLE
            return self._made(instruction, kind), stage, instruction.name
        if opcode.endswith("-done") and instruction.operands:
            started = self._stages.get(instruction.operands[0])
            return None if started is None else (started[0], Stage.END, started[2])
        if opcode == "async-update":
            return self._of_update(instruction)
        if opcode not in ("fusion", "async-start"):
            return None
        inner = self.inside(instruction)
        if not inner:
            return None
        if opcode == "async-start" and not instruction.operands:
            self._ready[instruction.name] = inner[0]
            return None
        if opcode == "async-start":
            return self._made(inner[0], inner[0].opcode), Stage.START, instruction.name
        return self._of_fusion(instruction, inner[0])

    def _of_update(self, update: Instruction) -> tuple[Collective, Stage, str] | None:
        ready = self._ready.get(update.operands[0])
        if ready is not None:
            return self._made(ready, ready.opcode), Stage.START, update.name
        started = self._stages.get(update.operands[0])
        return None if started is None else (started[0], Stage.BESIDE, started[2])

    def _of_fusion(self, fusion: Instruction, inner: Instruction) -> tuple[Collective, Stage, str]:
        if any(name.startswith(_SCATTERS) for name in fusion.called):
            made = self._made(inner, inner.opcode)
            return Collective("reduce-scatter", made.bytes, made.group), Stage.WHOLE, fusion.name
        text = "".join(
            self._module.computations[name].text for name in fusion.called if name in self._module.computations
        )
        channel = _channel(inner) or fusion.name
        if channel not in self._open:
            self._open[channel] = self._made(inner, inner.opcode)
            return self._open[channel], Stage.START if _STARTS in text else Stage.WHOLE, channel
        return self._open[channel], Stage.END if _ENDS in text else Stage.BESIDE, channel

    def inside(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The collectives in what an instruction calls."""
        found: list[Instruction] = []
        for name in instruction.called:
            if name not in self._inside:
                computation = self._module.computations.get(name)
                self._inside[name] = ()  # computations do not call themselves
                inner = computation.instructions if computation else ()
                self._inside[name] = tuple(
                    each for i in inner for each in ((i,) if i.opcode in OPCODES else self.inside(i))
                )
            found += self._inside[name]
        return tuple(found)

    def _made(self, instruction: Instruction, kind: str) -> Collective:
        group = _group(instruction.attributes, self._module.num_partitions)
        return Collective(kind, _bytes(instruction, kind, group), group)


@dataclass(frozen=True)
class Passed:
    """What came of an instruction: whether it computes nothing, and the seconds waited in one execution, for which cause."""

    only_communicates: bool
    waited: float
    cause: Instruction


class Clock:
    """Walks along a schedule and adds up what collectives make it wait.

    A loop's body is walked once: what one turn waits counts as often as it turns.
    """

    def __init__(self, module: Module, chip: Chip):
        self._collectives, self._chip, self._provenance = Collectives(module), chip, Provenance(module)
        self._now = self._link_free = 0.0
        self._ends: dict[str, tuple[float, Instruction]] = {}
        self._uses: dict[tuple[str, str], list[float]] = {}
        self.waited = 0.0

    def passes(self, instruction: Instruction, times: int, seconds: float) -> Passed:
        """Moves past an instruction that computes for so long, each of `times` times."""
        found = self._collectives.of(instruction)
        if found is None:
            self._now += seconds
            return Passed(only_communicates=False, waited=0.0, cause=instruction)
        collective, stage, key = found
        waits, cause = 0.0, instruction
        if stage in (Stage.WHOLE, Stage.START):
            takes = collective.seconds(self._chip)
            self._count(collective, instruction, times, takes)
            self._link_free = max(self._now, self._link_free) + takes
            self._ends[key] = self._link_free, instruction
        if stage is Stage.BESIDE:
            self._now += seconds
        if stage in (Stage.WHOLE, Stage.END):
            end, cause = self._ends.pop(key, (0.0, instruction))
            waits = max(0.0, end - self._now)
            self._now += waits
            self.waited += times * waits
        return Passed(stage is not Stage.BESIDE, waits, cause)

    def _count(self, collective: Collective, instruction: Instruction, times: int, seconds: float) -> None:
        step_pass = pass_of(self._provenance.maker(instruction).op_name).value
        total = self._uses.setdefault((collective.kind, step_pass), [0, 0, 0.0])
        for index, amount in enumerate((1, collective.bytes, seconds)):
            total[index] += times * amount

    def uses(self) -> tuple[CollectiveUse, ...]:
        """What was met, by kind and pass, most time first."""
        found = (CollectiveUse(*key, int(n), int(size), seconds) for key, (n, size, seconds) in self._uses.items())
        return tuple(sorted(found, key=lambda use: (-use.seconds, use.kind, use.step_pass)))


def results(instruction: Instruction) -> list[Leaf]:
    """The results of a collective, or of what starts one: that repeats its operands first, but for an all-reduce."""
    leaves = instruction.leaves
    repeats = instruction.opcode.endswith(("-start", "-update")) and instruction.opcode != "all-reduce-start"
    if repeats and any(leaf.path for leaf in leaves):
        return [leaf for leaf in leaves if leaf.path[:1] == (1,)]
    return list(leaves)


def _bytes(instruction: Instruction, kind: str, group: int) -> int:
    size = sum(math.ceil(leaf.elements * leaf.bits / 8) for leaf in results(instruction))
    return size * group if kind == "reduce-scatter" else size


def _group(attributes: str, devices: int) -> int:
    """How many devices take part, as HLO writes it: listed, counted up, or as axes of a mesh."""
    if listed := _LISTED.search(attributes):
        return listed[1].count(",") + 1
    if counted := _IOTA.search(attributes):
        return int(counted[2])
    if of_mesh := _OF_MESH.search(attributes):
        sizes = {name: int(size) for name, size in _AXIS.findall(of_mesh[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']+)'", of_mesh[2]) if name in sizes)
    return devices


def _channel(instruction: Instruction) -> str:
    found = _CHANNEL.search(instruction.attributes)
    return found[1] if found else ""
