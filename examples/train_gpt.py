"""A train script with what real ones have, to which a plan is one changed line.

    python examples/train_gpt.py                                                # train
    rematplan plan examples/train_gpt.py:workload --target tpu-v5e --budget 10GiB -o plan.json
    python examples/train_gpt.py --plan plan.json                               # train in that memory: the same losses

A small GPT over bytes: batches from Grain, bfloat16 computation, gradients accumulated over microbatches, Adam with warmup and
cosine decay, an exponential moving average of the parameters that is evaluated, and Orbax checkpoints of all of it, the place
in the data included, from which an interrupted run goes on. The text is generated here, so nothing is read from a network.

Needs `pip install 'rematplan[examples]'`. Shapes in comments: A microbatches, B examples of one, T length, D features, V bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import rematplan as rp

V, SEED = 128, 0
WORDS = "the a small old river stone bird wind sees finds carries leaves slowly often under over near".split()
Loss = Callable[..., jax.Array]


@dataclass(frozen=True)
class Config:
    """Sizes; those of `main` are for a laptop's CPU."""

    blocks: int = 2
    features: int = 32
    heads: int = 2
    length: int = 32
    batch: int = 4  # of a microbatch
    microbatches: int = 2
    steps: int = 60  # of which the learning rate's schedule is made
    dtype: str = "bfloat16"


# --------------------------------------------------------------------------------------------------------------- model


class Block(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, dtype = config.features, jnp.dtype(config.dtype)
        self.norm1 = nnx.LayerNorm(D, dtype=dtype, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(config.heads, D, dtype=dtype, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(D, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(D, 4 * D, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * D, D, dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.drop(self.attn(self.norm1(x), mask=mask))  # (B, T, D)
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm2(x)))))


class GPT(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.embed = nnx.Embed(V, config.features, dtype=dtype, rngs=rngs)
        self.position = nnx.Embed(config.length, config.features, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.blocks)])
        self.norm = nnx.LayerNorm(config.features, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))  # (B, T, D)
        mask = nnx.make_causal_mask(tokens)  # (B, 1, T, T)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))  # (B, T, V)


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next byte; tokens (B, T + 1)."""
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# ---------------------------------------------------------------------------------------------------------------- step


def start(config: Config) -> tuple[GPT, nnx.Optimizer[GPT], GPT]:
    """The model, its optimizer, and the average of its parameters, in a model that evaluates."""
    model, average = (GPT(config, rngs=nnx.Rngs(SEED)) for _ in range(2))  # equal, in buffers of their own
    average.eval()
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, config.steps // 10, config.steps)
    return model, nnx.Optimizer(model, optax.adam(rate, eps=1e-6), wrt=nnx.Param), average


def make_step(loss_fn: Loss) -> Callable[..., jax.Array]:
    @nnx.jit(donate_argnames=("model", "optimizer", "average"))
    def step(model: GPT, optimizer: nnx.Optimizer[GPT], average: GPT, tokens: jax.Array) -> jax.Array:
        """One update from microbatches (A, B, T + 1); their mean loss."""

        def accumulate(carry: tuple[Any, GPT], microbatch: jax.Array) -> tuple[tuple[Any, GPT], jax.Array]:
            total, model = carry
            loss, gradients = nnx.value_and_grad(loss_fn)(model, microbatch)
            return (jax.tree.map(jnp.add, total, gradients), model), loss

        zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        over_microbatches = nnx.scan(accumulate, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        (total, _), losses = over_microbatches((zeros, model), tokens)
        optimizer.update(model, jax.tree.map(lambda gradient: gradient / len(tokens), total))
        slow = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, nnx.state(average, nnx.Param), nnx.state(model, nnx.Param))
        nnx.update(average, slow)
        return losses.mean()

    return step


evaluate = nnx.jit(loss_fn)


def workload(
    batch: int = 32,
    microbatches: int = 4,
    blocks: int = 12,
    features: int = 768,
    length: int = 1024,
    dtype: str = "bfloat16",
) -> rp.Workload:
    """The step with what it is called with, for `rematplan plan`: shapes alone, so any size will do."""
    config = Config(blocks, features, max(features // 64, 2), length, batch, microbatches, dtype=dtype)
    tokens = jax.ShapeDtypeStruct((microbatches, batch, length + 1), jnp.int32)
    return rp.Workload(loss_fn, *nnx.eval_shape(lambda: start(config)), tokens, step=make_step, name="train_gpt")


# ---------------------------------------------------------------------------------------------------------------- data


def text(sentences: int, seed: int) -> np.ndarray:
    """Bytes of sentences of words, the first ones the most frequent."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(WORDS) + 1)
    lines = (" ".join(rng.choice(WORDS, rng.integers(4, 9), p=weights / weights.sum())) for _ in range(sentences))
    return np.frombuffer(". ".join(lines).encode("ascii"), np.uint8).astype(np.int32)


