"""Every private piece of JAX that rematplan uses, in one place, each with the reason.

`tests/test_jax_private.py` fails loudly when JAX moves one of them.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import flax
import jax
import numpy as np
import optax
from jax._src import (
    config,  # what a trace depends on besides its arguments (0.10.2)
    source_info_util,  # no public way from an equation to its user frame (0.10.2)
)
from jax._src.ad_checkpoint import name_p  # what policies are asked about has no public name (0.10.2)
from jax._src.interpreters import pxla  # a lowered program is kept under itself (0.12.0)
from jax._src.named_sharding import UnspecifiedValue  # jit's "no sharding given" marker has no public test (0.10.2)

# frames of these packages are not the user's
_LIBRARIES = (
    *(os.path.dirname(os.path.abspath(p.__file__)) + os.sep for p in (jax, flax, optax) if p.__file__),
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
)
_OWN_MODELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "workloads") + os.sep

# Programs do not say where in rematplan they were put together: their text, and with it the key of every cached
# measurement, is the same in each of its versions. There is no public way to say which files are a user's (0.10.2).
source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)) + os.sep)
source_info_util.register_inclusion(_OWN_MODELS)


def is_unspecified(sharding: Any) -> bool:
    """Whether a jit parameter's sharding was left open."""
    return sharding is None or isinstance(sharding, UnspecifiedValue)


def trace_context() -> Hashable:
    """Everything set around a call that its trace depends on: precision, promotion, meshes. Not public (0.10.2)."""
    return config.trace_context()


def release(traced: Any) -> None:
    """Let JAX forget a program that was lowered with `keep_unused`, and with it the arrays that it captured.

    JAX 0.12.0 caches what is left of a program without unused arguments, weakly by the program; with `keep_unused` that is
    the program itself, which so is never freed. A later JAX without this cache needs nothing done.
    """
    evict = getattr(getattr(pxla, "_dce_jaxpr", None), "evict_weakref", None)
    if evict is not None:
        evict(traced.jaxpr)


def user_location(source_info: Any) -> str:
    """`file.py:12 (function)` of the innermost frame outside JAX, Flax and rematplan; empty if there is none."""
    fallback = ""
    for frame in source_info_util.user_frames(source_info.traceback):
        text = f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name.split('.')[-1]})"
        fallback = fallback or text
        if frame.file_name.startswith(_OWN_MODELS) or not frame.file_name.startswith(_LIBRARIES):
            return text
    return fallback


def checkpointing(eqn: Any) -> tuple[str, Any]:
    """What an equation of JAX's new remat is: ("name", None), ("region", closed jaxpr) or ("", None).

    Under JAX_REMAT3=1 names and regions are objects in one primitive's parameter; their classes are private (0.10.2).
    """
    held = eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None
    kind = {"CheckpointName": "name", "RematTraced": "region"}.get(type(held).__name__, "")
    return kind, held.params["jaxpr"] if held is not None and kind == "region" else None


def region_parameters(eqn: Any) -> tuple[Any, bool]:
    """The policy of a checkpoint region and whether it hinders merging, as the new remat always does (0.10.2)."""
    if eqn.primitive.name == "call_hi_primitive":
        held = eqn.params["_prim"].params
        return held.get("policy"), bool(held.get("prevent_cse", True))
    return eqn.params.get("policy"), bool(eqn.params.get("prevent_cse", True))


def given_name(eqn: Any) -> str:
    """The name that `checkpoint_name` gives with this equation; empty for any other."""
    if eqn.primitive.name == "name":
        return str(eqn.params["name"])
    return str(eqn.params["_prim"].params["name"]) if checkpointing(eqn)[0] == "name" else ""


def kept_by_new_remat(policy: Any) -> bool:
    """Whether JAX's new remat follows a policy.

    In 0.10.2 those are data of private classes, and others are dropped silently; in 0.12 they are functions, and all are
    followed.
    """
    if inspect.isfunction(jax.checkpoint_policies.save_only_these_names("")):
        return True
    known = ("SaveOnlyTheseNames", "SaveAnyNamesButThese", "DotsSaveable")
    return policy in (None, jax.checkpoint_policies.nothing_saveable) or type(policy).__name__ in known


def answer_of(policy: Any, eqn: Any) -> str:
    """What a policy says of the results of an equation: "save", "offload" or "recompute"."""
    name = given_name(eqn)
    avals = [v.aval for v in eqn.invars]
    # policies know names by the primitive that gives them, which the new remat does not use
    answer = policy(name_p, *avals, name=name) if name else policy(eqn.primitive, *avals, **eqn.params)
    kind = type(answer).__name__  # SaveableType, Offloadable, RecomputeType: private (0.10.2)
    if kind == "Offloadable":
        return "offload"
    return "save" if answer is True or kind == "SaveableType" else "recompute"


