"""Programs through real compilers: TPU, GPU and CPU in children, and this machine's device."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import rematplan as rp
from rematplan import workloads
from rematplan.errors import CompilerError, InputError
from rematplan.target import compiler
from rematplan.target.cache import Cache
from rematplan.target.compiler import Method, Options, Program, Rematerialization, lower, measure, measure_many
from rematplan.target.cycles import CycleTable
from rematplan.target.measurement import Source
from rematplan.target.target import Kind, resolve
from rematplan.target.workers import child_environment

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
NO_CACHE = Cache(None)
V5E = resolve("tpu-v5e")


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def two_layers(w1, w2, x):
    """Gradients of a product of 70 MiB of arguments, 6 of outputs and a hidden array of 64."""

    def loss(w1, w2):
        with jax.named_scope("~blocks/0~"):
            hidden = jax.nn.relu(x @ w1)
        return (hidden @ w2).sum()

    return jax.grad(loss, argnums=(0, 1))(w1, w2)


TWO_LAYERS = shapes((1024, 1024), (1024, 512), (16384, 1024))


def layers(remat, count=6, width=256, batch=2048):
    block = lambda w, x: jax.nn.gelu(x @ w)
    block = jax.checkpoint(block) if remat else block

    def step(*leaves):
        *ws, x = leaves

        def loss(ws):
            y = x
            for w in ws:
                y = block(w, y)
            return (y**2).sum()

        return jax.grad(loss)(ws)

    return step, shapes(*[(width, width)] * count, (batch, width))


@pytest.fixture(scope="module")
def program():
    return lower(two_layers, TWO_LAYERS, target=V5E)


@pytest.fixture(scope="module")
def full(program):
    return measure(program, target=V5E)


def test_the_parent_only_lowers(program):
    assert program.argument_bytes == 70 * MIB
    assert program.output_bytes == 6 * MIB
    assert "~blocks/0~" in program.stablehlo
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        assert "libtpu.so" not in maps.read()


def test_probe(program):
    probe = measure(program, target=V5E, method=Method.PROBE)
    assert probe.source is Source.PROBED
    assert probe.peak_bytes == pytest.approx(140 * MIB, rel=1e-4)
    assert probe.peak_bytes < probe.required_bytes < 1.05 * probe.peak_bytes
    assert probe.cycles is None
    assert probe.sources["seconds"] == "roofline"
    # the gradient of a sum needs neither the second product nor one of its transposes
    assert probe.flops == pytest.approx(2 * 16384 * 1024 * (1024 + 512 + 1024), rel=0.02)
    assert probe.timeline.backward_starts
    (hidden,) = [b for b in probe.timeline.at_peak if b.bytes == 64 * MIB and b.kind == "temporary"]
    assert hidden.module == "blocks/0"
    assert hidden.location.startswith("test_compiler.py:")
    assert probe.fits_limit is None
    assert measure(program, target=V5E, method=Method.PROBE, limit_bytes=100 * MIB).fits_limit is False


def test_full_compile(program, full):
    probe = measure(program, target=V5E, method=Method.PROBE)
    assert full.source is Source.COMPILED
    assert full.sources["seconds"] == "cycles"
    assert full.cycles is not None
    assert full.seconds == full.cycles / 1.5e9
    assert full.seconds > probe.seconds > 0.5 * full.seconds  # a roofline is a lower bound, and not a wild one
    assert full.required_bytes == pytest.approx(probe.required_bytes, rel=0.01)
    assert full.peak_bytes == pytest.approx(probe.peak_bytes, rel=1e-3)
    assert full.peak_bytes < full.required_bytes


def test_a_probe_predicts_the_cycles_of_what_was_learned(program, full):
    table = CycleTable(V5E.chip.clock_hz)
    table.add(full.costs)
    prediction = table.predict(measure(program, target=V5E, method=Method.PROBE).costs)
    assert prediction.cycles == full.cycles
    assert prediction.known_fraction == 1.0


def test_required_bytes_is_the_least_limit(program, full):
    enough = -(-full.required_bytes // MIB) * MIB
    accepted = measure(program, target=V5E, limit_bytes=enough)
    assert accepted.fits_limit is True
    assert accepted.required_bytes <= enough
    refused = measure(program, target=V5E, limit_bytes=enough - 2 * MIB)  # code bytes are estimated
    assert refused.fits_limit is False
    assert refused.required_bytes > enough - 2 * MIB
    assert "exceed" in refused.warnings[0].lower()
    assert measure(program, target=V5E, limit_bytes=50 * MIB).fits_limit is False


def test_donated_arguments_are_reused():
    def update(w, x):
        return w - jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    sizes = shapes((4096, 2048), (512, 4096))
    kept, donated = (
        measure(lower(update, sizes, donated=d, target=V5E), target=V5E, method=Method.PROBE) for d in ((), (0,))
    )
    assert kept.peak_bytes - donated.peak_bytes == 32 * MIB


@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5p", "tpu-v6e", "tpu-v7x", "tpu-v5e:4x4"])
def test_every_tpu_compiles(name):
    target = resolve(name)
    probe = measure(lower(two_layers, TWO_LAYERS, target=target), target=target, method=Method.PROBE)
    # the chips differ in what their compilers keep in VMEM
    assert 75 * MIB < probe.peak_bytes < 160 * MIB
    assert 0 < probe.seconds < 0.01


def test_a_topology_that_the_compiler_refuses_is_wrong_input():
    target = resolve("tpu-v5e:3x3")
    program = lower(lambda x: x + 1, shapes((8, 128)), target=target)
    with pytest.raises(InputError, match=r"^target tpu-v5e:3x3: .*not divisible"):
        measure(program, target=target, cache=NO_CACHE)


@pytest.mark.slow
def test_a_probe_of_a_loop_reads_what_its_full_compile_does():
    """The first is read from the compiler's dump, the second from the executable; versions of jaxlib write them differently."""

    def loss(ws, x):
        def layer(h, w):
            h = jnp.tanh(h @ w)
            return h / h.std(-1, keepdims=True), h.mean()

        h, means = jax.lax.scan(layer, x, ws)
        return (h**2).sum() + means.sum() + jax.lax.top_k(h, 4)[0].sum()

    work = rp.Workload(loss, *shapes((8, 1024, 1024), (16384, 1024)))
    probe, full = (rp.measure(work, target=V5E, method=method) for method in (Method.PROBE, Method.COMPILE))
    assert probe.peak_bytes == pytest.approx(full.peak_bytes, rel=0.01)
    assert probe.bytes_accessed == pytest.approx(full.bytes_accessed, rel=0.05)
    assert probe.flops == pytest.approx(full.flops, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("method", [Method.PROBE, Method.COMPILE])
def test_both_cores_of_every_chip_run_a_program(method):
    """`tpu-v7x:2x2x1` is four chips of two devices."""

    def loss(w, x):
        return ((x @ w) ** 2).mean()

    work = rp.Workload(loss, *shapes((1024, 512), (4096, 1024)), mesh={"data": 8}, specs=[None, P("data")])
    one, all_ = (rp.measure(work, target=name, method=method) for name in ("tpu-v7x:1x1x4", "tpu-v7x:2x2x1"))
    assert one.devices == all_.devices == 8
    assert all_.argument_bytes == (1024 * 512 + 4096 // 8 * 1024) * 4
    assert all_.flops == pytest.approx(2 * 2 * 4096 // 8 * 1024 * 512, rel=0.02)
    # of the gradient, which SparseCores send, and of the loss
    assert sorted((use.kind, use.bytes) for use in all_.collectives) == [
        ("all-reduce", 4),
        ("all-reduce", 4 * 1024 * 512),
    ]


@pytest.mark.parametrize(
    "name", ["gpu-a100", "gpu-h100", "gpu-h200", "gpu-b200", "gpu-rtx4090", "gpu-l4", "gpu-h100:8"]
)
def test_every_gpu_compiles(name):
    target = resolve(name)
    step, sizes = layers(remat=False)
    measured = measure(lower(step, sizes, target=target), target=target)
    assert measured.source is Source.COMPILED
    # arguments 3.5, outputs 1.5, and 6 layers whose input and preactivation (2 MiB each) are kept
    assert 18 * MIB < measured.required_bytes < 40 * MIB
    assert measured.peak_bytes <= measured.required_bytes
    assert measured.flops == pytest.approx(2 * 2048 * 256 * 256 * (6 + 6 + 5), rel=0.05)
    assert measured.sources["seconds"] == "roofline"


@pytest.mark.parametrize("name", ["gpu-h100", "cpu"])
def test_regions_save_memory_and_cost_operations(name):
    target = resolve(name)
    plain, regions = (measure(lower(*layers(remat), target=target), target=target) for remat in (False, True))
    assert regions.temporary_bytes < 0.75 * plain.temporary_bytes
    assert regions.flops > 1.2 * plain.flops


def test_a_faster_card_is_faster():
    step, sizes = layers(remat=False)
    seconds = [measure(lower(step, sizes, target=t), target=t).seconds for t in map(resolve, ("gpu-l4", "gpu-h100"))]
    assert seconds[0] > 3 * seconds[1]


def test_a_budget_is_the_limit_of_the_compiler_where_it_has_one():
    """On TPU a measurement under a budget is of what the compiler makes of so little memory; elsewhere figures stay."""
    work = workloads.mlp(blocks=4, features=256, batch=4096)
    for target in ("tpu-v5e", "gpu-h100"):
        free = rp.measure(work, target=target)
        held = rp.measure(work, target=target, budget=free.required_bytes + MIB)
        assert free.fits_limit is None and held.fits_limit is True
        assert held.required_bytes <= held.limit_bytes == free.required_bytes + MIB
        assert held.cached == (target == "gpu-h100")
        assert rp.measure(work, target=target, budget=free.required_bytes // 2).fits_limit is False


def test_limits_are_compared_where_the_compiler_has_none():
    target = resolve("cpu")
    program = lower(*layers(remat=False), target=target)
    required = measure(program, target=target).required_bytes
    assert measure(program, target=target, limit_bytes=required).fits_limit is True
    assert measure(program, target=target, limit_bytes=required - 1).fits_limit is False


def test_what_the_compiler_refuses_is_an_error_and_costs_nothing_else():
    target = resolve("cpu")
    program = lower(*layers(remat=False), target=target)
    broken = Program("module { broken", 1, 1, name="mine")
    with pytest.raises(CompilerError, match="cpu: the compiler refused mine"):
        measure_many([(broken, Options()), (program, Options())], target, cache=NO_CACHE)
    with pytest.raises(CompilerError, match="no_such_option"):
        measure(program, target=target, compiler_options={"no_such_option": 1}, cache=NO_CACHE)
    assert measure(program, target=target, cache=NO_CACHE).required_bytes > 0


def test_many_in_order_and_from_the_cache(tmp_path):
    target, cache, done = resolve("cpu"), Cache(tmp_path), []
    programs = [lower(*layers(remat, count), target=target) for count in (2, 3) for remat in (False, True)]
    tasks = [(program, Options()) for program in programs]
    first = measure_many(tasks, target, cache=cache, on_done=lambda index, m: done.append((index, m)))
    assert sorted(done, key=lambda pair: pair[0]) == list(enumerate(first))
    assert not any(m.cached for m in first)
    again = measure_many(tasks, target, cache=cache)
    assert [dataclasses.replace(m, cached=False) for m in again] == first
    assert all(m.cached for m in again)


def test_the_key_holds_everything_that_the_result_depends_on(monkeypatch, program):
    def key(program=program, target=V5E, **options):
        return compiler._key(program, Options(**options), target)

    base = key()
    assert key() == base
    others = [
        key(method=Method.PROBE),
        key(limit_bytes=1),
        key(rematerialization=Rematerialization.ON),
        key(compiler_options={"xla_a": 1}),
        key(target=resolve("tpu-v5p")),
        key(target=resolve("tpu-v5e:4x4")),
        key(program=dataclasses.replace(program, stablehlo=program.stablehlo + " ")),
    ]
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1")
    others.append(key())
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_c=1")
    others.append(key())
    assert len({base, *others}) == 1 + len(others)


def test_local_runs():
    target = resolve("local")
    step, sizes = layers(remat=True, count=2, width=128, batch=256)
    measured = measure(lower(step, sizes, donated=(0,), target=target), target=target)
    assert measured.source is Source.RUN
    assert measured.sources["seconds"] == "run"
    assert 0 < measured.seconds < 10
    assert measured.alias_bytes == 128 * 128 * 4
    assert measured.argument_bytes == (2 * 128 * 128 + 256 * 128) * 4


def test_local_uses_real_arrays():
    target = resolve("local")
    seen = []

    def step(x, n):
        jax.debug.callback(seen.append, x.sum() + n)
        return x

    measure(lower(step, [jnp.full((8,), 2.0), jnp.int32(3)], target=target), target=target)
    jax.effects_barrier()
    assert {float(s) for s in seen} == {19.0}


def test_local_needs_the_function():
    with pytest.raises(InputError, match="lower it for local"):
        measure(Program("", 1, 1), target=resolve("local"))


INTERRUPTED = """
import sys
from tests.target.test_compiler import TWO_LAYERS, V5E, NO_CACHE, Options, lower, measure_many, two_layers
from rematplan.target.executors import using
import rematplan.target.workers as workers
start = workers.Child.__init__
def noisy(self, *given):
    start(self, *given)
    print(self.pid, flush=True)
workers.Child.__init__ = noisy
program = lower(two_layers, TWO_LAYERS, target=V5E)
try:
    with using("local:2"):
        measure_many([(program, Options()) for _ in range(6)], V5E, cache=NO_CACHE)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_interrupting_ends_the_children():
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        children = [int(parent.stdout.readline()) for _ in range(2)]
        time.sleep(1)
        parent.send_signal(signal.SIGINT)
        assert parent.wait(20) == 130
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.slow
def test_a_product_without_tiles_is_compiled_with_other_kernels(tmp_path):
    """64 x 196 rows, as in a vision transformer: refused by the GPU compiler of jaxlib 0.10.2 as it comes."""
    work = workloads.vit(blocks=1, batch=32)
    step = work.step(None)
    program = lower(step.function, step.leaves, target=resolve("gpu-h100"))
    measured = measure(program, target=resolve("gpu-h100"), cache=Cache(tmp_path))
    assert measured.required_bytes > measured.argument_bytes + measured.output_bytes
    assert not measured.warnings or "without Triton" in measured.warnings[0]


def picked_from_large_logits(w, x, labels):
    """A loss whose gather from 256 MiB of logits the compiler hands to SparseCores, where the chip has them."""

    def loss(w):
        log_probabilities = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1).mean()

    return jax.value_and_grad(loss)(w)


PICKED = [*shapes((512, 8192), (8192, 512)), jax.ShapeDtypeStruct((8192,), jnp.int32)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tpu-v5p", "tpu-v6e", "tpu-v7x"])
def test_programs_with_gathers_on_sparse_cores_are_measured(name):
    """jaxlib 0.10.2 cannot read them back from libtpu 0.0.52; the compiler's dump has them.

    They need what is stated: its memory report counts the 256 MiB that SparseCores read once more.
    """
    target = resolve(name)
    program = lower(picked_from_large_logits, PICKED, target=target)
    stated = measure(program, target=target, method=Method.PROBE).required_bytes
    assert measure(program, target=target, limit_bytes=int(0.98 * stated)).fits_limit is False
    measured = measure(program, target=target, cache=NO_CACHE, limit_bytes=int(1.01 * stated))
    assert measured.fits_limit is True
    assert measured.required_bytes == pytest.approx(stated, rel=0.01)
    assert measured.peak_bytes <= measured.required_bytes
    assert measured.cycles is not None and measured.seconds is not None
    assert 0 < measured.seconds < 0.02  # libtpu estimates 2**63 - 1 cycles for what it does not price
    assert measured.flops == pytest.approx(2 * 2 * 8192 * 512 * 8192, rel=0.1)
    assert measured.timeline


READ_BACK_HERE = """
import jax
from jax.experimental import topologies
from rematplan.target.hlo import parse
from rematplan.target.local import compiled_text
from tests.target.test_compiler import PICKED, picked_from_large_logits

devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
sharding = jax.sharding.SingleDeviceSharding(devices[0])
leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in PICKED]
lowered = jax.jit(picked_from_large_logits).trace(*leaves).lower(lowering_platforms=("tpu",))
print(len(parse(compiled_text(lowered, lowered.compile(), {})).computations))
"""


@pytest.mark.slow
def test_and_so_is_one_compiled_in_this_process():
    """What the target `local` does on such a chip, up to running it."""
    run = subprocess.run(
        [sys.executable, "-c", READ_BACK_HERE],
        env={**os.environ, **child_environment(Kind.TPU)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) > 1
