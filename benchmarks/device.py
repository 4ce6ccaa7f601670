"""What compilers say against what a device does: memory and time of the built-in models, compiled for a chip that is not
there and run on the device that is.

    python -m benchmarks.device --target gpu-h200                     # on a machine with that GPU: a few minutes
    python -m benchmarks.device --target cpu --workloads mlp          # anywhere; CPUs keep no count of memory

`needs` and `peak` are the compile-only target's, `allocator` the most that the device's allocator had in use (arguments
included) while the step ran. `modelled` seconds are the target's, `measured` the median of runs. Every configuration runs in
a process of its own, because an allocator's peak cannot be reset. One line a configuration: no remat, per block, and the
plan at a budget of `--share` of what no remat needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import rematplan as rp
from rematplan import workloads
from rematplan.errors import RematplanError
from rematplan.target.measurement import Measurement

MIB = 1 << 20
# Sizes that fill a good part of a gigabyte and compile in seconds.
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"blocks": 8, "features": 1024, "batch": 8192},
    "gpt": {"blocks": 4},
    "scan_gpt": {"blocks": 8},
    "vit": {"blocks": 2},
    "resnet": {"blocks": (1, 1), "image": 64, "batch": 256},
    "unet": {"blocks": 1, "levels": 2, "image": 32, "batch": 128},
}
_ENOUGH_SECONDS = 360.0  # no further workload is begun after this
# What the user set, before `main` keeps planning off the device.
chose_platform = os.environ.get("JAX_PLATFORMS")


def here(workload: str, sizes: dict[str, Any], *, policy: str | None, plan: str | None) -> dict[str, Any]:
    """One configuration on the device of this machine, in this process."""
    import jax

    device = jax.devices()[0]
    measured = rp.measure(getattr(workloads, workload)(**sizes), target="local", policy=policy, plan=plan)
    return {
        "device": device.device_kind,
        "allocator_bytes": measured.peak_bytes if measured.sources["peak_bytes"] == "run" else None,
        "required_bytes": measured.required_bytes,
        "seconds": measured.seconds,
    }


def in_a_process(workload: str, sizes: dict[str, Any], *, policy: str | None, plan: str | None) -> dict[str, Any]:
    """The same, in a process of its own; what went wrong there is in `error`."""
    words = ["--one", workload, "--sizes", json.dumps(sizes)]
    words += ["--policy", policy] if policy else []
    words += ["--plan", plan] if plan else []
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    if chose_platform is None:
        environment.pop("JAX_PLATFORMS", None)  # set for planning; the device is what this is about
    command = [sys.executable, "-m", "benchmarks.device", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no word of why"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def rows_of(workload: str, sizes: dict[str, Any], *, target: str, share: float, folder: Path) -> list[dict[str, Any]]:
    """Every configuration of a workload, compiled for the target and run here."""
    work = getattr(workloads, workload)(**sizes)
    plain = rp.measure(work, target=target)
    compiled: dict[str, Measurement] = {"plain": plain}
    path: Path | None = folder / f"{workload}.json"
    try:
        compiled["per-block"] = rp.measure(work, target=target, policy="per-block")
        plan = rp.plan(work, budget=int(share * plain.required_bytes), target=target, finalists=1)
        plan.save(path, force=True)
        compiled["plan"] = rp.measure(work, target=target, plan=plan)
    except RematplanError as error:
        print(f"{workload}: {error}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for name, figures in compiled.items():
        policy = None if name == "plan" else name
        run = in_a_process(workload, sizes, policy=policy, plan=str(path) if name == "plan" else None)
        rows.append(
            {
                "workload": workload,
                "configuration": name,
                "compiled": {
                    "required_bytes": figures.required_bytes,
                    "peak_bytes": figures.peak_bytes,
                    "seconds": figures.seconds,
                },
                "run": run,
            }
        )
    return rows


def table(rows: list[dict[str, Any]], *, target: str) -> Table:
    """What was compiled beside what was run."""
    shown = Table(title=f"compiled for {target}, run on {device_of(rows)}")
    for column in ("workload", "configuration", "needs", "peak", "allocator", "ratio", "modelled", "measured", "ratio"):
        shown.add_column(column, justify="left" if column in ("workload", "configuration") else "right")
    for row in rows:
        said, run = row["compiled"], row["run"]
        if "error" in run:
            shown.add_row(row["workload"], row["configuration"], *[""] * 6, run["error"][:60])
            continue
        real = run["allocator_bytes"]
        modelled, measured = said["seconds"], run["seconds"]
        shown.add_row(
            row["workload"],
            row["configuration"],
            f"{said['required_bytes'] / MIB:.0f} MiB",
            f"{said['peak_bytes'] / MIB:.0f} MiB",
            f"{real / MIB:.0f} MiB" if real else "not told",
            f"{real / said['required_bytes']:.3f}" if real else "",
            f"{1e3 * modelled:.2f} ms" if modelled else "",
            f"{1e3 * measured:.2f} ms",
            f"{measured / modelled:.2f}" if modelled else "",
        )
    return shown


def device_of(rows: list[dict[str, Any]]) -> str:
    """The kind of device that ran them."""
    return next((row["run"]["device"] for row in rows if "device" in row["run"]), "no device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="gpu-h200", help="what to compile for: the chip that is in this machine")
    parser.add_argument("--workloads", default=",".join(SIZES), help="names, separated by commas")
    parser.add_argument("--share", type=float, default=0.6, help="the plan's budget, as a share of what no remat needs")
    parser.add_argument(
        "--sizes", type=json.loads, default={}, help="of the workloads, as JSON, in place of the usual ones"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("device.json"), help="where the figures go")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    given = {name: tuple(size) if isinstance(size, list) else size for name, size in chosen.sizes.items()}
    if chosen.one:
        print(json.dumps(here(chosen.one, given, policy=chosen.policy, plan=chosen.plan)))
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # planning leaves the device to those who run on it
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.workloads.split(","):
            if time.monotonic() - began > _ENOUGH_SECONDS:
                print(f"{name} and what follows it are left out: {_ENOUGH_SECONDS:.0f} s are over", file=sys.stderr)
                break
            rows += rows_of(name, given or SIZES[name], target=chosen.target, share=chosen.share, folder=Path(folder))
            chosen.output.write_text(json.dumps({"target": chosen.target, "rows": rows}, indent=1) + "\n")
    Console(width=140).print(table(rows, target=chosen.target))
    if rows and all(row["run"].get("allocator_bytes") is None for row in rows):
        print(f"{device_of(rows)} keeps no count of its memory, so that peaks are compiled ones only.")
    print(f"Wrote {chosen.output} after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