def new_remat() -> bool:
    """Whether JAX's new implementation of remat is switched on (`jax_remat3`, JAX_REMAT3=1); it has no public test (0.12)."""
    return bool(getattr(jax.config, "jax_remat3", False))


def itemsize(dtype: Any) -> int:
    """Bytes of one element, PRNG keys included."""
    return int(getattr(dtype, "itemsize", 4))


def compile_stablehlo(text: str, devices: list[Any], *, options: dict[str, Any], load: bool = False) -> Any:
    """Compile StableHLO text for devices, which may be compile-only ones of a topology. Returns XLA's executable.

    The public path to an executable runs through a function (`jax.jit`), which the compile child does not have: it gets
    text. These are the steps that `Lowered.compile` takes (0.10.2), JAX's persistent cache left out, because it cannot
    read back what was compiled for absent devices.

    Args:
      options: compiler options, as `Lowered.compile(compiler_options=)` takes them.
      load: the devices are really there, and the program is to be loaded onto them.
    """
    from jax._src import compiler, dispatch  # compile options as JAX sets them, and when it tuples arguments
    from jax._src.interpreters import mlir  # a context with JAX's dialects
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]  # device lists
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]  # parses the text

    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        backend = devices[0].client
        compile_options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.array([devices], dtype=object),
            env_options_overrides=dict(options),
            detailed_logging=False,
            backend=backend,
        )
        main: Any = next(op for op in module.body if str(getattr(op, "sym_name", "")) == '"main"')
        argument_count = len(main.type.inputs)
        compile_options.parameter_is_tupled_arguments = dispatch.should_tuple_args(argument_count, devices[0].platform)
        device_list = xla_client.DeviceList(tuple(devices))
        compile_ = backend.compile_and_load if load else backend.compile
        return compile_(module, executable_devices=device_list, compile_options=compile_options)


def scan_sizes(params: Any) -> tuple[int, int]:
    """How many leading inputs of a `scan` body are constants, and how many carries.

    Jax 0.10 has them as numbers, jax 0.12 as the lengths of a tree of the inputs.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carries, _ = params["ft_in"].unpack()
    return len(constants), len(carries)


def propagated_specs(text: str) -> list[jax.sharding.PartitionSpec]:
    """How the results of a StableHLO program lie after Shardy's propagation, the partitioner's own first pass.

    Only whole compiles run it publicly; jaxlib's MLIR has the pass (0.10.2). A sub-axis (`"data":(1)2`) counts as its axis.
    """
    from jax._src.interpreters import mlir  # a context with JAX's dialects
    from jax._src.lib.mlir import ir, passmanager  # pyright: ignore[reportPrivateImportUsage]

    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(module.operation)
        main: Any = next(op for op in module.body if str(getattr(op, "sym_name", "")) == '"main"')
        attributes = main.attributes["res_attrs"]  # there is one for each result: its name
        return [_spec_of(str(a["sdy.sharding"]) if "sdy.sharding" in a else "") for a in map(ir.DictAttr, attributes)]


def _spec_of(sharding: str) -> jax.sharding.PartitionSpec:
    """`#sdy.sharding<@mesh, [{"data"}, {"model", ?}]>` as a partition spec."""
    listed = re.search(r"\[(.*?)\](?:, replicated|, unreduced|>)", sharding)
    dimensions = re.findall(r"\{([^}]*)\}", listed[1]) if listed else []
    axes = [tuple(re.findall(r'"([^"]+)"', each)) for each in dimensions]
    return jax.sharding.PartitionSpec(*(names or None for names in axes))


@dataclass(frozen=True)
class Processes:
    """The processes of a multi-controller run and the key-value store that they share.

    Attributes:
      index: of this process.
      count: of all of them.
      client: of the distributed runtime; its store has no public name (0.10.2).
    """

    index: int
    count: int
    client: Any

    def set(self, key: str, value: bytes) -> None:
        """Writes a value once, for all processes."""
        self.client.key_value_set_bytes(key, value)

    def get(self, key: str, *, seconds: float) -> bytes | None:
        """A value, as soon as a process has written it; None if none has within so many seconds.

        Raises:
          RuntimeError: the runtime is gone.
        """
        try:
            return self.client.blocking_key_value_get_bytes(key, int(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None


def processes() -> Processes | None:
    """The processes that `jax.distributed.initialize` joined; None if this is the only one.

    `jax.process_count()` would say so too, but it opens the devices, which planning does not need.
    """
    from jax._src.distributed import global_state  # the runtime's client has no public name (0.10.2)

    if global_state.client is None or global_state.num_processes in (None, 1):
        return None
    return Processes(int(global_state.process_id), int(global_state.num_processes), global_state.client)
