"""A plan as text and as the hand-written NNX code that it amounts to. Reads the plan's JSON; does not apply it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rematplan.scopes import without_indices
from rematplan.units import format_bytes

if TYPE_CHECKING:
    from rematplan._plan import Plan


@dataclass(frozen=True)
class RegionGroup:
    """Consecutive regions that do the same to repeated modules.

    Attributes:
      modules: paths of the modules that the regions follow; empty strings where they follow none.
      spans: first and last operation of each region.
      saved: names relative to the module.
      inner: regions inside each of them, folded alike.
      offloaded: those of the saved names that are kept in the host's memory.
      policy: of `jax.checkpoint_policies`, which decides in place of saved names; empty for none.
    """

    modules: tuple[str, ...]
    spans: tuple[tuple[str, str], ...]
    saved: tuple[str, ...]
    inner: tuple[RegionGroup, ...] = ()
    offloaded: tuple[str, ...] = ()
    policy: str = ""

    @property
    def label(self) -> str:
        """`blocks/0 .. blocks/5`, or the operations that a region goes from and to."""
        names = [module or f"{first} to {last}" for module, (first, last) in zip(self.modules, self.spans, strict=True)]
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def groups(regions: Iterable[Mapping[str, Any]]) -> tuple[RegionGroup, ...]:
    """Folds regions of a plan's JSON: neighbours with the same relative saves become one group."""
    folded: list[tuple[Any, list[Mapping[str, Any]]]] = []
    for region in regions:
        pattern = tuple(without_indices(text) for text in (region["module"], region["first"], region["last"]))
        # Regions that follow no module differ in where they start; what they save tells whether they do the same.
        inner = [(len(g.modules), g.saved, g.policy, g.inner) for g in groups(region.get("inner", ()))]
        key = (
            pattern if region["module"] else None,
            relative_names(region, "saved"),
            relative_names(region, "offloaded"),
            region.get("policy", ""),
            str(inner),
        )
        if folded and folded[-1][0] == key:
            folded[-1][1].append(region)
        else:
            folded.append((key, [region]))
    return tuple(
        RegionGroup(
            modules=tuple(region["module"] for region in same),
            spans=tuple((region["first"], region["last"]) for region in same),
            saved=key[1],
            offloaded=key[2],
            policy=key[3],
            inner=groups(same[0].get("inner", ())),
        )
        for key, same in folded
    )