class Windows:
    """Stretches of a text, as Grain reads a source: by number."""

    def __init__(self, tokens: np.ndarray, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[index * self.length :][: self.length]


def batches(config: Config, seed: int) -> grain.DatasetIterator[np.ndarray]:
    """Without end, (A * B, T + 1) each; the iterator's place can be saved."""
    source = Windows(text(2000, seed), config.length + 1)
    shuffled = grain.MapDataset.source(source).shuffle(seed=seed).repeat()
    return iter(shuffled.batch(config.microbatches * config.batch, drop_remainder=True).to_iter_dataset())


# ------------------------------------------------------------------------------------------------------------ training


class Checkpoints:
    """The newest checkpoints of a run: arrays of the modules, and the place in the data."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, modules: Any, data: Any) -> None:
        state = ocp.args.StandardSave(nnx.state(modules))
        self.manager.save(step, args=ocp.args.Composite(state=state, data=grain.checkpoint.CheckpointSave(data)))
        self.manager.wait_until_finished()  # the next step donates what is being written

    def restore(self, modules: Any, data: Any) -> int:
        """Puts back what the newest checkpoint has, if there is one; how many steps were done."""
        step = self.manager.latest_step()
        if step is None:
            return 0
        state = ocp.args.StandardRestore(nnx.state(modules))
        place = grain.checkpoint.CheckpointRestore(data)
        found = self.manager.restore(step, args=ocp.args.Composite(state=state, data=place))
        nnx.update(modules, found["state"])
        return step


def train(config: Config, *, plan: Path | None, checkpoints: Path | None, every: int, until: int) -> Iterator[str]:
    """Trains, from the newest checkpoint on, and says what became of it, a line for each step."""
    train_loss: Loss = loss_fn if plan is None else rp.remat(loss_fn, plan=plan)  # the one line that a plan changes
    step = make_step(train_loss)
    modules = model, optimizer, average = start(config)
    data, held_out = batches(config, seed=1), jnp.asarray(next(batches(config, seed=2)))
    kept = None if checkpoints is None else Checkpoints(checkpoints)
    done = 0 if kept is None else kept.restore(modules, data)
    for number in range(done + 1, until + 1):
        tokens = next(data).reshape(config.microbatches, config.batch, -1)
        yield f"step {number} loss {float(step(model, optimizer, average, tokens)):.9g}"
        if number % every == 0:
            yield f"step {number} evaluation {float(evaluate(average, held_out)):.9g}"
            if kept is not None:
                kept.save(number, modules, data)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT.")
    parser.add_argument("--plan", type=Path, help="what `rematplan plan` wrote")
    parser.add_argument("--checkpoints", type=Path, help="a folder; a run that was interrupted goes on from there")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations and checkpoints")
    parser.add_argument("--steps", type=int, default=Config.steps, help="of the whole training")
    parser.add_argument("--until", type=int, help="stop after this step, as if interrupted")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=Config.dtype, help="of the computation")
    given = parser.parse_args()
    until = given.steps if given.until is None else given.until
    config = Config(steps=given.steps, dtype=given.dtype)
    for line in train(config, plan=given.plan, checkpoints=given.checkpoints, every=given.every, until=until):
        print(line, flush=True)


if __name__ == "__main__":
    main()