def relative_names(region: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """Saved or offloaded names without the path of the region's module; without a module, list positions become `*`."""
    module = region["module"]
    if module:
        return tuple(name.removeprefix(f"{module}/") for name in region.get(kind, ()))
    return tuple(without_indices(name) for name in region.get(kind, ()))


def plan_code(plan: Plan) -> str:
    """The hand-written NNX code that a plan amounts to, where its regions follow modules."""
    return code_of(plan.to_json())


def code_of(document: Mapping[str, Any]) -> str:
    """The same from a plan file's document."""
    lines = [
        f"# {_heading(document)}",
        "import jax",
        "from flax import nnx",
        "from jax.ad_checkpoint import checkpoint_name",
        "",
    ]
    folded = groups(document["regions"])
    for number, group in enumerate(folded, start=1):
        lines += _group_code(group, f"region_{number}" if len(folded) > 1 else "region")
    for loop in document["loops"]:
        lines += [f"# The body of the loop {loop['operation']}{_which(loop)}, in the function that is scanned:"]
        for number, group in enumerate(groups(loop["regions"]), start=1):
            lines += _group_code(group, f"body_{number}")
    if _opens_own(document):
        lines.append("# Remove the model's own nnx.remat and jax.checkpoint: this plan stands in their place.")
    if not document["regions"] and not document["loops"]:
        lines.append("# No regions: this plan leaves the program as it is.")
    return "\n".join(lines).rstrip() + "\n"


def _group_code(group: RegionGroup, name: str) -> list[str]:
    lines: list[str] = []
    policy = f"policy=jax.checkpoint_policies.{group.policy}" if group.policy else "policy=None"
    if group.saved:
        policy = f"policy={name}_saved"
        names = "".join(f"    {saved!r},\n" for saved in group.saved)
        lines += [
            "# Name these values where the model computes them: x = checkpoint_name(x, NAME). A value that its own",
            "# derivative reads (exp, tanh, rsqrt, ...) must be named inside a custom_jvp, or it is recomputed anyway.",
            f"{name}_saved = jax.checkpoint_policies.save_only_these_names(\n{names})",
        ]
        if group.offloaded:
            lines[-1] = (
                f"{name}_saved = jax.checkpoint_policies.save_and_offload_only_these_names(\n"
                f"    names_which_can_be_saved={sorted(set(group.saved) - set(group.offloaded))!r},\n"
                f"    names_which_can_be_offloaded={sorted(group.offloaded)!r},\n"
                '    offload_src="device",\n    offload_dst="pinned_host",\n)'
            )
    if all(group.modules):
        lines += [
            f"@nnx.remat({policy})" if group.saved or group.policy else "@nnx.remat",
            f"def {name}(module, *inputs):",
            "    return module(*inputs)",
            f"# Call {name}(module, ...) in place of module(...) for: {', '.join(group.modules)}",
        ]
    else:
        spans = "; ".join(f"{first} to {last}" for first, last in group.spans)
        lines += [
            f"# This region does not follow a module's call: it goes from {spans}.",
            f"# By hand, put these operations in a function of their inputs, wrapped: jax.checkpoint(f, {policy});",
            "# rematplan.remat(loss_fn, plan=...) does it without touching the model.",
        ]
    for number, inner in enumerate(group.inner, start=1):
        lines.append(f"# Inside of {name}, in regions of their own:")
        lines += _group_code(inner, f"{name}_{number}")
    return [*lines, ""]


def plan_text(plan: Plan) -> str:
    """A plan as a terminal shows it: figures beside hand-written configurations, then regions and saved names."""
    from rematplan.report.terminal import render_text

    return render_text("plan", record_of(plan.to_json()))


# plan files leave out timelines, which are as long as the programs
_NO_TIMELINE = {"position": [], "live_bytes": [], "backward_starts": None, "at_peak": [], "alive": []}


def record_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the verb `plan` from a plan file's document."""
    return {
        "plan": dict(document),
        "predicted": dict(document["predicted"]),
        "measured": _with_timeline(document["measured"]),
        "baselines": [_with_timeline(row) for row in document["baselines"]],
        "bound": {"seconds": None, **document["bound"]},
        "budget_bytes": document["budget_bytes"],
        "status": document["status"],
        "notes": list(document["notes"]),
        "findings": list(document.get("findings", ())),
        "model": None,
    }


def _with_timeline(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"timeline": _NO_TIMELINE, **figures} if figures else {}


def region_lines(document: Mapping[str, Any]) -> Sequence[str]:
    """What a plan does, one line a group of regions."""
    lines = [_line(group) for group in groups(document["regions"])]
    for loop in document["loops"]:
        body = f"in the body of {loop['operation']}{_which(loop)}: "
        lines += [body + _line(group) for group in groups(loop["regions"])]
    lines = lines or ["no regions: the program stays as it is"]
    return ["the model's own checkpoint regions are opened", *lines] if _opens_own(document) else lines


def _which(loop: Mapping[str, Any]) -> str:
    """Which iterations of a loop a part of the plan is about."""
    count, chunk = loop.get("iterations"), loop.get("chunk", 0)
    text = f", {count} iterations" if count is not None else ""
    return text + (f", in chunks of {chunk} under one checkpoint each" if chunk else "")


def _opens_own(document: Mapping[str, Any]) -> bool:
    return document.get("own_regions") == "replace"


def _line(group: RegionGroup) -> str:
    count = f"{len(group.modules)} regions" if len(group.modules) > 1 else "1 region"
    each = " each" if len(group.modules) > 1 else ""
    on_host = set(group.offloaded)
    names = [f"{name} (on the host)" if name in on_host else name for name in group.saved]
    saved = ", ".join(names) if names else f"what {group.policy} saves" if group.policy else "nothing"
    inside = f"; inside{each}: {', '.join(map(_line, group.inner))}" if group.inner else ""
    return f"{count} {group.label},{each} saving {saved}{inside}"


def _heading(document: Mapping[str, Any]) -> str:
    budget = document["budget_bytes"]
    within = f" within {format_bytes(budget)}" if budget else ""
    return f"Plan for {document['workload'] or 'a function'} on {document['target'] or 'any target'}{within}"
